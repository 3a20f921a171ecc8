"""What evaluations of a run do with held-out prompts: `eval.metrics`, `eval.num_samples`, a callable of one's own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jtrain.data.questions import Question, read_questions
from jtrain.data.rows import EvalRows
from jtrain.errors import ConfigError
from jtrain.tasks.eval_text import ComputeTextMetrics, TextEvaluation

if TYPE_CHECKING:
    from jtrain.tasks.sft import SFTTrainer


class HeldOutAnswers:
    """The answers of a trainer's evaluations.

    Args:
      trainer: whose config says what is wanted.
      compute: a further metric, or None.
    """

    def __init__(self, trainer: SFTTrainer, compute: ComputeTextMetrics | None):
        self._trainer, self._compute = trainer, compute
        section = trainer.config.eval
        self.wanted = bool(section.metrics or section.num_samples or compute is not None)
        self._own: TextEvaluation | None = None
        self._said = False

    def open(self, sources: Sequence[Any]) -> None:
        """Reads the prompts of the run's own evaluation data.

        Args:
          sources: what its rows were made of, one for each of their sources.

        Raises:
          ConfigError: there is no such data, or it has no records; an unknown metric; prompts that are all too long.
          DataError: records without answers.
        """
        rows = self._trainer.eval_rows
        rows = getattr(rows, "plain", rows)  # with something beside them
        if rows is None:
            raise ConfigError(
                f"{self._named()} without evaluation data", "write data.eval: a path, or a fraction such as 0.1"
            )
        if not isinstance(rows, EvalRows) or len(sources) != len(rows.sources):
            raise ConfigError(
                f"{self._named()} with rows of tokens as evaluation data: there are no texts to compare with",
                "give records: prompt and completion, or messages",
            )
        self._own = self._evaluation(sources, rows)

    def figures(self, data: Any, sources: Sequence[Any] | None) -> dict[str, float]:
        """The metrics of an evaluation; of the run's own data, samples are written as well.

        Args:
          data: as `evaluate` gets it; None: the run's own.
          sources: paths or records of `data`; None: it has none.
        """
        trainer = self._trainer
        evaluation = self._own
        if data is not None:
            evaluation = None if sources is None else self._evaluation(sources, None)
        if evaluation is None:
            return {}
        batch_size = trainer.config.eval.batch_size or trainer.program.batch.rows
        result = evaluation(trainer.generate, batch_size)
        if data is None:
            self._tell(evaluation, result.signatures)
            for number, sample in enumerate(result.samples):
                trainer.sampled(number, sample)
        return result.metrics

    def _evaluation(self, sources: Sequence[Any], rows: EvalRows | None) -> TextEvaluation:
        config, section = self._trainer.config, self._trainer.config.eval
        dry = int(config.fast_dev_run)
        return TextEvaluation(
            self._questions(sources, rows),
            self._trainer.tokenizer,
            self._trainer.decoder.max_position_embeddings,
            metrics=section.metrics,
            compute=self._compute,
            examples=dry or section.metric_examples,
            max_new_tokens=section.max_new_tokens,
            samples=min(section.num_samples, dry or section.num_samples),
        )

    def _questions(self, sources: Sequence[Any], rows: EvalRows | None) -> Iterator[Question]:
        """As many of each source, so that every one of them is heard."""
        config, section = self._trainer.config, self._trainer.config.eval
        share = -(-max(section.metric_examples, section.num_samples) // len(sources))
        for number, source in enumerate(sources):
            name = f"data.eval: {source}" if isinstance(source, str) else "eval_dataset"
            stretch = None if rows is None else rows.sources[number]
            found = read_questions(config, self._trainer.tokenizer, source, field="data.eval", name=name, rows=stretch)
            yield from itertools.islice(found, share)

    def _tell(self, evaluation: TextEvaluation, signatures: dict[str, str]) -> None:
        if self._said or not signatures:
            return
        self._said = True
        left = f", {evaluation.left_out} that are too long left out" if evaluation.left_out else ""
        text = "; ".join(f"{name} {signature}" for name, signature in signatures.items())
        self._trainer.say(f"answers to {len(evaluation)} held-out prompts{left}: {text}")

    def _named(self) -> str:
        section = self._trainer.config.eval
        if section.metrics:
            return f"eval.metrics: {', '.join(section.metrics)}"
        return f"eval.num_samples: {section.num_samples}" if section.num_samples else "compute_text_metrics"
