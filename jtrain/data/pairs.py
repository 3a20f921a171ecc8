"""Preferences in tokens: pairs of completions of one prompt, and single completions with a label.

Forms of a record, found by its fields:
  prompt, chosen, rejected    texts all, or lists of messages all; perhaps a margin (reward models)
  chosen, rejected            the same with the prompt in both: what they begin with alike (not for reward models, which
                              take them as they are)
  prompt, completion, label   one completion, wanted or not (KTO; pairs are taken apart)
Texts, messages and what stands beside them are read as in `jtrain/data/conversations.py`.

Legend: n rows asked for, L tokens of a row. A batch of pairs has the arrays of `jtrain.data.rows` twice, as chosen_*
and rejected_* [n, L]; a batch of single completions has them once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jtrain.data.chat import ChatTemplate
from jtrain.data.conversations import ChatEncoder, beside, columns, common_prefix, conversation, has_images
from jtrain.data.examples import Encoder, Example
from jtrain.data.packing import Plan
from jtrain.data.rows import IGNORE, Batch, EvalRows, PackedRows, TrainRows
from jtrain.data.store import TokenStore
from jtrain.data.tokenizers import Tokenizer
from jtrain.errors import DataError

PAIRS, SINGLES = "prompt, chosen and rejected", "prompt, completion and label"
FORMS = f"{PAIRS} (texts, or lists of messages; the prompt may stand in both halves), or, for KTO, {SINGLES}"
PairTruncation = Literal["keep_start", "keep_end", "drop"]


def form_of(record: Mapping[str, Any]) -> str | None:
    """The form of a record by its fields; None: it has none that is known."""
    has = {name for name, value in record.items() if value is not None}
    if {"chosen", "rejected"} <= has:
        return PAIRS
    return SINGLES if {"prompt", "completion", "label"} <= has else None


def needs_template(record: Mapping[str, Any]) -> bool:
    """Whether a record of a known form holds messages."""
    answer = record.get("chosen", record.get("completion"))
    return not isinstance(answer, str)


def preference_encoder(
    tokenizer: Tokenizer,
    *,
    form: str,
    single: bool,
    whole: bool,
    append_eos: bool,
    prepend_bos: bool,
    template: str | None,
    special_tokens: Mapping[str, str],
    text_field: str = "text",
    title: str,
) -> Encoder:
    """The encoder of preferences: a pair is two documents, its chosen and its rejected half.

    The mask of a document is 1 on its completion. `Example.value` is the margin of a pair, or the label of a single
    completion (1 wanted, 0 not).

    Args:
      form: of the records, as `form_of` names it; a record of another form can't be used.
      single: pairs are taken apart, a completion a row.
      whole: halves without a prompt stay as they are (reward models): no prompt is looked for in them.
      append_eos, prepend_bos: of texts, as in the config.
      template, special_tokens: the chat template's source and the names that it reads; None: there are no messages.
      text_field: not read; every recipe of examples has it.
      title: of the template, for messages.
    """
    del text_field
    chat = None if template is None else ChatTemplate(template, special_tokens, name=title)
    encoder = ChatEncoder(tokenizer, chat, append_eos=append_eos, prepend_bos=prepend_bos)

    def encode(record: Mapping[str, Any]) -> list[Example]:
        if has_images(record):
            raise DataError("it holds images, and preferences are learned from text alone", "Remove the record.")
        found = form_of(record)
        if found != form:
            given = columns({name: value for name, value in record.items() if value is not None})
            raise DataError(f"its fields are {given}, and the records before it hold {form}", f"Give {FORMS}.")
        if found == SINGLES:
            both = encoder.completed(record["prompt"], record["completion"], **beside(record))
            return [_example(both.ids, both.start, float(_label(record["label"])))]
        if _same(record["chosen"], record["rejected"]):
            raise DataError("its chosen and its rejected half are equal", "Remove the record: nothing is preferred.")
        if whole and record.get("prompt") is None:
            chosen, rejected, start = *(_whole(encoder, record, name) for name in ("chosen", "rejected")), 0
        else:
            chosen, rejected, start = _halves(encoder, record)
        if chosen == rejected:
            raise DataError(
                "its chosen and its rejected half have the same tokens", "Remove the record: nothing is preferred."
            )
        values = (1.0, 0.0) if single else (_margin(record), 0.0)
        return [_example(ids, start, value) for ids, value in zip((chosen, rejected), values, strict=True)]

    return encode


def _halves(encoder: ChatEncoder, record: Mapping[str, Any]) -> tuple[list[int], list[int], int]:
    """Tokens of both halves, and where the completions begin: behind what the prompt has in common with both."""
    prompt, chosen, rejected = _parts(record)
    given = beside(record)
    first = encoder.completed(prompt, chosen, **given, name="chosen completion")
    second = encoder.completed(prompt, rejected, **given, name="rejected completion")
    return first.ids, second.ids, min(first.start, second.start)


def _parts(record: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Prompt, chosen and rejected completion; the prompt of a record without one is what both halves begin with."""
    prompt, chosen, rejected = record.get("prompt"), record["chosen"], record["rejected"]
    if prompt is not None:
        return prompt, chosen, rejected
    if not isinstance(chosen, str):
        chosen, rejected = conversation(chosen), conversation(rejected)
    start = common_prefix(chosen, rejected)
    if isinstance(chosen, str) and start and chosen[start - 1] == " ":
        start -= 1  # the space belongs to the completions' first words
    if not start:
        raise DataError(
            "it has no prompt, and its chosen and rejected halves begin differently", "Give a prompt, or both with it."
        )
    return chosen[:start], chosen[start:], rejected[start:]


