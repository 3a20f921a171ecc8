"""Pretraining: the next token of every token, over packed text."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jtrain.config.load import load_config
from jtrain.config.schema import Config
from jtrain.data.build import build_data, build_eval
from jtrain.data.rows import IGNORE, Rows
from jtrain.data.texts import is_texts
from jtrain.data.tokenizers import Tokenizer
from jtrain.errors import ConfigError
from jtrain.models.decoder import Decoder
from jtrain.observe.flops import TokenFlops, decoder_flops
from jtrain.ops.cross_entropy import cross_entropy_and_correct, soft_cap
from jtrain.ops.zigzag import to_zigzag, zigzag_order
from jtrain.tasks.adapters import decoder_factory, lora_of
from jtrain.tasks.decoder import (
    attention_name,
    check_experts,
    check_pipeline,
    check_rows,
    check_tensor,
    experts_name,
)
from jtrain.tasks.generate import Generation, Generator, Stream
from jtrain.tasks.generation_request import GenerateOptions, as_prompts, prompt_ids
from jtrain.tasks.router_losses import router_losses
from jtrain.tasks.source import ModelSource, with_model
from jtrain.train.callbacks import Callback
from jtrain.train.evaluation import Sums, perplexity
from jtrain.train.loss import Loss, LossFn
from jtrain.train.step import StepHook
from jtrain.train.trainer import Trainer


class PretrainTrainer(Trainer):
    """Trains a decoder on text.

    Args:
      config: a Config, a YAML file, a recipe's name or a dict; None for the defaults.
      model: a preset's name, or the path of a model (`model.path`); or fields of that section.
      train_dataset: paths, in place of `config.data.train`; or texts: a list of dicts, a `datasets.Dataset`, any
        sequence of records with the field `data.text_field`; or rows of tokens: a sequence of dicts, or a mapping of
        arrays, with `input_ids`, `labels`, `segment_ids` and `position_ids` of [max_length].
      eval_dataset: the same, in place of `config.data.eval`.
      callbacks: called in this order.
      optimizer: any optax chain, in place of the config's optimizer and schedule; or the config's section.
      compute_metrics: `sums -> dict`, further evaluation figures from name -> (sum, count).
      step_hook: `step_hook(gradients, state, metrics) -> (gradients, metrics)`, traced into the step.
      **sections: fields and sections of the config.
    """

    def __init__(
        self,
        config: Config | str | dict[str, Any] | None = None,
        *,
        model: str | os.PathLike[str] | dict[str, Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        callbacks: Sequence[Callback] = (),
        optimizer: optax.GradientTransformation | Any = None,
        compute_metrics: Callable[[Sums], dict[str, float]] | None = None,
        step_hook: StepHook | None = None,
        **sections: Any,
    ):
        config = _with_arguments(load_config(config, sections), model, train_dataset, eval_dataset)
        self.source = ModelSource(config)
        config, self.tokenizer, self.decoder = self.source.config, self.source.tokenizer, self.source.decoder
        rows, eval_rows = _rows(config, self.tokenizer, train_dataset, eval_dataset)
        loss = config.loss
        super().__init__(
            config,
            model=decoder_factory(self.decoder, lora_of(config.model.lora)),
            loss_fn=pretrain_loss(loss.label_smoothing, loss.z_loss, loss.chunk_size),
            train_data=rows,
            eval_data=eval_rows,
            optimizer=optimizer,
            callbacks=[*callbacks, _Sample()] if config.eval.sample_prompts else callbacks,
            compute_metrics=lambda sums: _text_metrics(sums) | (compute_metrics(sums) if compute_metrics else {}),
            predict_fn=_token_losses,
            step_hook=step_hook,
            source=self.source,
        )
        for given in (self.train_rows, self.eval_rows):
            if given is not None:
                check_rows(given, config.max_length, self.decoder.vocab_size)
        check_tensor(self.decoder, self.mesh.shape["tensor"])
        check_experts(self.decoder, self.mesh.shape["expert"], self.mesh.shape["context"])
        check_pipeline(self.decoder, self.mesh.shape["pipeline"], config.pipeline.virtual_stages)
        self.experts = experts_name(self.decoder, self.mesh, self.program.precision.compute_dtype)
        self.kernel = attention_name(config, self.decoder, self.mesh, self.program.precision.compute_dtype)

    def summary(self) -> list[str]:
        lines = [*super().summary(), f"attention: {self.kernel}"]
        return lines if self.experts is None else [*lines, f"experts: {self.experts}"]

    @property
    def flops_per_token(self) -> TokenFlops:
        return decoder_flops(self.decoder, self.config.max_length)

    def rows_of(self, data: Any) -> Rows:
        """Paths, texts or rows of tokens as rows, in order."""
        if _is_path(data) or is_texts(data):
            return build_eval(self.config, self.tokenizer, _paths(data) if _is_path(data) else data)
        return super().rows_of(data)

    def generate(self, prompts: Any, *, stream: Stream | None = None, **options: Any) -> list[Generation]:
        """Continues prompts with the model as it is now; the arguments are those of `jtrain.generate`.

        The parameters are those of an evaluation: the moving average, where there is one and `eval.use_ema` says so.
        """
        if self._generator is None:
            self._generator = Generator(self.decoder, self.tokenizer, self.mesh, self.program.rules, self._forward)
        ids = [prompt_ids(self.tokenizer, prompt) for prompt in as_prompts(prompts)]
        batch_size = options.pop("batch_size", 0)
        return self._generator(
            self._evaluated_params(),
            self.state.variables,
            ids,
            GenerateOptions(**options),
            batch_size=batch_size,
            stream=stream,
        )

    def sample(self, prompt: str, *, max_new_tokens: int = 64, temperature: float = 0.7, seed: int = 0) -> str:
        """Continues a text; see `generate`. Of a prompt that leaves no room the end is read."""
        ids = prompt_ids(self.tokenizer, prompt)
        room = self.decoder.max_position_embeddings
        new = min(max_new_tokens, room - 1)
        return self.generate(ids[new - room :], max_new_tokens=new, temperature=temperature, seed=seed)[0].text

    def _forward(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        return self.program.forward(function)

    _generator: Generator | None = None


def pretrain_loss(label_smoothing: float = 0.0, z_loss: float = 0.0, chunk_size: int | None = None) -> LossFn:
    """The loss of next-token prediction: sum of cross-entropies in nats over the live labels.

    A mixture of experts adds the losses of its routers. Evaluation (`rng` None) leaves them out, and smoothing and z
    loss as well: `eval_loss` is the model's own cross-entropy.
    """

    def loss_fn(model: nnx.Module, batch: dict[str, jax.Array], rng: jax.Array | None) -> Loss:
        training = rng is not None
        # Any model with `hidden` and `head` will do; ours say more.
        decoder = model if isinstance(model, Decoder) else None
        # A sum does not mind the order of its terms: tokens go where every device of `context` does the same work.
        ways = 1 if decoder is None else decoder.balanced_ways(batch["input_ids"].shape[1])
        ids, positions, segments, targets = (
            to_zigzag(x, ways)
            for x in (batch["input_ids"], batch["position_ids"], batch["segment_ids"], next_token(batch["labels"]))
        )
        with zigzag_order(ways):
            arguments = {"position_ids": positions, "segment_ids": segments, "rng": rng, "row": batch["row"]}
            if decoder is not None:
                hidden, router = decoder.hidden_and_router(ids, **arguments, deterministic=not training)
            else:
                hidden, router = model.hidden(ids, **arguments, deterministic=not training), None  # type: ignore[attr-defined]
        loss, count, correct = cross_entropy_and_correct(
            hidden,
            model.head(),  # type: ignore[attr-defined]
            targets,
            label_smoothing=label_smoothing if training else 0.0,
            z_loss=z_loss if training else 0.0,
            softcap=_softcap(model),
            chunk_size=chunk_size,
        )
        metrics = {"mean_token_accuracy": (correct, count)}
        if training and router is not None:
            config = model.config
            added, figures = router_losses(config, router, (targets != IGNORE).sum(1))
            loss, metrics = loss + added.astype(loss.dtype), metrics | figures
        if not training and "bytes" in batch:
            metrics["_bytes"] = (batch["bytes"].sum(), jnp.int32(1))
        return Loss(loss, count, metrics)

    return loss_fn


def next_token(labels_BL: jax.Array) -> jax.Array:
    """Labels moved one place to the left: what each position has to predict [B, L]. The one shift there is."""
    return jnp.pad(labels_BL[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORE)


def _text_metrics(sums: Sums) -> dict[str, float]:
    loss, tokens = sums["loss"]
    if not tokens:  # not one target in the whole set
        return {}
    metrics = {"perplexity": perplexity(loss / tokens)}
    text_bytes = sums.get("_bytes", (0.0, 0.0))[0]
    if text_bytes:
        metrics["bits_per_byte"] = loss / math.log(2) / text_bytes
    return metrics


def _softcap(model: nnx.Module) -> float | None:
    """The bound of the logits of a decoder; a model of one's own has `hidden` and `head` and nothing more to say."""
    return model.config.final_logit_softcapping if isinstance(model, Decoder) else None


