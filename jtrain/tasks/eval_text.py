"""Evaluation by what a model writes: answers to held-out prompts, scored against those of the data.

Answers are the likeliest tokens (temperature 0): the same on every start, mesh and process. Nothing of the training is
touched.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jtrain.data.questions import Question
from jtrain.data.tokenizers import Tokenizer
from jtrain.errors import ConfigError, DataError
from jtrain.tasks.generate import Generation
from jtrain.tasks.text_scores import check_metrics, score_texts

Generate = Callable[..., list[Generation]]
"""`generate(prompts of tokens, **options) -> generations`; see `jtrain.generate`."""

ComputeTextMetrics = Callable[..., dict[str, float]]
"""`function(predictions, references, **columns) -> name -> number`; columns: the records' fields, a list each."""


class TextResult(NamedTuple):
    """What an evaluation of texts found.

    Attributes:
      metrics: `eval_<name>` -> number, and what the callable returned under its own names.
      signatures: how they were computed.
      samples: the first ones: prompt, completion and reference.
      left_out: how many prompts were too long to be answered.
    """

    metrics: dict[str, float]
    signatures: dict[str, str]
    samples: list[dict[str, str]]
    left_out: int = 0


class TextEvaluation:
    """Prompts, and what is computed of the answers.

    Args:
      questions: prompts with answers; no more than are needed are read.
      tokenizer: shows the prompts.
      limit: the most tokens that a prompt and its answer may have together.
      metrics: names of `text_scores.METRICS`.
      compute: a further metric, or None.
      examples: how many prompts are answered.
      max_new_tokens: of an answer.
      samples: how many answers are shown.

    Prompts that leave no room for an answer are left out; `left_out` counts them.

    Raises:
      ConfigError: a metric that is not known or not installed; all prompts are too long.
      DataError: there is no prompt.
    """

    def __init__(
        self,
        questions: Iterable[Question],
        tokenizer: Tokenizer,
        limit: int,
        *,
        metrics: Sequence[str] = (),
        compute: ComputeTextMetrics | None = None,
        examples: int = 100,
        max_new_tokens: int = 128,
        samples: int = 0,
    ):
        check_metrics(metrics)
        self._metrics, self._compute, self._samples = tuple(metrics), compute, samples
        self._tokenizer, self.max_new_tokens = tokenizer, max_new_tokens
        self._scored = examples if metrics or compute else 0
        wanted = max(self._scored, samples)
        found = list(itertools.islice(questions, wanted))
        if not found:
            raise DataError(
                "the evaluation data holds no prompt with an answer", "give prompt and completion, or messages"
            )
        fitting = [question for question in found if len(question.ids) + max_new_tokens <= limit]
        self.left_out = len(found) - len(fitting)
        if not fitting:
            shortest = min(found, key=lambda question: len(question.ids))
            room = limit - len(shortest.ids)
            raise ConfigError(
                f"{shortest.where}: the shortest prompt has {len(shortest.ids)} tokens, and with max_new_tokens="
                f"{max_new_tokens} that is over the {limit} that the model takes",
                f"write max_new_tokens: {room} (or less)" if room > 0 else "shorten the prompts",
            )
        self.questions = fitting

    def __len__(self) -> int:
        return len(self.questions)

    def __call__(self, generate: Generate, batch_size: int) -> TextResult:
        """Answers the prompts with `generate` and scores the answers."""
        prompts = [question.ids for question in self.questions]
        rows = generate_sorted(generate, prompts, batch_size, max_new_tokens=self.max_new_tokens)
        predictions = [row.text for row in rows]
        references = [question.reference for question in self.questions]
        scored = slice(0, self._scored)
        scores = score_texts(self._metrics, predictions[scored], references[scored])
        metrics = {f"eval_{name}": value for name, value in scores.values.items()}
        if self._compute is not None:
            records = [question.record for question in self.questions]
            metrics |= _computed(self._compute, predictions[scored], references[scored], records[scored])
        samples = [
            {"prompt": self._tokenizer.decode(ids, skip_special=False), "completion": text, "reference": reference}
            for ids, text, reference in list(zip(prompts, predictions, references, strict=True))[: self._samples]
        ]
        return TextResult(metrics, scores.signatures, samples, self.left_out)


def generate_sorted(
    generate: Generate, prompts: Sequence[Sequence[int]], batch_size: int, **options: Any
) -> list[Generation]:
    """Generations of prompts in their order, computed from the longest to the shortest.

    Batches of like lengths waste little, and the last one is filled up, so that few programs are compiled.

    Args:
      generate: see `Generate`.
      prompts: in tokens.
      batch_size: prompts that are computed together.
      **options: of `generate`.
    """
    order = sorted(range(len(prompts)), key=lambda place: -len(prompts[place]))
    found: list[Generation | None] = [None] * len(prompts)
    for first in range(0, len(order), batch_size):
        places = order[first : first + batch_size]
        batch = [list(prompts[place]) for place in places]
        if first:
            batch += [batch[-1]] * (batch_size - len(batch))
        for place, row in zip(places, generate(batch, **options), strict=False):
            found[place] = row
    return [row for row in found if row is not None]


def _computed(
    compute: ComputeTextMetrics, predictions: list[str], references: list[str], records: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    names = dict.fromkeys(name for record in records for name in record)
    reserved = ("predictions", "references")
    columns = {str(name): [record.get(name) for record in records] for name in names if name not in reserved}
    found = compute(predictions, references, **columns)
    try:
        return {str(name): float(value) for name, value in found.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"compute_text_metrics returned {found!r:.100}: {error}", "return name -> number") from error
