"""Training on preferences: DPO and its relatives, KTO, ORPO, SimPO, CPO."""

from __future__ import annotations

import contextlib
import errno
from typing import Any

import jax
from flax import nnx

from jtrain.checkpoint import layout
from jtrain.checkpoint.files import storage_error
from jtrain.config.schema import Config
from jtrain.data.pairs import MismatchedRows
from jtrain.data.preference import is_unpaired
from jtrain.data.rows import EvalRows, Rows, TrainRows
from jtrain.errors import CheckpointError, ConfigError
from jtrain.parallel.mesh import data_ranks
from jtrain.tasks.kto import kto_loss, margins, single_sequences
from jtrain.tasks.preference import (
    HALVES,
    Preference,
    evaluation_loss,
    halves,
    pair_sequences,
    preference_loss,
    score_sequences,
)
from jtrain.tasks.preference_losses import LossOptions
from jtrain.tasks.preference_trainer import PreferenceTrainer
from jtrain.tasks.prepared import Preparation, added_names, of_reference, sequence_logps
from jtrain.tasks.reference import (
    FrozenCopy,
    OtherModel,
    ReferencedRows,
    ReferenceFn,
    base_reference,
    compute_table,
    copy_plan,
    copy_role,
    has_copy,
    model_digest,
    read_table,
    table_identity,
    table_path,
    write_table,
)
from jtrain.tasks.roles import load_role
from jtrain.train.callbacks import Callback
from jtrain.train.evaluation import Sums
from jtrain.train.loss import LossFn
from jtrain.train.trainer import Trainer