def _token_losses(model: nnx.Module, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """For `predict`: the log-probability of every label [b, L] (at its own place), 0 where there is none."""
    hidden = model.hidden(  # type: ignore[attr-defined]
        batch["input_ids"], position_ids=batch["position_ids"], segment_ids=batch["segment_ids"]
    )
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    logits = jnp.einsum("bld,dv->blv", hidden, model.head(), preferred_element_type=wide)  # type: ignore[attr-defined]
    logits = soft_cap(logits, _softcap(model))
    targets = next_token(batch["labels"])
    live = targets != IGNORE
    logprobs = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(logprobs, jnp.where(live, targets, 0)[..., None], axis=-1)[..., 0]
    return {"logprobs": jnp.pad(jnp.where(live, chosen, 0.0)[:, :-1], ((0, 0), (1, 0)))}


class _Sample(Callback):
    """Prints continuations of `eval.sample_prompts` when the run ends."""

    def on_fit_end(self, trainer: Trainer) -> None:
        assert isinstance(trainer, PretrainTrainer)
        section = trainer.config.eval
        for number, prompt in enumerate(section.sample_prompts):
            text = trainer.sample(
                prompt,
                max_new_tokens=section.sample_tokens,
                temperature=section.sample_temperature,
                seed=trainer.config.seed + number,
            )
            trainer.say(f"--- sample\n{prompt}{text}\n---")


def _is_path(data: Any) -> bool:
    if isinstance(data, str | Path) or data is None:
        return True
    return isinstance(data, list | tuple) and bool(data) and all(isinstance(item, str | Path) for item in data)


def _paths(data: Any) -> list[str]:
    return [str(data)] if isinstance(data, str | Path) else [str(path) for path in data]


def _rows(config: Config, tokenizer: Tokenizer, train: Any, held_out: Any) -> tuple[Any, Any]:
    """Rows for training and evaluation from what the config and the arguments name."""
    named = held_out is None or _is_path(held_out)  # then data.eval says it
    if train is None or _is_path(train) or is_texts(train):
        rows, eval_rows = build_data(config, tokenizer, train=train if is_texts(train) else None, hold_out=named)
    elif named and isinstance(config.data.eval, float):
        raise ConfigError(
            f"data.eval: {config.data.eval} of rows of tokens: only texts can be divided", "pass eval_dataset"
        )
    else:
        rows = train
        eval_rows = build_eval(config, tokenizer, config.data.eval) if named and config.data.eval else None
    if not named:
        eval_rows = build_eval(config, tokenizer, held_out) if is_texts(held_out) else held_out
    return rows, eval_rows


def _with_arguments(config: Config, model: Any, train: Any, held_out: Any) -> Config:
    changes: dict[str, Any] = {}
    if model is not None:
        changes["model"] = with_model(config.model, model)
    data = config.data.model_dump()
    for name, given in (("train", train), ("eval", held_out)):
        if given is not None and _is_path(given):
            data[name] = _paths(given)
    if data != config.data.model_dump():
        changes["data"] = data
    config = load_config(config, changes) if changes else config
    if not config.data.train and _is_path(train):
        raise ConfigError(
            "data.train is empty: there is nothing to train on",
            "name files (--data.train corpus.txt), or try the recipe that brings its own: jtrain train demo",
        )
    return config
