"""From the config's data section to the rows of training and evaluation."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from jtrain.data.cache import CacheOptions, Progress, open_plan, open_store
from jtrain.data.packing import split_edges
from jtrain.data.rows import EvalRows, PackedRows, TrainRows
from jtrain.data.store import TokenStore
from jtrain.data.tokenise import Recipe
from jtrain.data.tokenizers import Tokenizer
from jtrain.errors import ConfigError

if TYPE_CHECKING:
    from jtrain.config.schema import Config


def build_data(config: Config, tokenizer: Tokenizer, *, progress: bool = True) -> tuple[TrainRows, EvalRows | None]:
    """Tokenises (or opens the caches), plans the rows, and gives the training stream and the evaluation rows.

    A fraction as `data.eval` is held out from the end of each source of `data.train`.

    Args:
      progress: show a bar on the terminal while tokenising.

    Raises:
      ConfigError: no training data is named, or a fraction that leaves nothing.
      DataError: data that can't be used; StorageError: a cache that can't be written.
    """
    data = config.data
    token_bytes = tokenizer.token_bytes()

    def packed(store: TokenStore, edges: np.ndarray) -> PackedRows:
        plan = open_plan(store, edges, config.max_length, data.packing)
        return PackedRows(store, plan, token_bytes=token_bytes, pad_id=tokenizer.pad_id)

    if not data.train:
        raise ConfigError("data.train is empty", "Name a file, folder, glob or URL, e.g. --data.train corpus.txt.")
    options = cache_options(config)
    with _progress_bar(progress) as report:
        train = [open_store(path, tokenizer, options, progress=report) for path in data.train]
        held_out: list[PackedRows] = []
        if isinstance(data.eval, tuple):
            stores = [open_store(path, tokenizer, options, field="data.eval", progress=report) for path in data.eval]
            held_out = [packed(store, store.edges) for store in stores]
    edges = [store.edges for store in train]
    if isinstance(data.eval, float) and data.eval:
        parts = [_split(config, path, store) for path, store in zip(data.train, train, strict=True)]
        edges = [first for first, _ in parts]
        held_out = [packed(store, last) for store, (_, last) in zip(train, parts, strict=True)]
    sources = [packed(store, part) for store, part in zip(train, edges, strict=True)]
    rows = TrainRows(sources, seed=config.seed, weights=data.weights, shuffle=data.shuffle)
    return rows, EvalRows(held_out) if held_out else None


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
