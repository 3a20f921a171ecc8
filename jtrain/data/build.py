"""From the config's data section, or texts in memory, to the rows of training and evaluation."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jtrain.data.cache import CacheOptions, Progress, open_plan, open_store
from jtrain.data.packing import split_edges
from jtrain.data.rows import EvalRows, PackedRows, TrainRows
from jtrain.data.store import TokenStore
from jtrain.data.texts import is_texts, text_store
from jtrain.data.tokenise import Recipe
from jtrain.data.tokenizers import Tokenizer
from jtrain.errors import ConfigError

if TYPE_CHECKING:
    from jtrain.config.schema import Config


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
    stores = _open(config, tokenizer, data.train if train is None else train, "data.train", names[0], progress)
    edges = [store.edges for store in stores]
    held_out: EvalRows | None = None
    if hold_out and isinstance(data.eval, tuple):
        held_out = build_eval(config, tokenizer, data.eval, progress=progress)
    elif hold_out and isinstance(data.eval, float):
        parts = [_split(config, name, store) for name, store in zip(names, stores, strict=True)]
        edges = [first for first, _ in parts]
        held_out = EvalRows(_packed(config, tokenizer, stores, [last for _, last in parts]))
    sources = _packed(config, tokenizer, stores, edges)
    return TrainRows(sources, seed=config.seed, weights=data.weights, shuffle=data.shuffle), held_out


def build_eval(config: Config, tokenizer: Tokenizer, data: Any, *, progress: bool = True) -> EvalRows:
    """Rows for an evaluation: of texts in memory, or of paths.

    Raises:
      DataError: data that can't be used; StorageError: a cache that can't be written.
    """
    stores = _open(config, tokenizer, data, "data.eval", "eval_dataset", progress)
    return EvalRows(_packed(config, tokenizer, stores, [store.edges for store in stores]))


def _open(
    config: Config, tokenizer: Tokenizer, data: Any, field: str, argument: str, progress: bool
) -> list[TokenStore]:
    """The tokens of texts in memory, or of every path."""
    options = cache_options(config)
    if is_texts(data):
        return [text_store(data, tokenizer, options, name=argument)]
    with _progress_bar(progress) as report:
        return [open_store(path, tokenizer, options, field=field, progress=report) for path in data]


def _packed(
    config: Config, tokenizer: Tokenizer, stores: Sequence[TokenStore], edges: Sequence[np.ndarray]
) -> list[PackedRows]:
    """The planned rows of a stretch of each store."""
    token_bytes = tokenizer.token_bytes()
    plans = [
        open_plan(store, part, config.max_length, config.data.packing)
        for store, part in zip(stores, edges, strict=True)
    ]
    return [
        PackedRows(store, plan, token_bytes=token_bytes, pad_id=tokenizer.pad_id)
        for store, plan in zip(stores, plans, strict=True)
    ]


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
