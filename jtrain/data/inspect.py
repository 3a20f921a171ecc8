"""What the rows really hold: sizes, packing efficiency, and decoded text with its loss mask."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jtrain.data.rows import IGNORE, EvalRows, PackedRows, TrainRows
from jtrain.data.sft import counts
from jtrain.data.tokenizers import Tokenizer


def describe(train: TrainRows, evaluation: EvalRows | None, tokenizer: Tokenizer, rows: int = 2) -> dict[str, Any]:
    """A summary, as plain values (one JSON object).

    Keys: `train` and `eval` ({rows, tokens, documents, segments, max_length, fill: share of places that hold a token,
    sources: the same of each}); `eval` is None without evaluation data), `tokenizer` and `vocab_size`, and
    `examples`: the first `rows` rows of the training stream as {row, source, source_row, tokens, targets, bytes,
    segments}, a segment being a list of spans {text, tokens, target}. Sources of examples have `form`, `examples`,
    `left_out` and `cut` besides (see `jtrain.data.sft.counts`). A pair shows its halves as two segments.
    """
    numbers = np.arange(rows)
    source, source_row = train.row_ids(numbers)
    batch = train.rows(numbers)
    control = [rows.store.targets is not None for rows in train.sources]
    examples = []
    for n in range(rows):
        parts = _parts({name: values[n] for name, values in batch.items()})
        examples.append(
            {
                "row": n,
                "source": int(source[n]),
                "source_row": int(source_row[n]),
                "tokens": int(sum((part["segment_ids"] > 0).sum() for part in parts)),
                "targets": int(sum((part["labels"] != IGNORE).sum() for part in parts)),
                "bytes": int(batch["bytes"][n]) if "bytes" in batch else 0,
                "segments": [list(spans) for part in parts for spans in _segments(part, tokenizer, control[source[n]])],
            }
        )
    return {
        "train": _sizes(train.sources),
        "eval": None if evaluation is None else _sizes(evaluation.sources),
        "tokenizer": tokenizer.spec,
        "vocab_size": tokenizer.vocab_size,
        "examples": examples,
    }


def _sizes(sources: Sequence[PackedRows]) -> dict[str, Any]:
    each: list[dict[str, Any]] = [
        {
            "rows": len(source),
            "tokens": source.plan.tokens,
            "documents": _documents(source),
            "segments": len(source.plan.starts),
            "max_length": source.plan.max_length,
            "fill": source.plan.fill,
            **({} if source.store.targets is None else counts(source) | {"form": source.title}),
        }
        for source in sources
    ]
    totals = {name: sum(entry[name] for entry in each) for name in ("rows", "tokens", "documents", "segments")}
    length = each[0]["max_length"]
    places = sum(source.plan.rows for source in sources) * length  # a row of a pair has two of the plan
    return {**totals, "max_length": length, "fill": totals["tokens"] / places, "sources": each}


def _parts(row: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """The halves of a pair, chosen first; another row is its own only part."""
    if "chosen_input_ids" not in row:
        return [row]
    names = ("input_ids", "labels", "segment_ids")
    return [{name: row[f"{half}_{name}"] for name in names} for half in ("chosen", "rejected")]


def _documents(source: PackedRows) -> int:
    """Documents of the stretch that the rows cover; one that was cut by the held-out part counts in both."""
    starts, lengths = source.plan.starts, source.plan.lengths
    last = int(starts.argmax())
    edges = source.store.edges
    after = np.searchsorted(edges, starts[last] + lengths[last], side="left")
    return int(after - np.searchsorted(edges, starts.min(), side="right") + 1)


def _segments(row: dict[str, np.ndarray], tokenizer: Tokenizer, control: bool) -> Iterator[Iterator[dict[str, Any]]]:
    for segment in range(1, int(row["segment_ids"].max()) + 1):
        places = np.flatnonzero(row["segment_ids"] == segment)
        yield _spans(row["input_ids"][places], row["labels"][places] != IGNORE, tokenizer, control)


def _spans(ids: np.ndarray, target: np.ndarray, tokenizer: Tokenizer, control: bool) -> Iterator[dict[str, Any]]:
    """Runs of tokens that are all targets, or all not; control tokens are shown where a template put them."""
    cuts = [0, *(np.flatnonzero(np.diff(target)) + 1).tolist(), len(ids)]
    for begin, end in itertools.pairwise(cuts):
        text = tokenizer.decode(ids[begin:end].tolist(), skip_special=not control)
        yield {"text": text, "tokens": end - begin, "target": bool(target[begin])}
