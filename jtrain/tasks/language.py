"""What the trainers of decoders share: model and tokenizer, data from paths or memory, checks, generation, figures."""

from __future__ import annotations

import functools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import optax
from flax import nnx

from jtrain.config import load
from jtrain.config.schema import Config
from jtrain.data.build import build_data, build_eval
from jtrain.data.rows import Rows
from jtrain.data.texts import is_texts
from jtrain.errors import ConfigError
from jtrain.observe.flops import TokenFlops, decoder_flops
from jtrain.tasks.adapters import decoder_factory, lora_of
from jtrain.tasks.decoder import (
    attention_name,
    check_experts,
    check_language_model,
    check_pipeline,
    check_rows,
    check_tensor,
    experts_name,
)
from jtrain.tasks.generate import Generation, Generator, Stream
from jtrain.tasks.generation_request import GenerateOptions, as_prompts, prompt_ids, read_prompt
from jtrain.tasks.image_models import settle_images
from jtrain.tasks.language_loss import token_logprobs
from jtrain.tasks.roles import check_meshes, described, row_multiple
from jtrain.tasks.source import ModelSource, with_model
from jtrain.train.callbacks import Callback
from jtrain.train.evaluation import Sums, perplexity
from jtrain.train.loss import LossFn
from jtrain.train.step import StepHook
from jtrain.train.trainer import Trainer


class LanguageTrainer(Trainer, ABC):
    """A trainer of a decoder. A task says what its loss is, and what it reads of the data.

    Args:
      config: a Config, a YAML file, a recipe's name or a dict; None for the defaults of the task.
      model: a preset's name, or the path of a model (`model.path`); or fields of that section.
      train_dataset: paths, in place of `config.data.train`; or records: a list of dicts, a `datasets.Dataset`, any
        sequence of records; or rows of tokens: a sequence of dicts, or a mapping of arrays, with `input_ids`, `labels`,
        `segment_ids` and `position_ids` of [max_length].
      eval_dataset: the same, in place of `config.data.eval`.
      callbacks: called in this order.
      optimizer: any optax chain, in place of the config's optimizer and schedule; or the config's section.
      compute_metrics: `sums -> dict`, further evaluation figures from name -> (sum, count).
      step_hook: `step_hook(gradients, state, metrics) -> (gradients, metrics)`, traced into the step.
      **sections: fields and sections of the config.
    """

    task: ClassVar[str]
    """The config's `task`."""

    reads_images: ClassVar[bool] = False
    """Whether its rows may hold images."""

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
        config = _with_arguments(task_config(self.task, config, sections), model, train_dataset, eval_dataset)
        source = ModelSource(self.settle(config))
        self.adapt(source)
        self.tokenizer, self.decoder = source.tokenizer, source.decoder
        config = source.config = settle_images(
            source.config, self.decoder, self.tokenizer, task=self.task, reads=self.reads_images
        )
        rows, eval_rows = self.read_data(config, train_dataset, eval_dataset)
        super().__init__(
            config,
            model=decoder_factory(self.decoder, lora_of(config.model.lora)),
            loss_fn=self.make_loss(config),
            train_data=rows,
            eval_data=eval_rows,
            optimizer=optimizer,
            callbacks=[*callbacks, _Sample()] if config.eval.sample_prompts else callbacks,
            compute_metrics=lambda sums: self.figures_of(sums) | (compute_metrics(sums) if compute_metrics else {}),
            predict_fn=self.prediction,
            step_hook=step_hook,
            source=source,
        )
        for given in (self.train_rows, self.eval_rows):
            if given is not None:
                check_rows(given, config.max_length, self.decoder.vocab_size)
        check_meshes(self.config, self.program.batch.rows)
        check_tensor(self.decoder, self.mesh.shape["tensor"])
        check_experts(self.decoder, self.mesh.shape["expert"], self.mesh.shape["context"])
        check_pipeline(self.decoder, self.mesh.shape["pipeline"], config.pipeline.virtual_stages)
        self.experts = experts_name(self.decoder, self.mesh, self.program.precision.compute_dtype)
        self.kernel = attention_name(config, self.decoder, self.mesh, self.program.precision.compute_dtype)

    def settle(self, config: Config) -> Config:
        """The config as the task trains with it, before anything is made of it."""
        return config

    def adapt(self, source: ModelSource) -> None:
        """Changes the shape of the model that was found, where the task has another.

        Raises:
          ConfigError: it is none for this task.
        """
        check_language_model(source.decoder, f"model.path: {source.config.model.path}")

    def figures_of(self, sums: Sums) -> dict[str, float]:
        """The task's own figures of an evaluation, from name -> (sum, count)."""
        return text_metrics(sums)

    def prediction(self, model: nnx.Module, batch: dict[str, jax.Array]) -> Any:
        """What `predict` gives of a batch: arrays [b, ...]."""
        return token_logprobs(model, batch)

    @abstractmethod
    def make_loss(self, config: Config) -> LossFn:
        """The task's loss."""

    def read_data(self, config: Config, train: Any, held_out: Any) -> tuple[Any, Any]:
        """Rows for training and evaluation from what the config and the arguments name.

        Raises:
          ConfigError: a fraction of rows of tokens as evaluation data.
        """
        named = held_out is None or _is_path(held_out)  # then data.eval says it
        if train is None or _is_path(train) or is_texts(train):
            given = train if is_texts(train) else None
            rows, eval_rows = build_data(config, self.tokenizer, train=given, hold_out=named)
        elif named and isinstance(config.data.eval, float):
            raise ConfigError(
                f"data.eval: {config.data.eval} of rows of tokens: only texts can be divided", "pass eval_dataset"
            )
        else:
            rows = train
            eval_rows = build_eval(config, self.tokenizer, config.data.eval) if named and config.data.eval else None
        if not named:
            eval_rows = build_eval(config, self.tokenizer, held_out) if is_texts(held_out) else held_out
        return rows, eval_rows

    def summary(self) -> list[str]:
        lines = [*super().summary(), f"attention: {self.kernel}", *described(self.config, self.mesh)]
        return lines if self.experts is None else [*lines, f"experts: {self.experts}"]

    @property
    def row_multiple(self) -> int:
        return row_multiple(self.config, self.mesh)

    @property
    def flops_per_token(self) -> TokenFlops:
        return decoder_flops(self.decoder, self.config.max_length)

    def rows_of(self, data: Any) -> Rows:
        """Paths, records or rows of tokens as rows, in order."""
        if _is_path(data) or is_texts(data):
            return build_eval(self.config, self.tokenizer, _paths(data) if _is_path(data) else data)
        return super().rows_of(data)

    def generate(self, prompts: Any, *, stream: Stream | None = None, **options: Any) -> list[Generation]:
        """Continues prompts with the model as it is now; the arguments are those of `jtrain.generate`.

        The parameters are those of an evaluation: the moving average, where there is one and `eval.use_ema` says so.
        """
        read = [read_prompt(self.tokenizer, prompt) for prompt in as_prompts(prompts)]
        batch_size = options.pop("batch_size", 0)
        return self.generator(
            self._evaluated_params(),
            self.state.variables,
            [ids for ids, _ in read],
            GenerateOptions(**options),
            images=[images for _, images in read],
            batch_size=batch_size,
            stream=stream,
        )

    def sample(self, prompt: str, *, max_new_tokens: int = 64, temperature: float = 0.7, seed: int = 0) -> str:
        """Continues a text; see `generate`. Of a prompt that leaves no room the end is read."""
        ids = prompt_ids(self.tokenizer, prompt)
        room = self.decoder.max_position_embeddings
        new = min(max_new_tokens, room - 1)
        return self.generate(ids[new - room :], max_new_tokens=new, temperature=temperature, seed=seed)[0].text

    @functools.cached_property
    def generator(self) -> Generator:
        """The programs that continue prompts; parameters are their arguments."""

        def forward(function: Callable[..., Any], name: str) -> Callable[..., Any]:
            return self.program.forward(function)

        return Generator(self.decoder, self.tokenizer, self.mesh, self.program.rules, forward)


