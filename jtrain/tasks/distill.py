"""Distillation: a student learns the distributions of a teacher, on data or on its own completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from jtrain.config.schema import Config
from jtrain.errors import ConfigError
from jtrain.ops.logical import activation_spec
from jtrain.tasks.distill_loss import distill_loss, distillation_of, known_names, teacher_numbers
from jtrain.tasks.language import text_metrics
from jtrain.tasks.roles import RoleModel, load_role
from jtrain.tasks.sft import SFTTrainer
from jtrain.train.evaluation import Sums
from jtrain.train.loss import LossFn

_READ = ("input_ids", "position_ids", "segment_ids", "labels")
"""What the teacher reads of a batch."""


class DistillTrainer(SFTTrainer):
    """Trains a decoder to say what a teacher says (`distill.teacher`), which has the same tokenizer.

    Records, masks and packing are SFT's: only places with a live label count. The loss is a divergence of the student's
    distributions from the teacher's (`jtrain/ops/divergence.py`). The teacher is frozen, and its numbers are computed
    before every step, on the mesh of the role `teacher`. The other arguments are `LanguageTrainer`'s.

    Logged: `kl`, `nll`, `entropy`, `mean_token_accuracy`, `agreement` (places where both have the same likeliest
    token), `teacher_nll`, `teacher_entropy`, and what `SFTTrainer` logs.
    """

    task = "distill"

    def __init__(self, *args: Any, **keywords: Any):
        self._teacher: RoleModel | None = None
        self._score: Callable[..., dict[str, jax.Array]] | None = None
        super().__init__(*args, **keywords)

    # -- what is particular: config, loss, figures

    def settle(self, config: Config) -> Config:
        if config.distill.teacher is None:
            raise ConfigError(
                "distill.teacher is missing: there is nobody to learn from",
                "Write distill.teacher: with the folder of a model that has the student's tokenizer "
                "(--distill.teacher DIR).",
            )
        return config

    def make_loss(self, config: Config) -> LossFn:
        self.distillation = distillation_of(config)
        return distill_loss(self.distillation, noise_alpha=config.sft.neftune_noise_alpha)

    def figures_of(self, sums: Sums) -> dict[str, float]:
        return text_metrics(sums | {"loss": sums["nll"]})

    def summary(self) -> list[str]:
        section, vocab = self.config.distill, self.decoder.vocab_size
        known = section.top_k if 0 < section.top_k < vocab else vocab
        loss = f"{section.loss} (beta {section.beta:g})" if section.loss == "jsd" else section.loss
        return [*super().summary(), f"loss: {loss}", f"teacher: {section.teacher}, {known:,} log-probabilities a token"]

    # -- the teacher

    def prepare(self, batch: dict[str, jax.Array], params: Any, variables: Any) -> dict[str, jax.Array]:
        if not all(name in batch for name in known_names(self.distillation, self.decoder.vocab_size)):
            batch = batch | self._of_teacher(batch)
        return batch

    def _of_teacher(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The teacher's numbers at the places of a batch, where the step reads them."""
        if self._score is None:
            self._score = self.teacher.jit(teacher_numbers(self.distillation))
        found = self._score({name: batch[name] for name in _READ})
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
        _ = self.teacher  # what is wrong with it is said before the run begins
        super()._restore_or_init(session)
