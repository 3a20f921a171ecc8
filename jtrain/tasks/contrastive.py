"""Contrastive training of images with texts: CLIP and SigLIP."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jtrain.config.rules import slices_by_themselves
from jtrain.config.schema import Config
from jtrain.data.image_texts import Fields, ImageTextRows, Pair, read_pairs
from jtrain.data.rows import Batch
from jtrain.errors import ConfigError
from jtrain.models.dual_encoder import DualEncoder, DualEncoderConfig, normalised
from jtrain.models.dual_presets import DUAL_PRESETS
from jtrain.ops.contrastive import Kind, contrastive, used_scale
from jtrain.parallel.mesh import data_ranks
from jtrain.tasks.contrastive_loss import contrastive_loss_fn, embeddings, whole_batch
from jtrain.tasks.decoder import check_pipeline, check_tensor
from jtrain.tasks.dual_encoder import encoder_of
from jtrain.tasks.dual_source import DualSource
from jtrain.tasks.language import task_config
from jtrain.tasks.retrieval import recalls, zero_shot
from jtrain.train.callbacks import Callback
from jtrain.train.evaluation import Sums
from jtrain.train.prediction import first_micro_batch, outputs_of
from jtrain.train.step import StepHook
from jtrain.train.trainer import Trainer


class ContrastiveTrainer(Trainer):
    """Trains a model of images and texts; every image of a batch meets every text of it, on any mesh.

    Args:
      config: a Config, a YAML file, a recipe's name or a dict; None for the defaults of the task.
      model: a preset's name (clip-tiny, siglip-base-patch16-224, ...), or the path of a model (`model.path`); or fields
        of that section.
      train_dataset: paths, in place of `config.data.train`; or records, a `datasets.Dataset`, a mapping of arrays: see
        `jtrain/data/image_texts.py`.
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
        config = task_config("contrastive", config, sections | ({} if model is None else {"model": _section(model)}))
        source = DualSource(config)
        self.source, config, self.shape = source, source.config, source.shape
        self.tokenizer, self.loss_kind = source.tokenizer, _loss_kind(config, source.shape)
        self.encode = encoder_of(self.shape, self.tokenizer, config.max_length)
        section = config.contrastive
        self.fields = Fields(
            section.image_field, config.data.text_field, section.label_field, section.classes, section.templates
        )
        self._threads = config.data.num_workers
        rows, eval_rows = self._read(config, train_dataset, eval_dataset)
        equal = section.equal_texts == "positives"
        super().__init__(
            config,
            model=lambda rngs: DualEncoder(source.shape, rngs),
            loss_fn=contrastive_loss_fn(self.loss_kind, equal_texts=equal),
            train_data=rows,
            eval_data=eval_rows,
            optimizer=optimizer,
            callbacks=callbacks,
            compute_metrics=compute_metrics,
            predict_fn=embeddings,
            step_hook=step_hook,
            source=source,
        )
        check_tensor(self.shape.text, self.mesh.shape["tensor"])
        check_tensor(self.shape.vision.blocks, self.mesh.shape["tensor"])
        check_pipeline(self.shape.text, self.mesh.shape["pipeline"], config.pipeline.virtual_stages)
        parts = self.program.batch.accumulation > 1 or self.program.pipeline is not None
        self._whole: Callable[..., Batch] | None = None
        if parts or slices_by_themselves(config):
            self._whole = self.program.forward(whole_batch(self.loss_kind, config.seed, equal_texts=equal))
        self._embed = self.program.forward(first_micro_batch(_evaluated))
        self._embed_texts = self.program.forward(first_micro_batch(_text_embeddings))

    # -- data

    def _read(self, config: Config, train: Any, held_out: Any) -> tuple[ImageTextRows, ImageTextRows | None]:
        sources = config.data.train if train is None else _sources(train)
        if not sources:
            raise ConfigError(
                "data.train is empty: there is nothing to train on",
                "name files (--data.train pairs.jsonl), or try the recipe that brings its own: jtrain train digits",
            )
        field = "data.train" if train is None else "train_dataset"
        parts = [read_pairs(source, self.fields, field=field) for source in sources]
        named = config.data.eval if held_out is None else held_out
        kept: list[Pair] | None = None
        if isinstance(named, float):
            kept = []
            for place, part in enumerate(parts):
                count = round(len(part) * named)
                if not 0 < count < len(part):
                    raise ConfigError(
                        f"data.eval: {named} of {len(part)} records leaves {count}", "Write another fraction."
                    )
                kept += part[len(part) - count :]
                parts[place] = part[: len(part) - count]
        elif named is not None:
            of = "data.eval" if held_out is None else "eval_dataset"
            kept = [pair for one in _sources(named) for pair in read_pairs(one, self.fields, field=of)]
        pairs = [pair for part in parts for pair in part]
        return self._rows(pairs, config), None if kept is None else self._rows(kept, None)

    def _rows(self, pairs: Sequence[Pair], config: Config | None) -> ImageTextRows:
        """Rows of a stream, or (config: None) once in order."""
        vision = self.shape.vision
        size = (vision.image_size, vision.image_size, vision.num_channels)
        seed, shuffle = (None, False) if config is None else (config.seed, config.data.shuffle)
        options: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "threads": self._threads}
        return ImageTextRows(pairs, self.encode, self.source.transform, size, **options)

    def rows_of(self, data: Any) -> Any:
        """Paths, records or arrays as rows, in order."""
        if isinstance(data, ImageTextRows):
            return data
        return self._rows([pair for one in _sources(data) for pair in read_pairs(one, self.fields, field="data")], None)

    # -- the step

    def prepare(self, batch: dict[str, jax.Array], params: Any, variables: Any) -> dict[str, jax.Array]:
        """The batch with what the parts of a step read of the whole, where a step has parts."""
        if self._whole is None:
            return batch
        state, sharding = self.state, self.program.batch_sharding
        added = self._whole(params, variables, batch, state.step + state.skipped)
        place = NamedSharding(sharding.mesh, PartitionSpec(*tuple(sharding.spec)[:2]))
        return batch | {name: jax.device_put(x, place) for name, x in added.items()}

    # -- evaluation

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Evaluates over all pairs at once: the figures hang on no batch size.

        Returns:
          `eval_loss` with all pairs of the set as negatives; `eval_image_to_text_recall_1` and `_5`: how often a text
          of the image (or an equal one) is among the 1 or 5 nearest of all; `eval_text_to_image_recall_1` and `_5`;
          `eval_zero_shot_accuracy` where the classes are known: how often the prompts of an image's class are nearest;
          `eval_logit_scale`; and the computed ones.
        """
        rows = self.eval_rows if data is None else self.rows_of(data)
        if rows is None:
            raise ConfigError("there is no evaluation data", "pass eval_dataset, or set data.eval")
        sums = self._sums(rows)
        metrics = {f"eval_{name}": total / count for name, (total, count) in sums.items() if count}
        if self._compute_metrics is not None:
            metrics |= {name: float(value) for name, value in self._compute_metrics(sums).items()}
        if data is None:
            self.log("eval", metrics)
        return metrics

    def _sums(self, rows: ImageTextRows) -> Sums:
        config = self.config
        size = config.eval.batch_size or self.program.batch.rows
        limit = int(config.fast_dev_run) or config.eval.max_batches
        if limit and limit * size < len(rows):
            rows = rows.first(limit * size)
        params, variables = self._evaluated_params(), self.state.variables
        run: Callable[[Any], Any] = lambda batch: self._embed(params, variables, batch)  # noqa: E731
        found = outputs_of(run, rows, self._filled(size), self.program.batch_sharding)
        keys, labels = found["text_key"], found["label"]
        partner = np.ascontiguousarray(keys).view(np.int64)[:, 0]
        scale, bias = self._scale(params, variables)
        equal = config.contrastive.equal_texts == "positives"
        pairs = jax.jit(contrastive, static_argnums=0, static_argnames="equal_texts")(
            self.loss_kind, found["image"], found["text"], scale, bias, keys, equal_texts=equal
        )[0]
        count = float(len(rows))
        sums: Sums = {"loss": (float(np.asarray(pairs.loss, np.float64).sum()), count)}
        for name, one, other in (("image_to_text", "image", "text"), ("text_to_image", "text", "image")):
            for k, hits in recalls(found[one], found[other], partner).items():
                sums[f"{name}_recall_{k}"] = hits
        if (labels >= 0).any():
            sums["zero_shot_accuracy"] = zero_shot(found["image"], self._prompts(params, variables, size), labels)
        sums["logit_scale"] = (float(used_scale(self.loss_kind, scale)) * count, count)
        return sums

    def _filled(self, size: int) -> int:
        """Rows of a batch that the mesh can divide."""
        ranks = data_ranks(self.mesh)
        return -(-size // ranks) * ranks

    def _scale(self, params: Any, variables: Any) -> tuple[np.ndarray, np.ndarray]:
        read = self.program.forward(lambda module: module.scale_and_bias())
        scale, bias = read(params, variables)
        return np.asarray(scale.addressable_data(0)), np.asarray(bias.addressable_data(0))

    def _prompts(self, params: Any, variables: Any, size: int) -> np.ndarray:
        """Embeddings of every template of every class [C, templates, D]."""
        texts = [text for label in range(len(self.fields.classes)) for text in self.fields.texts_of_class(label)]
        rows = _Prompts(self.encode(texts))
        run: Callable[[Any], Any] = lambda batch: self._embed_texts(params, variables, batch)  # noqa: E731
        found = outputs_of(run, rows, self._filled(min(size, len(texts))), self.program.batch_sharding)
        return found.reshape(len(self.fields.classes), len(self.fields.templates), -1)

    def summary(self) -> list[str]:
        rows, shape, vision = self.train_rows, self.shape, self.shape.vision
        size = vision.image_size
        return [
            *super().summary(),
            f"{shape.kind}, loss {self.loss_kind}",
            f"images {size} x {size} in {vision.tokens} tokens, texts of {self.encode.length}",
            *([] if rows is None else [f"train: {len(rows):,} pairs"]),
            *([] if self.eval_rows is None else [f"eval: {len(self.eval_rows):,} pairs"]),
        ]


class _Prompts:
    """Tokens of texts as rows; those past their end repeat the last."""

    def __init__(self, ids: np.ndarray):
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def rows(self, indices: np.ndarray) -> Batch:
        return {"input_ids": self._ids[np.minimum(indices, len(self) - 1)]}


def _evaluated(model: nnx.Module, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return embeddings(model, batch) | {name: batch[name] for name in ("text_key", "label")}


def _text_embeddings(model: nnx.Module, batch: dict[str, jax.Array]) -> jax.Array:
    assert isinstance(model, DualEncoder)
    return normalised(model.encode_text(batch["input_ids"]))


def _loss_kind(config: Config, shape: DualEncoderConfig) -> Kind:
    kind = config.contrastive.loss
    if kind == "auto":
        return shape.kind
    if kind == "siglip" and shape.kind == "clip":
        raise ConfigError(
            "contrastive.loss: siglip with a CLIP model, which has no bias of the scores",
            "Write contrastive.loss: clip, or take a SigLIP model (model.preset: siglip-tiny).",
        )
    return kind


def _sources(data: Any) -> Sequence[Any]:
    """Paths one by one; other data as it is, as one source."""
    if isinstance(data, str | os.PathLike):
        return [os.fspath(data)]
    if isinstance(data, Mapping):
        return [data]
    if isinstance(data, list | tuple) and data and all(isinstance(item, str | os.PathLike) for item in data):
        return [os.fspath(item) for item in data]
    return [data]


def _section(model: Any) -> dict[str, Any]:
    """The argument `model` as fields of the config's section."""
    if isinstance(model, Mapping):
        return dict(model)
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(f"model: a {type(model).__name__}", "name a preset or a folder")
    text = os.fspath(model)
    return {"preset": text} if text in DUAL_PRESETS else {"path": text}