def text_metrics(sums: Sums) -> dict[str, float]:
    """Perplexity and, where the bytes are known, bits per byte."""
    loss, tokens = sums["loss"]
    if not tokens:  # not one target in the whole set
        return {}
    metrics = {"perplexity": perplexity(loss / tokens)}
    text_bytes = sums.get("_bytes", (0.0, 0.0))[0]
    if text_bytes:
        metrics["bits_per_byte"] = loss / math.log(2) / text_bytes
    return metrics


class _Sample(Callback):
    """Prints continuations of `eval.sample_prompts` when the run ends."""

    def on_fit_end(self, trainer: Trainer) -> None:
        assert isinstance(trainer, LanguageTrainer)
        section = trainer.config.eval
        for number, prompt in enumerate(section.sample_prompts):
            text = trainer.sample(
                prompt,
                max_new_tokens=section.sample_tokens,
                temperature=section.sample_temperature,
                seed=trainer.config.seed + number,
            )
            trainer.say(f"--- sample\n{prompt}{text}\n---")


def task_config(task: str, config: Config | str | dict[str, Any] | None, sections: dict[str, Any]) -> Config:
    """The config of a trainer of this task, with the task's defaults.

    Raises:
      ConfigError: it names another task.
    """
    named = load.from_source(config).values.get("task", task)
    if named != task:
        raise ConfigError(f"task: {named}, and this is the trainer of {task}", f"Leave it out, or write task: {task}.")
    return load.load_config(config, sections | {"task": task})


def _is_path(data: Any) -> bool:
    if isinstance(data, str | Path) or data is None:
        return True
    return isinstance(data, list | tuple) and bool(data) and all(isinstance(item, str | Path) for item in data)


def records_of(data: Any) -> list[Any] | None:
    """Paths, or records in memory as the one source; None for rows of tokens."""
    if data is not None and _is_path(data):
        return [*_paths(data)]
    return [data] if is_texts(data) else None


def eval_sources(config: Config, train: Any, held_out: Any) -> list[Any]:
    """What the evaluation rows are made of: a path, or records in memory, for each of their sources."""
    if held_out is not None and not _is_path(held_out):
        return records_of(held_out) or []
    if isinstance(config.data.eval, float):
        return records_of(train) or [*config.data.train]
    return [*config.data.eval] if config.data.eval else []


def _paths(data: Any) -> list[str]:
    return [str(data)] if isinstance(data, str | Path) else [str(path) for path in data]


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
    config = load.load_config(config, changes) if changes else config
    if not config.data.train and _is_path(train):
        raise ConfigError(
            "data.train is empty: there is nothing to train on",
            "name files (--data.train corpus.txt), or try the recipe that brings its own: jtrain train demo",
        )
    return config
