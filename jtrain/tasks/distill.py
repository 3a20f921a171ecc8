"""Distillation: a student learns the distributions of a teacher, on data or on its own completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jtrain.checkpoint import layout
from jtrain.config.schema import Config
from jtrain.data.rows import EvalRows, TrainRows
from jtrain.errors import CheckpointError, ConfigError
from jtrain.ops.logical import activation_spec
from jtrain.parallel import processes
from jtrain.tasks.completions import NumberedRows, completed, drawing_seed, is_on_policy, shortened
from jtrain.tasks.distill_loss import distill_loss, distillation_of, known_names, teacher_numbers
from jtrain.tasks.generate import Generator
from jtrain.tasks.generation_request import GenerateOptions
from jtrain.tasks.language import text_metrics
from jtrain.tasks.opened import Opened
from jtrain.tasks.reference import model_digest
from jtrain.tasks.roles import RoleModel, load_role, open_role, row_multiple
from jtrain.tasks.sft import SFTTrainer
from jtrain.tasks.source import ModelSource
from jtrain.tasks.teacher_table import (
    KeptTable,
    TeacherRows,
    TeacherTable,
    make_table,
    open_everywhere,
    read_kept,
    table_folder,
    table_name,
    write_kept,
)
from jtrain.train.evaluation import Sums
from jtrain.train.loss import LossFn

_READ = ("input_ids", "position_ids", "segment_ids", "labels")
"""What the teacher reads of a batch."""
_LOOKED_AT = 1 << 20
"""Tokens of a source among which one at least belongs to a prompt."""


class DistillTrainer(SFTTrainer):
    """Trains a decoder to say what a teacher says (`distill.teacher`), which has the same tokenizer.

    Records, masks and packing are SFT's: only places with a live label count. The loss is a divergence of the student's
    distributions from the teacher's (`jtrain/ops/divergence.py`). The teacher is frozen; its numbers are computed
    before every step on the mesh of the role `teacher`, or once (`distill.precompute_teacher`). Some of the steps train
    on the student's own completions (`distill.on_policy_fraction`), the others on the data's, or on the teacher's
    (`distill.seq_kd`). The other arguments are `SFTTrainer`'s.

    Logged: `kl`, `nll`, `entropy`, `mean_token_accuracy`, `agreement` (places where both have the same likeliest
    token), `teacher_nll`, `teacher_entropy`, `on_policy` (share of the rows), and what `SFTTrainer` logs.
    """

    task = "distill"
    reads_images = False

    def __init__(self, *args: Any, **keywords: Any):
        self._teacher: RoleModel | None = None
        self._score: Callable[..., dict[str, jax.Array]] | None = None
        self._teacher_generator: Generator | None = None
        super().__init__(*args, **keywords)
        section = self.config.distill
        if section.precompute_teacher:
            self.train_rows, self.eval_rows = (
                None if rows is None else _with_table(name, rows)
                for name, rows in (("train", self.train_rows), ("eval", self.eval_rows))
            )
        if self._generates and self.train_rows is not None:
            _check_prompts(self.train_rows)
            self.train_rows = NumberedRows(self.train_rows, self.program.batch.total)

    # -- what is particular: config, loss, figures

    def settle(self, config: Config) -> Config:
        path = config.distill.teacher
        if path is None:
            raise ConfigError(
                "distill.teacher is missing: there is nobody to learn from",
                "Write distill.teacher: with the folder of a model that has the student's tokenizer "
                "(--distill.teacher DIR).",
            )
        self._opened: Opened = open_role(path, "distill.teacher")
        if self._opened.decoder.num_labels:
            raise ConfigError(
                f"distill.teacher: {path} is a classifier, which has no distributions of tokens",
                "Name a language model.",
            )
        if self._opened.decoder.images is not None:
            raise ConfigError(
                f"distill.teacher: {path} is a model that sees: a teacher reads text alone",
                "Name a model of text with the student's tokenizer.",
            )
        self._any_length = "max_length" not in config.model_fields_set
        if config.model.path is None and config.data.tokenizer is None:  # then it is the teacher's
            theirs = self._opened.tokenizer()
            if theirs is not None:
                data, model = config.data.model_copy(update={"tokenizer": theirs.spec}), config.model
                size = self._opened.decoder.vocab_size
                if model.vocab_size is None and size > theirs.vocab_size:  # its table is padded: so is the student's
                    model = model.model_copy(update={"vocab_size": size})
                config = config.model_copy(update={"data": data, "model": model})
        return config

    def adapt(self, source: ModelSource) -> None:
        """Rows are as long as both models take, where nobody says how long."""
        super().adapt(source)
        limit, length = self._opened.decoder.max_position_embeddings, source.config.max_length
        if length <= limit:
            return
        if not self._any_length:
            raise ConfigError(
                f"max_length: {length}, and distill.teacher: {source.config.distill.teacher} takes {limit} tokens",
                f"Write max_length: {limit} (or less).",
            )
        source.config = source.config.model_copy(update={"max_length": limit})

    def make_loss(self, config: Config) -> LossFn:
        self.distillation = distillation_of(config)
        return distill_loss(self.distillation, noise_alpha=config.sft.neftune_noise_alpha)

    def figures_of(self, sums: Sums) -> dict[str, float]:
        return text_metrics(sums | {"loss": sums["nll"]})

    def summary(self) -> list[str]:
        section, vocab = self.config.distill, self.decoder.vocab_size
        known = section.top_k if 0 < section.top_k < vocab else vocab
        loss = f"{section.loss} (beta {section.beta:g})" if section.loss == "jsd" else section.loss
        lines = [f"loss: {loss}", f"teacher: {section.teacher}, {known:,} log-probabilities a token"]
        if section.precompute_teacher:
            lines[-1] += ", precomputed"
        if self._generates:
            others = "the teacher's" if section.seq_kd else "those of the data"
            lines.append(
                f"completions: the student's own in {section.on_policy_fraction:.0%} of the steps, else {others}"
            )
        return [*super().summary(), *lines]

    # -- completions

    @property
    def _generates(self) -> bool:
        section = self.config.distill
        return bool(section.on_policy_fraction) or section.seq_kd

    def prepare(self, batch: dict[str, jax.Array], params: Any, variables: Any) -> dict[str, jax.Array]:
        if "batch_number" in batch:
            number = int(np.asarray(batch["batch_number"].addressable_shards[0].data).flat[0])
            batch = self._with_completions(
                {name: x for name, x in batch.items() if name != "batch_number"}, number, params, variables
            )
        if not all(name in batch for name in known_names(self.distillation, self.decoder.vocab_size)):
            batch = batch | self._of_teacher(batch)
        return batch

    def _with_completions(
        self, batch: dict[str, jax.Array], number: int, params: Any, variables: Any
    ) -> dict[str, jax.Array]:
        """A batch of training rows, with completions that are drawn now where its number says so."""
        config, section, rows = self.config, self.config.distill, self.train_rows
        assert isinstance(rows, NumberedRows)
        own = is_on_policy(config.seed, number, section.on_policy_fraction)
        if own or section.seq_kd:

            def complete(prompts: Sequence[Sequence[int]], seed: int) -> list[list[int]]:
                options = GenerateOptions(section.max_completion_length, section.sampling_temperature, seed=seed)
                generator, weights = self._generator_of(own, params, variables)
                found = generator(*weights, prompts, options, batch_size=self.program.batch.rows)
                return [one.ids for one in found]

            drawn = completed(
                rows.batch(number),
                complete,
                drawing_seed(config.seed, number),
                longest_prompt=config.max_length - section.max_completion_length,
                pad_id=self.tokenizer.pad_id,
            )
            batch = batch | self._on_devices(shortened(drawn, getattr(rows, "buckets", ())))
        if section.on_policy_fraction:
            size = self.program.batch.total
            batch = batch | self._on_devices({"on_policy": np.full(size, own, np.int32)})
        return batch

    def _generator_of(self, student: bool, params: Any, variables: Any) -> tuple[Generator, tuple[Any, Any]]:
        """Who completes, and its weights."""
        if student:
            return self.generator, (params, variables)
        if self._teacher_generator is None:
            role = self.teacher
            self._teacher_generator = Generator(
                self._opened.decoder,
                self.tokenizer,
                role.mesh,
                role.rules,
                lambda function, name: role.forward(function),
            )
        return self._teacher_generator, (self.teacher.params, self.teacher.variables)

    def _on_devices(self, host: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Arrays [n, ...] of all rows of a step as [A, b, ...], where the loader would put them."""
        batch, spec = self.program.batch, tuple(self.program.batch_sharding.spec)

        def put(values: np.ndarray) -> jax.Array:
            values = values.reshape(batch.accumulation, batch.rows, *values.shape[1:])
            place = NamedSharding(self.mesh, PartitionSpec(*spec[: values.ndim]))
            return jax.make_array_from_callback(values.shape, place, lambda index: values[index])

        return {name: put(values) for name, values in host.items()}

    # -- the teacher

    def _of_teacher(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The teacher's numbers at the places of a batch, where the step reads them."""
        if self._score is None:
            self._score = self.teacher.jit(teacher_numbers(self.distillation))
        found = self._score({name: batch[name] for name in _READ if name in batch})
        return {name: jax.device_put(x, self._place(x)) for name, x in found.items()}

    def _place(self, x: jax.Array) -> NamedSharding:
        """Rows lie as those of a batch; log-probabilities of a whole vocabulary as the student's logits."""
        names = (None, "batch", None, "vocab" if x.shape[-1] == self.decoder.vocab_size else None)[: x.ndim]
        return NamedSharding(self.mesh, activation_spec(x.shape, names, self.mesh, self.program.rules))

    @property
    def teacher(self) -> RoleModel:
        """The teacher on its mesh; loaded when it is first asked for."""
        if self._teacher is None:
            path = self.config.distill.teacher
            assert path is not None  # `settle` has seen to it
            self._teacher = load_role(
                self.config,
                "teacher",
                path,
                self.program,
                shape=self.decoder,
                tokenizer=self.tokenizer,
                field="distill.teacher",
            )
        return self._teacher

    def _restore_or_init(self, session: Any) -> None:
        precompute = self.config.distill.precompute_teacher
        if not precompute:
            _ = self.teacher  # what is wrong with it is said before the run begins
        super()._restore_or_init(session)
        if precompute:
            self._precompute(keep=not session.dry)

    def _precompute(self, *, keep: bool) -> None:
        """Opens the tables of the training and evaluation rows, or makes them by one pass of the teacher.

        RUN/teacher.json says what they are, so that a resume opens them without the teacher, and notices another one.
        """
        file = layout.run_path(self.config.run_dir) / "teacher.json"
        kept = read_kept(file) if self.counters.batches else {}
        found = {}
        for split, rows in (("train", self.train_rows), ("eval", self.eval_rows)):
            if isinstance(rows, TeacherRows):
                rows.table, found[split] = self._table(rows, split, kept)
        self._teacher = self._score = None  # it has done its work
        if keep and found != kept and processes.is_main():
            write_kept(file, found)

    def _table(self, rows: TeacherRows, split: str, kept: dict[str, KeptTable]) -> tuple[TeacherTable, KeptTable]:
        """A table and what is said of it in RUN/teacher.json; `kept` is what that says of those made before."""
        config, options = self.config, self.distillation
        settings = [options.top_k, options.temperature, config.distill.precompute_dtype]
        one = kept.get(split)
        if one is not None and (one["rows"], one["settings"]) == (rows.fingerprint, settings):
            table = open_everywhere(table_folder(config.data.cache_dir, one["name"]), len(rows))
            if table is not None:
                return table, one
        dtype = jnp.dtype(self.program.precision.compute_dtype).name
        weights = model_digest(self.teacher.params)
        if any(before["teacher"] != weights for before in kept.values() if before["dtype"] == dtype):
            raise CheckpointError(
                f"distill.teacher: {config.distill.teacher} is not the teacher of the table with which this run began, "
                "and that table is not in the cache any more, or of other rows",
                "Put the teacher back as it was, or start a new run.",
            )
        name = table_name(weights, self._opened.decoder, rows.fingerprint, split, (*settings, dtype))
        folder = table_folder(config.data.cache_dir, name)
        table = open_everywhere(folder, len(rows))
        if table is None:
            self.say(f"teacher: log-probabilities of {len(rows):,} {split} rows")
            several = row_multiple(config, self.mesh)
            size = -(-self.program.batch.rows // several) * several
            table = make_table(
                folder, rows.in_order(), self.program, self._of_teacher, size, config.distill.precompute_dtype
            )
        return table, KeptTable(name=name, rows=rows.fingerprint, settings=settings, teacher=weights, dtype=dtype)


def _check_prompts(rows: Any) -> None:
    """Sees that completions have a beginning.

    Raises:
      ConfigError: every token of a source is learned.
    """
    for source in rows.sources if isinstance(rows, TrainRows) else ():
        targets = source.store.targets
        if targets is None or np.asarray(targets[:_LOOKED_AT]).all():
            raise ConfigError(
                f"completions are to be drawn, and of the training data ({source.title}) every token is learned: no "
                "prompt is known",
                "Give prompts with completions, or messages with sft.assistant_only_loss: true.",
            )


def _with_table(split: str, rows: Any) -> TeacherRows:
    if isinstance(rows, TrainRows | EvalRows):
        return TeacherRows(rows)
    raise ConfigError(
        f"distill.precompute_teacher: true, and the {split} data is rows of tokens in memory: they have no fingerprint",
        "Give files or records, or write distill.precompute_teacher: false.",
    )