def _whole(encoder: ChatEncoder, record: Mapping[str, Any], name: str) -> list[int]:
    half = record[name]
    if not half:
        raise DataError(f"its {name} half is empty", "Give it an answer, or remove the record.")
    return encoder.text(half) if isinstance(half, str) else encoder.messages(half, **beside(record), mask=False)[0]


def _example(ids: Sequence[int], start: int, value: float) -> Example:
    return Example(ids, [int(place >= start) for place in range(len(ids))], value)


def _same(chosen: Any, rejected: Any) -> bool:
    if isinstance(chosen, str) or isinstance(rejected, str):
        return chosen == rejected
    return conversation(chosen) == conversation(rejected)


def _label(label: Any) -> bool:
    if isinstance(label, bool | int) and label in (0, 1):
        return bool(label)
    raise DataError(f"its label is {label!r}", "Write true (wanted) or false.")


def _margin(record: Mapping[str, Any]) -> float:
    margin = record.get("margin")
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not np.isfinite(margin):
        raise DataError(f"its margin is {margin!r}", "Write a number: how much better the chosen half is.")
    return float(margin)


# -- rows --------------------------------------------------------------------------------------------------------------


class PairRows(PackedRows):
    """Pairs of a store as rows: documents 2 i and 2 i + 1 of it are the halves of a pair.

    Both halves of a row keep the same tokens of their prompt, and at least one token of each completion. Pairs of which
    a completion would have none are left out and counted.

    Args:
      store: the tokens, with targets.
      edges: a stretch of the store's edges that begins with a pair.
      max_length: L.
      truncation: of pairs that are longer. keep_start: the ends of completions go. keep_end: the beginning of the
        prompt goes, as much as the longer half needs, and then ends of completions. drop: the pair is left out.
      pad_id: token that stands in padding.
      margins: whether rows have their `margin` [n].
      title: what the source holds, in words.

    Attributes:
      dropped: pairs that are left out.

    Raises:
      DataError: none is left.
    """

    def __init__(
        self,
        store: TokenStore,
        edges: np.ndarray,
        max_length: int,
        truncation: PairTruncation = "keep_start",
        *,
        pad_id: int = 0,
        margins: bool = False,
        title: str = "",
    ):
        plan, documents = _plan(store, edges, max_length, truncation, unit=2)
        self.dropped = (len(edges) - 1 - len(documents)) // 2
        if not plan.rows:
            raise _none_left(self.dropped, "pairs", max_length, truncation)
        super().__init__(store, plan, pad_id=pad_id, edges=edges, title=title)
        values = np.zeros(len(store.edges) - 1, np.float32) if store.values is None else np.asarray(store.values)
        self._margins = values[documents[::2]] if margins else None

    def __len__(self) -> int:
        return self.plan.rows // 2

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Tokens of the longer half of each pair."""
        return super().lengths(_both(indices)).reshape(-1, 2).max(1)

    def rows(self, indices: np.ndarray) -> Batch:
        halves = super().rows(_both(indices))
        batch: Batch = {}
        for name in _TOKENS:
            pairs = halves[name].reshape(-1, 2, halves[name].shape[1])
            batch[f"chosen_{name}"], batch[f"rejected_{name}"] = pairs[:, 0], pairs[:, 1]
        if self._margins is not None:
            batch["margin"] = self._margins[indices]
        return batch


class SingleRows(PackedRows):
    """Single completions of a store as rows, each with its `label`; the arguments are those of `PairRows`."""

    def __init__(
        self,
        store: TokenStore,
        edges: np.ndarray,
        max_length: int,
        truncation: PairTruncation = "keep_start",
        *,
        pad_id: int = 0,
        title: str = "",
    ):
        plan, documents = _plan(store, edges, max_length, truncation, unit=1)
        self.dropped = len(edges) - 1 - len(documents)
        if not plan.rows:
            raise _none_left(self.dropped, "completions", max_length, truncation)
        super().__init__(store, plan, pad_id=pad_id, edges=edges, title=title)
        assert store.values is not None  # of examples there are
        self.wanted = np.asarray(store.values)[documents] > 0.5

    def rows(self, indices: np.ndarray) -> Batch:
        batch = super().rows(indices)
        return {name: batch[name] for name in _TOKENS} | {"label": self.wanted[indices]}


class MismatchedRows:
    """Rows of single completions beside rows with the completion of another one, for KTO's estimate of the divergence.

    Row n of a batch of `group` rows gets the completion of the row before it (the first one that of the last), as in
    TRL: kl_* [n, L] is the prompt of row n with that completion.

    Args:
      rows: of single completions, a stream or an evaluation's.
      group: rows of a batch. None: the row before is that of the data, so that a row has the same one in every epoch.
    """

    def __init__(self, rows: TrainRows | EvalRows, group: int | None):
        self._rows, self._group = rows, group
        self._whole = rows.in_order()
        self.fingerprint = f"{rows.fingerprint}-{group or 'data'}"
        self.places = rows.places

    def __len__(self) -> int:
        return len(self._rows)

    def row_ids(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        assert isinstance(self._rows, TrainRows)  # an evaluation's rows have no other order
        return self._rows.row_ids(indices)

    def in_order(self) -> MismatchedRows:
        """All rows once, in the order of the data."""
        return MismatchedRows(self._whole, self._group)

    def batch_length(self, indices: np.ndarray) -> None:
        """Rows keep their length: a prompt with another completion may be longer than both."""

    def rows(self, indices: np.ndarray) -> Batch:
        indices = np.asarray(indices, np.int64)
        batch = self._rows.rows(indices)
        if self._group is None:
            other = self._whole.rows((self.places(indices) - 1) % len(self))
        else:
            begin = indices // self._group * self._group
            other = self._rows.rows(begin + (indices - begin - 1) % self._group)
        ids, labels, segments = (batch[name].copy() for name in ("input_ids", "labels", "segment_ids"))
        length = ids.shape[1]
        places = np.arange(length)
        starts, theirs = _start(batch), _start(other)
        ends = (other["segment_ids"] > 0).sum(1)
        source = places + (theirs - starts)[:, None]
        own = places < starts[:, None]
        used = own | (source < ends[:, None])
        completion = np.take_along_axis(other["input_ids"], np.clip(source, 0, length - 1), 1)
        ids = np.where(own, ids, np.where(used, completion, 0))
        labels = np.where(used & ~own, ids, IGNORE)
        live = (segments.any(1) & other["segment_ids"].any(1))[:, None]
        labels, segments = np.where(live, labels, IGNORE), (used & live).astype(segments.dtype)
        positions = np.where(used, places, 0).astype(np.int32)
        found = {"input_ids": ids, "labels": labels, "segment_ids": segments, "position_ids": positions}
        return batch | {f"kl_{name}": values.astype(np.int32) for name, values in found.items()}


_TOKENS = ("input_ids", "labels", "segment_ids", "position_ids")


def _start(batch: Batch) -> np.ndarray:
    """Where the completion of each row begins [n]."""
    return (batch["labels"] != IGNORE).argmax(1)


def _both(indices: np.ndarray) -> np.ndarray:
    return (2 * np.asarray(indices, np.int64)[:, None] + np.arange(2)).reshape(-1)


def _plan(
    store: TokenStore, edges: np.ndarray, max_length: int, truncation: PairTruncation, *, unit: int
) -> tuple[Plan, np.ndarray]:
    """A document a row, cut to max_length; and the number of each row's document in the store."""
    assert store.targets is not None  # examples have them
    edges = np.asarray(edges, np.int64)
    whole = np.diff(edges).reshape(-1, unit)
    targets = np.flatnonzero(np.asarray(store.targets))
    prompt = targets[np.searchsorted(targets, edges[:-1]).clip(max=len(targets) - 1)].reshape(-1, unit)
    prompt = prompt - edges[:-1].reshape(-1, unit)
    over = np.maximum(whole.max(1, keepdims=True) - max_length, 0)
    cut = np.minimum(over, np.maximum(prompt - 1, 0)) if truncation == "keep_end" else np.zeros_like(prompt)
    lengths = np.minimum(whole - cut, max_length)
    # The first token of a row has nothing before it: it is no target.
    kept = (lengths > np.maximum(prompt - cut, 1)).all(1)
    if truncation == "drop":
        kept = (whole <= max_length).all(1)
    starts = (edges[:-1].reshape(-1, unit) + cut)[kept].reshape(-1)
    documents = np.searchsorted(np.asarray(store.edges), edges[0]) + np.arange(len(edges) - 1).reshape(-1, unit)[kept]
    first = np.arange(len(starts) + 1, dtype=np.int64)
    return Plan(starts, lengths[kept].reshape(-1).astype(np.int32), first, max_length), documents.reshape(-1)


def _none_left(dropped: int, what: str, max_length: int, truncation: str) -> DataError:
    why = "is longer than" if truncation == "drop" else "has a prompt that fills"
    return DataError(
        f"every one of the {dropped:,} {what} {why} max_length: {max_length}", "Write a larger max_length."
    )
