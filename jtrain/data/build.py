"""From the config's data section, or texts or examples in memory, to the rows of training and evaluation."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jtrain.data import preference, sft
from jtrain.data.cache import CacheOptions, Progress, open_plan, open_store
from jtrain.data.examples import example_options, example_store
from jtrain.data.image_rows import transform_of
from jtrain.data.packing import split_documents, split_edges
from jtrain.data.rows import EvalRows, PackedRows, TrainRows
from jtrain.data.sft import buckets_of
from jtrain.data.store import TokenStore
from jtrain.data.texts import is_texts, text_store
from jtrain.data.tokenise import Recipe
from jtrain.data.tokenizers import Tokenizer
from jtrain.errors import ConfigError

if TYPE_CHECKING:
    from jtrain.config.schema import Config

EXAMPLES = ("sft", "distill")
"""Tasks that read examples: a record is a row, or shares one."""


def build_data(
    config: Config, tokenizer: Tokenizer, *, train: Any = None, hold_out: bool = True, progress: bool = True
) -> tuple[TrainRows, EvalRows | None]:
    """Tokenises (or opens the caches), plans the rows, and gives the training stream and the evaluation rows.

    A fraction as `data.eval` is held out from the end of each source.

    Args:
      config: of the run.
      tokenizer: of its texts.
      train: texts in memory (see `is_texts`) in place of `data.train`.
      hold_out: False: `data.eval` is not looked at, since the evaluation data comes from elsewhere.
      progress: show a bar on the terminal while tokenising.

    Raises:
      ConfigError: no training data is named, or a fraction that leaves nothing.
      DataError: data that can't be used; StorageError: a cache that can't be written.
    """
    data = config.data
    if train is None and not data.train:
        raise ConfigError("data.train is empty", "Name a file, folder, glob or URL, e.g. --data.train corpus.txt.")
    names = data.train if train is None else ("train_dataset",)
    sources = data.train if train is None else train
    stores = _open(config, tokenizer, sources, "data.train", names[0], progress)
    edges = [store.edges for store, _ in stores]
    held_out: EvalRows | None = None
    buckets = _buckets(config)
    if hold_out and isinstance(data.eval, tuple):
        held_out = build_eval(config, tokenizer, data.eval, progress=progress)
    elif hold_out and isinstance(data.eval, float):
        parts = [_split(config, name, store) for name, (store, _) in zip(names, stores, strict=True)]
        edges = [first for first, _ in parts]
        packed = _packed(config, tokenizer, stores, [last for _, last in parts], held_out=True)
        held_out = EvalRows(packed, buckets=buckets)
    rows = _packed(config, tokenizer, stores, edges)
    weights, shuffle = data.weights, data.shuffle
    return TrainRows(rows, seed=config.seed, weights=weights, shuffle=shuffle, buckets=buckets), held_out


def build_eval(
    config: Config,
    tokenizer: Tokenizer,
    data: Any,
    *,
    progress: bool = True,
    field: str = "data.eval",
    check: Callable[[TokenStore], None] | None = None,
) -> EvalRows:
    """Rows for an evaluation: of texts or examples in memory, or of paths (which messages call `field`).

    `check` sees the tokens of each source before rows are planned.

    Raises:
      DataError: data that can't be used; StorageError: a cache that can't be written.
    """
    stores = _open(config, tokenizer, data, field, "eval_dataset", progress)
    if check is not None:
        for store, _ in stores:
            check(store)
    packed = _packed(config, tokenizer, stores, [store.edges for store, _ in stores], held_out=True)
    return EvalRows(packed, buckets=_buckets(config))


Opened = tuple[TokenStore, str]
"""The tokens of a source, and what it holds, in words."""


def _open(config: Config, tokenizer: Tokenizer, data: Any, field: str, argument: str, progress: bool) -> list[Opened]:
    """The tokens of records in memory, or of every path."""
    options = cache_options(config)
    if config.task == "pretrain":
        if is_texts(data):
            return [(text_store(data, tokenizer, options, name=argument), "texts")]
        with _progress_bar(progress) as report:
            return [(open_store(path, tokenizer, options, field=field, progress=report), "texts") for path in data]
    stores: list[Opened] = []
    reader = sft if config.task in EXAMPLES else preference
    with _progress_bar(progress) as report:
        for source in [data] if is_texts(data) else data:
            name = f"{field}: {source}" if isinstance(source, str) else argument
            recipe = reader.recipe_of(config, tokenizer, source, field, name)
            mine = example_options(options, recipe)
            if isinstance(source, str):
                store = open_store(source, tokenizer, mine, field=field, progress=report)
            else:
                store = example_store(source, tokenizer, mine, name=argument)
            stores.append((store, reader.describe_recipe(recipe)))
    return stores


def _packed(
    config: Config, tokenizer: Tokenizer, stores: Sequence[Opened], edges: Sequence[np.ndarray], held_out: bool = False
) -> list[PackedRows]:
    """The planned rows of a stretch of each store."""
    if config.task not in ("pretrain", *EXAMPLES):
        found = zip(stores, edges, strict=True)
        return [preference.rows_of(config, store, part, tokenizer.pad_id, title) for (store, title), part in found]
    token_bytes = tokenizer.token_bytes()
    data, length = config.data, config.max_length
    packing = data.packing
    if (
        held_out and packing == "concat"
    ):  # a token that a row begins with is not scored: figures would depend on the cuts
        packing = "best_fit" if config.task == "pretrain" else "best_fit_split"
    return [
        PackedRows(
            store,
            open_plan(store, part, length, packing, data.truncation),
            token_bytes=token_bytes,
            pad_id=tokenizer.pad_id,
            edges=part,
            title=title,
            transform=transform_of(tokenizer.images),
        )
        for (store, title), part in zip(stores, edges, strict=True)
    ]


def _buckets(config: Config) -> tuple[int, ...]:
    return () if config.task == "pretrain" else buckets_of(config)


def cache_options(config: Config) -> CacheOptions:
    """How the data section wants its sources tokenised."""
    data = config.data
    return CacheOptions(
        folder=data.cache_dir,
        recipe=Recipe(data.text_field, data.append_eos, data.prepend_bos),
        on_bad_record=data.on_bad_record,
        max_bad_records=data.max_bad_records,
        num_workers=data.num_workers,
    )


def _split(config: Config, path: str, store: TokenStore) -> tuple[np.ndarray, np.ndarray]:
    fraction = config.data.eval
    assert isinstance(fraction, float)
    if store.targets is not None:
        unit = 1 if config.task in EXAMPLES else preference.documents_of_a_record(config)
        if len(store.edges) < 2 * unit + 1:
            raise ConfigError(
                f"data.eval: {fraction} of {path}, which holds one example: nothing is left to train on or to evaluate",
                "Name files.",
            )
        return split_documents(np.asarray(store.edges), fraction, unit)
    tokens = int(store.edges[-1])
    # Two tokens make one target: less can't be trained on, or evaluated.
    if min(tokens * fraction, tokens * (1 - fraction)) < 2:
        raise ConfigError(
            f"data.eval: {fraction} of {path} ({tokens} tokens) leaves nothing to train on or to evaluate",
            "Write another fraction, or name files.",
        )
    return split_edges(np.asarray(store.edges), fraction)


@contextlib.contextmanager
def _progress_bar(show: bool) -> Iterator[Progress | None]:
    """A bar on standard error, where that is a terminal; it appears with the first chunk."""
    if not show or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("tokenising"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("tokenising", total=None, visible=False)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=done < total)

        yield report