class DPOTrainer(PreferenceTrainer):
    """Trains a decoder on preferences.

    Records are pairs (prompt, chosen, rejected) or, for KTO, completions with a label (see `jtrain/data/pairs.py`); the
    loss is `dpo.loss_type`. The other arguments are `LanguageTrainer`'s; without a config the defaults are TRL's.

    The reference is the policy as it began: without its adapters where it has some, else a frozen copy, which the run
    keeps in RUN/reference for a resume; or `dpo.ref_model`; or, with `dpo.precompute_ref_log_probs`, a table of its
    log-probabilities. Metrics have TRL's names: rewards/{chosen,rejected,margins,accuracies}, logps/*, logits/*,
    entropy, mean_token_accuracy.
    """

    task = "dpo"
    left_out = "with a prompt that fills max_length"

    def __init__(self, *args: Any, **keywords: Any):
        self._reference: ReferenceFn | None = None
        self._restored: FrozenCopy | None = None
        keywords["callbacks"] = [_Synchronise(), *keywords.get("callbacks", ())]
        super().__init__(*args, **keywords)
        section = self.config.dpo
        self._preparation = Preparation(
            self.preference,
            self.program.forward,
            self.program.batch_sharding,
            self._score_reference if added_names(self.preference) else None,
        )
        if self.preference.kinds[0] == "kto":
            self.train_rows = self._mismatched(self.train_rows, self.program.batch.total)
            self.eval_rows = self._mismatched(self.eval_rows, self._eval_size)
        if section.precompute_ref_log_probs:
            self.train_rows, self.eval_rows = (
                ReferencedRows(rows) if isinstance(rows, TrainRows | EvalRows | MismatchedRows) else rows
                for rows in (self.train_rows, self.eval_rows)
            )

    # -- what is particular: config, data, loss, figures

    def make_loss(self, config: Config) -> LossFn:
        self.preference = preference_of(config)
        return (kto_loss if is_unpaired(config) else preference_loss)(self.preference)

    def rows_of(self, data: Any) -> Rows:
        rows = super().rows_of(data)
        return self._mismatched(rows, self._eval_size) if self.preference.kinds[0] == "kto" else rows

    def figures_of(self, sums: Sums) -> dict[str, float]:
        if is_unpaired(self.config):
            means = {name: total / count if count else None for name, (total, count) in sums.items()}
            return {f"eval_{name}": value for name, value in margins(means).items()}
        return evaluation_loss(sums, self.preference.nll_weight)

    def prediction(self, model: nnx.Module, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """For `predict`: log-probabilities of completions, chosen_logps and rejected_logps, or logps [b]."""
        preference = self.preference
        singles = preference.unpaired
        sequences = single_sequences(batch) if singles else pair_sequences(batch, preference)
        logps = score_sequences(model, sequences, chunk_size=preference.chunk_size, figures=False)[0].logps
        if singles:
            return {"logps": logps}
        return {f"{half}_logps": x for half, x in zip(HALVES, halves(logps), strict=True)}

    def summary(self) -> list[str]:
        lines = [f"loss: {' + '.join(self.preference.kinds)}", f"reference: {self._described()}"]
        return [*super().summary(), *lines, *self.source_lines()]

    def log(self, split: str, record: dict[str, Any]) -> None:
        if split == "train" and is_unpaired(self.config):
            record = record | margins(record)
        super().log(split, record)

    # -- the reference

    def prepare(self, batch: dict[str, jax.Array], params: Any, variables: Any) -> dict[str, jax.Array]:
        return self._preparation(batch, params, variables)

    def _score_reference(self, batch: Any, params: Any, variables: Any) -> Any:
        if self._reference is None:
            self._reference = self._make_reference()
        return self._reference(batch, params, variables)

    def _described(self) -> str:
        section = self.config.dpo
        if not added_names(self.preference):
            return "none"
        kind = section.ref_model or ("the model without its adapters" if self._is_base else "a frozen copy")
        if section.sync_ref_model:
            alpha, steps = section.ref_model_mixup_alpha, section.ref_model_sync_steps
            kind = f"a copy that takes {alpha:g} of the policy every {steps:,} steps"
        return f"{kind}, precomputed" if section.precompute_ref_log_probs else kind

    @property
    def _is_base(self) -> bool:
        """Whether the policy without its adapters is the policy as it began."""
        lora = self.config.model.lora
        return bool(lora.rank) and not lora.path and not self.config.checkpoint.init_from

    def _make_reference(self) -> ReferenceFn:
        section, program, scores = self.config.dpo, self.program, sequence_logps(self.preference)
        if section.ref_model is not None:
            role = load_role(
                self.config,
                "reference",
                section.ref_model,
                program,
                shape=self.decoder,
                tokenizer=self.tokenizer,
                field="dpo.ref_model",
            )
            return OtherModel(role, scores)
        if self._is_base:
            return base_reference(program, scores)
        if not self.counters.batches:
            params, variables = self.state.params, self.state.variables
            return FrozenCopy.of(self.config, program, scores, params, variables, exact=section.sync_ref_model)
        if has_copy(self.config.run_dir):
            return FrozenCopy.load(self.config, program, scores, self.state.variables)
        raise ConfigError(
            "the reference is not there any more: these rows have no precomputed log-probabilities of it",
            "Give them as eval_dataset from the start, name dpo.ref_model, or leave out dpo.precompute_ref_log_probs.",
        )

    def _restore_or_init(self, session: Any) -> None:
        super()._restore_or_init(session)
        self._reference = None  # a fit that broke off before its first save begins anew
        if not added_names(self.preference):
            return
        if self.config.dpo.precompute_ref_log_probs:
            self._precompute(keep=not session.dry)
        elif self.config.dpo.sync_ref_model:
            self._reference = self._restored or self._make_reference()
            self._restored = None
        elif not self._is_base and self.config.dpo.ref_model is None:
            self._reference = self._make_reference()
            if not self.counters.batches and not session.dry and isinstance(self._reference, FrozenCopy):
                self._reference.save(self.config.run_dir)

    # -- a reference that moves (TR-DPO): a part of the run's state

    def beside(self) -> Any:
        return None if (moving := self._moving()) is None else {"reference": moving.role.params}

    def abstract_beside(self) -> Any:
        if not self.config.dpo.sync_ref_model:
            return None
        return {"reference": copy_plan(self.config, self.program).abstract.params}

    def take_beside(self, restored: Any) -> None:
        role = copy_role(self.config, self.program, restored["reference"], self.state.variables)
        self._restored = FrozenCopy(role, sequence_logps(self.preference))

    def waits_for(self, step: int) -> bool:
        section = self.config.dpo
        return section.sync_ref_model and step % section.ref_model_sync_steps == 0

    def synchronise(self) -> None:
        """Moves the reference towards the policy as it is now."""
        if (moving := self._moving()) is not None:
            moving.mix(self.state.params, self.config.dpo.ref_model_mixup_alpha, self.plan)

    def _moving(self) -> FrozenCopy | None:
        moves = self.config.dpo.sync_ref_model and isinstance(self._reference, FrozenCopy)
        return self._reference if moves else None  # type: ignore[return-value]

    def _precompute(self, *, keep: bool) -> None:
        """Fills the tables of the training and evaluation rows: from the run, from the cache, or by one pass.

        A run's table is taken where it is of these rows and settings: an evaluation may have other rows on a resume.
        """
        names, run = added_names(self.preference), layout.run_path(self.config.run_dir)
        for split, rows in (("train", self.train_rows), ("eval", self.eval_rows)):
            if not isinstance(rows, ReferencedRows):
                continue
            kept = run / f"reference-{split}.npz"
            identity = table_identity(rows.fingerprint, self.preference.ld_alpha, split)
            rows.table = read_table(kept, names, len(rows), identity) if self.counters.batches else None
            if rows.table is not None:
                continue
            if self.counters.batches and not self._is_base and self.config.dpo.ref_model is None:
                raise CheckpointError(
                    f"{kept} is missing, damaged, or of other rows: the reference's log-probabilities of this run, "
                    "whose reference is not there any more",
                    f"Put it back, and data.{split} as it was, or start a new run.",
                )
            rows.table = self._table(rows, names, split, identity)
            if keep:
                try:
                    write_table(kept, rows.table, identity)
                except OSError as error:
                    raise storage_error(kept, error.errno or errno.EIO, "can't be written") from error
        self._reference = None  # it has done its work

    def _table(self, rows: ReferencedRows, names: tuple[str, ...], split: str, identity: str) -> Any:
        config, params, variables = self.config, self.state.params, self.state.variables
        reference = self._reference = self._reference or self._make_reference()
        weights = model_digest(getattr(reference, "params", params))
        cache = table_path(config.data.cache_dir, weights, self.decoder, config.precision, identity)
        table = read_table(cache, names, len(rows), identity)
        if table is None:
            size, ranks = config.dpo.precompute_ref_batch_size or self.program.batch.rows, data_ranks(self.mesh)
            self.say(f"reference: log-probabilities of {len(rows):,} rows")
            table = of_reference(
                compute_table(
                    rows.in_order(),
                    self.program,
                    lambda batch: reference(batch, params, variables),
                    -(-size // ranks) * ranks,
                )
            )
            with contextlib.suppress(OSError):  # a cache that can't be written is none
                write_table(cache, table, identity)
        return table

    def _mismatched(self, rows: Any, group: int) -> Any:
        # A table holds one number a row: its other completion must be the same in every epoch.
        fixed = self.config.dpo.precompute_ref_log_probs
        return MismatchedRows(rows, None if fixed else group) if isinstance(rows, TrainRows | EvalRows) else rows

    @property
    def _eval_size(self) -> int:
        return self.config.eval.batch_size or self.program.batch.rows


class _Synchronise(Callback):
    """Moves the reference every `dpo.ref_model_sync_steps` updates, before anything else sees the step."""

    def on_step_end(self, trainer: Trainer, step: int, values: dict[str, Any]) -> None:
        assert isinstance(trainer, DPOTrainer)
        if trainer.waits_for(step):
            trainer.synchronise()


def preference_of(config: Config) -> Preference:
    """What the config's section `dpo` asks for."""
    section = config.dpo
    cpo_alpha = section.cpo_alpha
    if cpo_alpha is None:
        cpo_alpha = 1.0 if section.loss_type[0] == "cpo" else 0.0
    options = LossOptions(**{name: getattr(section, name) for name in LossOptions.__dataclass_fields__})
    return Preference(
        kinds=section.loss_type,
        weights=section.loss_weights or (1.0,) * len(section.loss_type),
        options=options,
        ld_alpha=section.ld_alpha,
        use_weighting=section.use_weighting,
        cpo_alpha=cpo_alpha,
        chunk_size=config.loss.chunk_size,
    )
