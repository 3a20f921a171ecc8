"""Pretraining: the next token of every token, over packed text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jtrain.config.load import load_config
from jtrain.config.schema import Config
from jtrain.data.build import build_data
from jtrain.data.rows import IGNORE
from jtrain.data.tokenizers import load_tokenizer
from jtrain.errors import ConfigError
from jtrain.models.decoder import Decoder
from jtrain.observe.flops import TokenFlops, decoder_flops
from jtrain.ops.attention import chosen_kernel
from jtrain.ops.cross_entropy import cross_entropy_and_correct
from jtrain.tasks.decoder import check_tensor, decoder_config
from jtrain.tasks.sample import Sampler
from jtrain.train.callbacks import Callback
from jtrain.train.evaluation import Sums, perplexity
from jtrain.train.loss import Loss, LossFn
from jtrain.train.trainer import Trainer


class PretrainTrainer(Trainer):
    """Trains a decoder on text.

    Args:
      config: a Config, a YAML file, a recipe's name or a dict; None for the defaults.
      model: a preset's name, in place of `config.model.preset`.
      train_dataset: paths, in place of `config.data.train`; or rows, a list of dicts, a mapping of arrays with
        `input_ids`, `labels`, `segment_ids` and `position_ids` of [max_length].
      eval_dataset: the same, in place of `config.data.eval`.
      callbacks: called in this order.
      **sections: fields and sections of the config.
    """

    def __init__(
        self,
        config: Config | str | dict[str, Any] | None = None,
        *,
        model: str | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        callbacks: Sequence[Callback] = (),
        **sections: Any,
    ):
        config = _with_arguments(load_config(config, sections), model, train_dataset, eval_dataset)
        self.tokenizer = load_tokenizer(config.data.tokenizer)
        self.decoder = decoder_config(config, self.tokenizer)
        given = {"train": train_dataset, "eval": eval_dataset}
        rows = {name: None if _is_path(data) else data for name, data in given.items()}
        if rows["train"] is None:
            rows["train"], held_out = build_data(config, self.tokenizer)
            rows["eval"] = held_out if rows["eval"] is None else rows["eval"]
        loss = config.loss
        super().__init__(
            config,
            model=lambda rngs: Decoder(self.decoder, rngs),
            loss_fn=pretrain_loss(loss.label_smoothing, loss.z_loss, loss.chunk_size),
            train_data=rows["train"],
            eval_data=rows["eval"],
            callbacks=[*callbacks, _Sample()] if config.eval.sample_prompts else callbacks,
            compute_metrics=_text_metrics,
            predict_fn=_token_losses,
        )
        check_tensor(self.decoder, self.mesh.shape["tensor"])
        self.kernel = chosen_kernel(
            self.decoder.attention,
            platform=self.mesh.devices.flat[0].platform,
            length=config.max_length,
            head_dim=self.decoder.head_size,
            dtype=self.program.precision.compute_dtype,
        )

    def summary(self) -> list[str]:
        return [*super().summary(), f"attention: {self.kernel}"]

    @property
    def flops_per_token(self) -> TokenFlops:
        return decoder_flops(self.decoder, self.config.max_length)

    def sample(self, prompt: str, *, max_new_tokens: int = 64, temperature: float = 0.7, seed: int = 0) -> str:
        """Continues a text: short, with a full forward pass a token."""
        if self._sampler is None:
            self._sampler = Sampler(self.program)
        ids = self.tokenizer.encode_batch([prompt])[0] or [self.tokenizer.eos_id]
        new = self._sampler(
            self.state, ids, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed,
            stop=self.tokenizer.eos_id, length=self.config.max_length,
        )  # fmt: skip
        return self.tokenizer.decode(new)

    _sampler: Sampler | None = None


def pretrain_loss(label_smoothing: float = 0.0, z_loss: float = 0.0, chunk_size: int | None = None) -> LossFn:
    """The loss of next-token prediction: sum of cross-entropies in nats over the live labels.

    Evaluation (`rng` None) leaves out smoothing and z loss: `eval_loss` is the model's own cross-entropy.
    """

    def loss_fn(model: nnx.Module, batch: dict[str, jax.Array], rng: jax.Array | None) -> Loss:
        training = rng is not None
        hidden = model.hidden(  # type: ignore[attr-defined]
            batch["input_ids"],
            position_ids=batch["position_ids"],
            segment_ids=batch["segment_ids"],
            rng=rng,
            row=batch["row"],
            deterministic=not training,
        )
        loss, count, correct = cross_entropy_and_correct(
            hidden,
            model.head(),  # type: ignore[attr-defined]
            next_token(batch["labels"]),
            label_smoothing=label_smoothing if training else 0.0,
            z_loss=z_loss if training else 0.0,
            chunk_size=chunk_size,
        )
        metrics = {"mean_token_accuracy": (correct, count)}
        if not training and "bytes" in batch:
            metrics["_bytes"] = (batch["bytes"].sum(), jnp.int32(1))
        return Loss(loss, count, metrics)

    return loss_fn


def next_token(labels_BL: jax.Array) -> jax.Array:
    """Labels moved one place to the left: what each position has to predict [B, L]. The one shift there is."""
    return jnp.pad(labels_BL[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORE)


def _text_metrics(sums: Sums) -> dict[str, float]:
    loss, tokens = sums["loss"]
    metrics = {"perplexity": perplexity(loss / tokens)}
    text_bytes = sums.get("_bytes", (0.0, 0.0))[0]
    if text_bytes:
        metrics["bits_per_byte"] = loss / math.log(2) / text_bytes
    return metrics


def _token_losses(model: nnx.Module, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """For `predict`: the log-probability of every label [b, L] (at its own place), 0 where there is none."""
    logits = model(batch["input_ids"], (batch["segment_ids"] > 0).astype(jnp.int32), batch["position_ids"])  # type: ignore[operator]
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


def _with_arguments(config: Config, model: str | None, train: Any, held_out: Any) -> Config:
    changes: dict[str, Any] = {}
    if model is not None:
        changes["model"] = config.model.model_dump() | {"preset": model}
    data = config.data.model_dump()
    for name, given in (("train", train), ("eval", held_out)):
        if given is not None and _is_path(given):
            data[name] = [str(given)] if isinstance(given, str | Path) else [str(path) for path in given]
    if data != config.data.model_dump():
        changes["data"] = data
    config = load_config(config, changes) if changes else config
    if not config.data.train and _is_path(train):
        raise ConfigError(
            "data.train is empty: there is nothing to train on",
            "name files (--data.train corpus.txt), or try the recipe that brings its own: jtrain train demo",
        )
    return config
