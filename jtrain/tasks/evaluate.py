"""`jtrain.evaluate`: loss, perplexity and bits per byte of a loaded model on texts and examples.

Data is read as pretraining and SFT read it, and the loss is theirs, so that the figures are those of an evaluation in
a run. They are sums over target tokens, divided once: batch size, devices, packing and padding do not change them.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.config.schema import Config
from jtrain.data.build import build_eval
from jtrain.data.conversations import TEXT, form_of, no_form
from jtrain.data.examples import first_record
from jtrain.data.questions import read_questions
from jtrain.data.rows import EvalRows, PackedRows
from jtrain.data.sft import buckets_of, counts
from jtrain.data.store import TokenStore
from jtrain.data.texts import is_texts
from jtrain.data.tokenizers import Tokenizer
from jtrain.data.windows import WindowRows
from jtrain.errors import ConfigError, DataError
from jtrain.parallel.xla import compiler_options
from jtrain.tasks.eval_reading import Reading, tokenizer_of, whole
from jtrain.tasks.eval_text import ComputeTextMetrics, TextEvaluation, TextResult
from jtrain.tasks.generate import generate
from jtrain.tasks.language import text_metrics
from jtrain.tasks.language_loss import next_token_loss
from jtrain.tasks.loaded import LoadedModel
from jtrain.tasks.text_scores import check_metrics
from jtrain.train.evaluation import Evaluator, Sums
from jtrain.train.step import make_eval_step

Report = Callable[[str], None]


def evaluate(
    model: LoadedModel, data: Any, *, batch_size: int = 8, report: Report | None = None, **reading: Any
) -> dict[str, float]:
    """The model's loss on data.

    The form of each source is found by its first record, as in SFT: `messages`, `prompt` and `completion`, or a text.
    All sources together have one figure.

    Args:
      model: from `load_model`.
      data: a path (file, folder, glob, URL), several, or records in memory.
      batch_size: rows that are computed together, over all devices.
      report: called with lines about what was found in the data.
      **reading: see `Reading`.

    Returns:
      `eval_loss` (nats a target token), `perplexity`, `bits_per_byte` where the bytes are known,
      `eval_mean_token_accuracy`, `target_tokens`, and `target_bytes` where they are known; with `on_bad_record="skip"`
      `records_left_out`.

    Raises:
      ConfigError: an option that can't be, a row longer than the model takes, a model without a tokenizer.
      DataError: data that can't be read, or whose form is not known; examples that are too long.
    """
    how, say = Reading.of(reading), report or (lambda text: None)
    tokenizer = tokenizer_of(model)
    whole("batch_size", batch_size, 1)
    texts, examples = _by_form(_sources(data), how.text_field)
    if texts and how.assistant_only_loss:
        raise ConfigError(
            f"assistant_only_loss, and {_name(texts[0])} holds texts: no message of an assistant", "leave it out"
        )
    limit = model.decoder.max_position_embeddings
    length = how.length(limit, bool(texts))
    found: list[PackedRows] = []
    if texts:
        found += _text_rows(how.config(model, "pretrain", length), tokenizer, texts, how.stride, say)
    of_examples = how.config(model, "sft", length)
    if examples:
        found += _example_rows(of_examples, tokenizer, examples, how.truncation, limit, say)
    result = figures(model, EvalRows(found, buckets=buckets_of(of_examples)), batch_size)
    if how.on_bad_record == "skip":
        result["records_left_out"] = sum(rows.store.bad_records for rows in found)
    return result


def evaluate_answers(
    model: LoadedModel,
    data: Any,
    metrics: Sequence[str],
    *,
    batch_size: int = 8,
    report: Report | None = None,
    **options: Any,
) -> TextResult:
    """Answers the prompts of data with the likeliest tokens, and scores the answers against those of the data.

    Args:
      model, data, batch_size, report: see `evaluate`.
      metrics: names of `text_scores.METRICS`.
      **options: see `open_answers`.

    Raises: see `open_answers`.
    """
    whole("batch_size", batch_size, 1)
    return answer(model, open_answers(model, data, metrics, **options), batch_size=batch_size, report=report)


def open_answers(
    model: LoadedModel,
    data: Any,
    metrics: Sequence[str],
    *,
    examples: int | None = None,
    max_new_tokens: int = 128,
    samples: int = 0,
    compute: ComputeTextMetrics | None = None,
    **reading: Any,
) -> TextEvaluation:
    """Reads the prompts of data and the answers that are expected; nothing is generated.

    Args:
      model, data, **reading: see `evaluate`.
      metrics: names of `text_scores.METRICS`.
      examples: no more prompts than these, the first ones; None: all.
      max_new_tokens: of an answer.
      samples: how many of the answers are returned.
      compute: a further metric, `compute(predictions, references, **columns) -> name -> number`.

    Raises:
      ConfigError: see `evaluate`; a metric that is not known or not installed; no prompt leaves room for an answer.
      DataError: see `evaluate`; data without prompts and answers.
    """
    check_metrics(metrics)  # before files are read
    how, tokenizer = Reading.of(reading), tokenizer_of(model)
    for name, value in (("examples", 1 if examples is None else examples), ("max_new_tokens", max_new_tokens)):
        whole(name, value, 1)
    limit = model.decoder.max_position_embeddings
    config = how.config(model, "sft", limit)
    questions = itertools.chain.from_iterable(
        read_questions(config, tokenizer, source, field="--data", name=_name(source)) for source in _sources(data)
    )
    return TextEvaluation(
        questions,
        tokenizer,
        limit,
        metrics=metrics,
        compute=compute,
        examples=sys.maxsize if examples is None else examples,
        max_new_tokens=max_new_tokens,
        samples=samples,
    )


def answer(
    model: LoadedModel, evaluation: TextEvaluation, *, batch_size: int = 8, report: Report | None = None
) -> TextResult:
    """What a model answers to the prompts of an evaluation, scored; the arguments are those of `evaluate_answers`."""
    if report is not None:
        left = f" ({evaluation.left_out:,} that are too long left out)" if evaluation.left_out else ""
        report(f"{len(evaluation):,} prompts{left}, at most {evaluation.max_new_tokens} new tokens, temperature 0")
    result = evaluation(functools.partial(generate, model), batch_size)
    if report is not None:
        for name, signature in result.signatures.items():
            report(f"{name}: {signature}")
    return result


def figures(model: LoadedModel, rows: EvalRows, batch_size: int) -> dict[str, float]:
    """The figures of `evaluate` for rows of tokens."""
    if model not in _steps:
        options = compiler_options(model.mesh.devices.flat[0].platform)
        _steps[model] = make_eval_step(model.model, next_token_loss(), model.plan, compiler_options=options)
    evaluator = Evaluator.over(
        rows,
        _steps[model],
        batch_size=batch_size,
        sharding=model.plan.batch_sharding,
        compute_metrics=_counted,
    )
    try:
        found = evaluator(model.params, model.variables)
    finally:
        evaluator.close()
    return {name: int(value) if name.startswith("target_") else value for name, value in found.items()}


_steps: weakref.WeakKeyDictionary[LoadedModel, Callable[..., Any]] = weakref.WeakKeyDictionary()


def _counted(sums: Sums) -> dict[str, float]:
    found = text_metrics(sums) | {"target_tokens": sums["loss"][1]}
    size = sums.get("_bytes", (0.0, 0.0))[0]
    return found | ({"target_bytes": size} if size else {})


def _sources(data: Any) -> list[Any]:
    """Paths, each by itself, or records in memory as one source."""
    if isinstance(data, str | Path):
        return [str(data)]
    if isinstance(data, Sequence) and data and all(isinstance(item, str | Path) for item in data):
        return [str(item) for item in data]
    if is_texts(data):
        return [data]
    raise DataError(f"data is {str(data)[:80]!r}", "give a path, several, or a list of records with text fields")


def _by_form(sources: Sequence[Any], text_field: str) -> tuple[list[Any], list[Any]]:
    """Sources of texts, and those of examples."""
    texts: list[Any] = []
    examples: list[Any] = []
    for source in sources:
        name = _name(source)
        record = first_record(source, text_field, field="--data", name=name)
        form = form_of(record, text_field)
        if form is None:
            raise no_form(name, record, text_field, option="text_field")
        (texts if form == TEXT else examples).append(source)
    return texts, examples


def _name(source: Any) -> str:
    return f"--data: {source}" if isinstance(source, str) else "data"


def _rows_of(
    config: Config, tokenizer: Tokenizer, sources: Sequence[Any], check: Callable[[Any, TokenStore], None] | None = None
) -> Iterator[tuple[Any, PackedRows]]:
    for source in sources:
        mine = None if check is None else functools.partial(check, source)
        data = [source] if isinstance(source, str) else source
        for rows in build_eval(config, tokenizer, data, field="--data", check=mine).sources:
            yield source, rows


def _left_out(rows: PackedRows) -> str:
    return f"; {rows.store.bad_records:,} records that can't be used left out" if rows.store.bad_records else ""


def _text_rows(
    config: Config, tokenizer: Tokenizer, sources: Sequence[Any], stride: int, say: Report
) -> list[PackedRows]:
    length, found = config.max_length, []
    begin = ", after the begin token" if config.data.prepend_bos else ""
    for source, rows in _rows_of(config, tokenizer, sources):
        sizes = np.diff(rows.edges)
        long = int((sizes > length).sum())
        if stride and long:
            rows = WindowRows(
                rows.store, length, stride, token_bytes=tokenizer.token_bytes(), pad_id=tokenizer.pad_id, title="texts"
            )
        text = f"{_name(source)}: {len(sizes):,} texts; all tokens are scored{begin}; {len(rows):,} rows of {length}"
        if long:
            how = f"windows, {stride} tokens apart" if stride else "pieces (stride lets them overlap)"
            text += f"; {long:,} longer than a row: scored in {how}"
        say(text + _left_out(rows))
        found.append(rows)
    return found


def _example_rows(
    config: Config, tokenizer: Tokenizer, sources: Sequence[Any], truncation: str | None, limit: int, say: Report
) -> list[PackedRows]:
    def check(source: Any, store: TokenStore) -> None:
        """Says that an example is too long before a plan finds nothing to score in what would stay of it."""
        sizes = np.diff(store.edges)
        long = sizes > config.max_length
        if truncation is None and long.any():
            first = int(np.argmax(long))
            more = f"max_length: {min(int(sizes.max()), limit)}" if config.max_length < limit else ""
            raise DataError(
                f"{_name(source)}: {long.sum():,} of {len(sizes):,} examples are longer than a row of "
                f"{config.max_length} tokens; the first is number {first + 1}, with {sizes[first]}",
                f"write {more}{', or ' if more else ''}truncation: keep_start (or keep_end), which scores a part",
            )

    found = []
    for source, rows in _rows_of(config, tokenizer, sources, check):
        number = counts(rows)
        text = f"{_name(source)}: {number['examples']:,} examples ({rows.title.replace(' learned', ' scored')})"
        if number["left_out"]:
            text += f"; {number['left_out']:,} without such a token left out"
        if number["cut"]:
            text += f"; {number['cut']:,} cut to {config.max_length} tokens ({truncation})"
        say(text + _left_out(rows))
        found.append(rows)
    return found
