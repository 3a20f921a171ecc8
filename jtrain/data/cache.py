"""Token caches: a source is tokenised once, into memory-mapped files that any later run of the same data opens.

A cache is found by a fingerprint of the files' contents (not their paths or times), the tokenizer and the recipe. It
is built in a folder of its own and renamed when it is whole, so that an interrupted build leaves nothing that could
be taken for one; a lock lets a second process on the host wait for the first.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.data.files import content_digest, find_files, is_url, kind_of, stat
from jtrain.data.packing import PLAN_VERSION, Packing, Plan, Truncation, plan_examples, plan_rows
from jtrain.data.quarantine import NAME as QUARANTINE
from jtrain.data.quarantine import read_quarantine
from jtrain.data.sources import CHUNK_BYTES, Chunk, plan_chunks
from jtrain.data.store import TokenStore
from jtrain.data.tokenise import (
    AnyRecipe,
    ChunkResult,
    ExampleRecipe,
    Recipe,
    check_special_tokens,
    token_dtype,
    tokenise_chunk,
)
from jtrain.data.tokenizers import Tokenizer
from jtrain.data.worker import tokenise_parallel
from jtrain.errors import ConfigError, DataError, StorageError
from jtrain.progress import report

log = logging.getLogger("jtrain.data")

CACHE_VERSION = 1
_PARALLEL_BYTES = 32 << 20
_WHOLE = 1 << 62
_PLAN_PARTS = ("starts", "lengths", "first")
# A file written again within the clock's grain of its hash could keep its stamp; such hashes are not reused.
_SETTLED_SECONDS = 2.0

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while a source is tokenised."""


@dataclass(frozen=True)
class CacheOptions:
    """Where and how caches are made.

    Attributes:
      folder: where they stand; None: the user's cache folder, or JTRAIN_CACHE_DIR.
      recipe: how texts, or whole records, become tokens.
      on_bad_record, max_bad_records: the policy of `data.on_bad_record`, for each source.
      num_workers: processes; None: one a core. Small sources are tokenised in this process.
      chunk_bytes, parallel_bytes: size of a unit of work, and of a source that is worth several processes.
    """

    folder: str | None = None
    recipe: AnyRecipe = field(default_factory=Recipe)
    on_bad_record: str = "fail"
    max_bad_records: int = 100
    num_workers: int | None = None
    chunk_bytes: int = CHUNK_BYTES
    parallel_bytes: int = _PARALLEL_BYTES


def cache_folder(folder: str | None = None) -> Path:
    """The folder of all data caches.

    Raises:
      ConfigError: it is a URL.
    """
    folder = folder or os.environ.get("JTRAIN_CACHE_DIR")
    if folder is None:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return Path(base) / "jtrain" / "data"
    if is_url(folder):
        raise ConfigError(f"data.cache_dir: {folder} is a URL", "Token caches are memory-mapped: name a local folder.")
    return Path(folder)


def open_store(
    pattern: str,
    tokenizer: Tokenizer,
    options: CacheOptions,
    *,
    field: str = "data.train",
    progress: Progress | None = None,
) -> TokenStore:
    """The tokens of one source (a path, glob, folder or URL); tokenised now if they are not in the cache yet.

    Raises:
      DataError: no file, an unreadable one, bad records beyond the policy, no text, or a token that is missing.
      StorageError: the cache can't be written.
    """
    check_special_tokens(tokenizer, options.recipe)
    files = [(path, kind_of(path)) for path in find_files(pattern, field=field)]
    root = cache_folder(options.folder)
    with storage(root):
        (root / "tokens").mkdir(parents=True, exist_ok=True)
        (root / "files").mkdir(parents=True, exist_ok=True)
    digests = [_file_digest(path, root / "files") for path, _ in files]
    recipe = {k: v for k, v in asdict(options.recipe).items() if k not in ("bad_limit", "title", "folder")}
    identity = [CACHE_VERSION, [*zip(digests, (kind for _, kind in files), strict=True)], tokenizer.fingerprint, recipe]
    key = hashlib.blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest()
    path = root / "tokens" / key
    if not _is_whole(path):
        with locked(root / "tokens" / f"{key}.lock"):
            if not _is_whole(path):
                _build(path, files, tokenizer, options, progress)
    meta = json.loads((path / "meta.json").read_text())
    _check_bad(path, meta["bad_records"], options, [file for file, _ in files])
    if not meta["tokens"]:
        raise DataError(f"{field}: {pattern} holds no text", "Every file or record of it is empty.")
    tokens = np.memmap(path / "tokens.bin", np.dtype(meta["dtype"]), "r")
    edges = np.load(path / "edges.npy", mmap_mode="r", allow_pickle=False)
    if not meta.get("targets"):
        return TokenStore(tokens, edges, key, path, bad_records=meta["bad_records"])
    targets = np.memmap(path / "targets.bin", np.uint8, "r")
    values = np.fromfile(path / "values.bin", np.float32)
    store = TokenStore(tokens, edges, key, path, targets, values, bad_records=meta["bad_records"])
    if not meta.get("images"):
        return store
    from jtrain.data.examples import with_cached_images  # it reads options of this module

    return with_cached_images(store, tokenizer, options.recipe)


def open_plan(
    store: TokenStore, edges: np.ndarray, max_length: int, packing: Packing, truncation: Truncation = "keep_start"
) -> Plan:
    """The plan of a stretch of a store, kept beside its cache; of examples where the store has targets.

    Raises:
      DataError: of all of the examples none has a token to learn.
    """
    targets = store.targets
    name = f"plan-{PLAN_VERSION}-{packing}-{max_length}-{int(edges[0])}-{int(edges[-1])}"
    path = None if store.path is None else store.path / (name if targets is None else f"{name}-{truncation}")
    kept = None if path is None else _load_plan(path, max_length)
    if kept is not None:
        return kept
    if targets is None:
        plan = plan_rows(edges, max_length, packing)
    else:
        images = () if store.images is None else (store.images.starts, store.images.tokens)
        plan = plan_examples(edges, targets, max_length, packing, truncation, *images)
        if not plan.rows:
            raise DataError(
                f"none of the {len(edges) - 1:,} examples has a token to learn",
                "Are the completions (or the assistant's turns) empty, missing, or behind the first "
                f"{max_length} tokens (max_length, data.truncation)?",
            )
    if path is None:
        return plan
    made = temporary(path)
    with storage(made):
        made.mkdir()
        for part in _PLAN_PARTS:
            np.save(made / f"{part}.npy", getattr(plan, part), allow_pickle=False)
    publish(made, path, lambda: _load_plan(path, max_length) is not None)
    return plan


def _load_plan(path: Path, max_length: int) -> Plan | None:
    """The plan in a folder; None if there is none, or not a whole one."""
    try:
        starts, lengths, first = (
            np.load(path / f"{part}.npy", mmap_mode="r", allow_pickle=False) for part in _PLAN_PARTS
        )
    except (OSError, ValueError, EOFError):
        return None
    return Plan(starts, lengths, first, max_length) if len(starts) == len(lengths) == first[-1] else None


def _build(
    path: Path, files: Sequence[tuple[str, str]], tokenizer: Tokenizer, options: CacheOptions, progress: Progress | None
) -> None:
    """Tokenises into a temporary folder and renames it to `path`."""
    made = temporary(path)
    for stale in made.parent.glob(f"{path.name}.tmp-{socket.gethostname()}-*"):
        shutil.rmtree(stale, ignore_errors=True)  # we hold the lock: whoever made it is dead
    with storage(made):
        made.mkdir()
    try:
        skip = options.on_bad_record == "skip"
        recipe = replace(options.recipe, bad_limit=options.max_bad_records if skip else 0)
        # An example is never cut into chunks.
        sizes = (options.chunk_bytes, *([_WHOLE] if isinstance(recipe, ExampleRecipe) else []))
        chunks = [chunk for file, kind in files for chunk in plan_chunks(file, kind, *sizes)]
        jobs = [(chunk, str(made / f"{number:06d}")) for number, chunk in enumerate(chunks)]
        with contextlib.closing(_run(jobs, recipe, tokenizer, options)) as results:
            meta = _collect(made, [file for file, _ in files], jobs, results, tokenizer, options, progress)
        with storage(made):
            (made / "meta.json").write_text(json.dumps(meta, indent=1))
        publish(made, path, lambda: _is_whole(path))
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _run(
    jobs: Sequence[tuple[Chunk, str]], recipe: AnyRecipe, tokenizer: Tokenizer, options: CacheOptions
) -> Generator[ChunkResult, None, None]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(options.num_workers or cores, len(jobs))
    if workers > 1 and sum(chunk.size for chunk, _ in jobs) >= options.parallel_bytes:
        yield from tokenise_parallel(jobs, recipe, tokenizer.spec, workers)
    else:
        for chunk, out in jobs:
            yield tokenise_chunk(chunk, recipe, tokenizer, out)


def _collect(
    made: Path,
    files: Sequence[str],
    jobs: Sequence[tuple[Chunk, str]],
    results: Iterator[ChunkResult],
    tokenizer: Tokenizer,
    options: CacheOptions,
    progress: Progress | None,
) -> dict[str, Any]:
    """Joins the chunks' files in order; counts records by file, so that a bad one is named by its place in it."""
    lengths: list[np.ndarray] = []
    bad: list[dict[str, Any]] = []
    total, done = sum(chunk.size for chunk, _ in jobs), 0
    numbers = {name: number for number, name in enumerate(dict.fromkeys(files))}
    file, records, unfinished = "", 0, False
    kinds = options.recipe.parts if isinstance(options.recipe, ExampleRecipe) else ("tokens",)
    with storage(made), contextlib.ExitStack() as stack:
        joined = {kind: stack.enter_context(open(made / f"{kind}.bin", "wb")) for kind in kinds}
        for (chunk, out), result in zip(jobs, results, strict=True):
            if chunk.path != file:
                file, records, unfinished = chunk.path, 0, False
            for entry in result.bad:
                where = {"file": file, "number": numbers[file], "kind": chunk.kind}
                bad.append({**where, **entry, "index": records + entry["index"]})
            _check_policy(bad, options)
            records += result.records
            mine = np.fromfile(f"{out}.lengths", np.int64)
            if unfinished and not chunk.opens and len(mine):  # goes on with the document of the chunk before
                lengths[-1][-1] += mine[0]
                mine = mine[1:]
            if len(mine):
                lengths.append(mine)
                unfinished = not chunk.closes
            for suffix, whole in joined.items():
                with open(f"{out}.{suffix}", "rb") as part:
                    shutil.copyfileobj(part, whole, 1 << 20)
            for suffix in (*kinds, "lengths"):
                os.unlink(f"{out}.{suffix}")
            done += chunk.size
            report()
            if progress is not None:
                progress(done, total)
        edges = np.concatenate([np.zeros(1, np.int64), *lengths]).cumsum()
        np.save(made / "edges.npy", edges, allow_pickle=False)
        if bad:
            lines = (json.dumps(entry, ensure_ascii=False) + "\n" for entry in bad)
            (made / QUARANTINE).write_text("".join(lines), encoding="utf-8")
    return {
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "tokens": int(edges[-1]),
        "documents": len(edges) - 1,
        "bad_records": len(bad),
        "files": sorted({chunk.path for chunk, _ in jobs}),
        "tokenizer": tokenizer.spec,
        "targets": "targets" in kinds,
        "images": "images" in kinds,
    }


def _check_policy(bad: Sequence[dict[str, Any]], options: CacheOptions) -> None:
    """Raises:
    DataError: there are more bad records than the policy allows; names the first.
    """
    limit = options.max_bad_records if options.on_bad_record == "skip" else 0
    if len(bad) <= limit:
        return
    first, unit = bad[0], {"text": "", "jsonl": "line"}.get(bad[0]["kind"], "record")
    where = f"{first['file']}: {unit} {first['index'] + 1}" if unit else first["file"]
    remedy = first["remedy"].rstrip(".") + "."  # what follows is a sentence of its own
    if options.on_bad_record == "skip":
        raise DataError(
            f"more than {limit} bad records (data.max_bad_records); the first: {where} {first['reason']}",
            f"{remedy} Or raise data.max_bad_records.",
        )
    raise DataError(
        f"{where} {first['reason']}",
        f"{remedy} Or leave such records out: data.on_bad_record: skip (up to data.max_bad_records).",
    )


def _check_bad(path: Path, count: int, options: CacheOptions, files: Sequence[str]) -> None:
    """Applies this run's policy to a cache that another run may have made, and says what was left out.

    The same files may lie elsewhere by now: they are listed as `files` has them.
    """
    if not count:
        return
    found = read_quarantine(path)
    here = [{**entry, "file": files[entry["number"]]} if "number" in entry else entry for entry in found]
    _check_policy(here, options)
    if here != found:
        made = temporary(path / QUARANTINE)
        with contextlib.suppress(OSError):
            made.write_text("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in here), encoding="utf-8")
            made.replace(path / QUARANTINE)
    log.warning("%d bad records were left out; they are listed in %s", count, path / QUARANTINE)


def _is_whole(path: Path) -> bool:
    """Whether a cache is there and its files have the sizes that it says."""
    try:
        meta = json.loads((path / "meta.json").read_text())
        tokens = (path / "tokens.bin").stat().st_size
        edges = np.load(path / "edges.npy", mmap_mode="r", allow_pickle=False)
        whole = tokens == meta["tokens"] * np.dtype(meta["dtype"]).itemsize and edges[-1] == meta["tokens"]
        if whole and meta.get("targets"):
            whole = (path / "targets.bin").stat().st_size == meta["tokens"]
            whole = whole and (path / "values.bin").stat().st_size == 4 * meta["documents"]
        if whole and meta.get("images"):
            whole = (path / "images.bin").stat().st_size == np.fromfile(path / "image_lengths.bin", np.int64).sum()
        return bool(whole)
    except (OSError, ValueError, KeyError, EOFError):
        return False


def _file_digest(path: str, memo_folder: Path) -> str:
    """Digest of a file's content, remembered by its path, size and stamp."""
    size, stamp = stat(path)
    name = path if is_url(path) else os.path.abspath(path)
    memo = memo_folder / f"{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError, KeyError):
        known = json.loads(memo.read_text())
        if (known["size"], known["stamp"]) == (size, stamp) and stamp and known["settled"]:
            return known["digest"]
    settled = is_url(path) or time.time() - int(stamp) / 1e9 > _SETTLED_SECONDS
    digest = content_digest(path)
    made = temporary(memo)
    with storage(memo):
        made.write_text(json.dumps({"size": size, "stamp": stamp, "digest": digest, "settled": settled}))
        made.replace(memo)
    return digest


def temporary(path: Path) -> Path:
    """A name beside `path` for what is not whole yet; nobody else's."""
    return path.with_name(f"{path.name}.tmp-{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns()}")


def publish(made: Path, path: Path, whole: Callable[[], bool]) -> None:
    """Renames a finished folder into place. A broken one there makes way; a whole one of another host stays."""
    with storage(path):
        for part in made.iterdir():
            with open(part, "rb") as file:
                os.fsync(file.fileno())
        try:
            made.rename(path)
        except OSError:
            if not path.is_dir():
                raise
            if whole():
                shutil.rmtree(made)
                return
            broken = temporary(path)
            path.rename(broken)
            made.rename(path)
            shutil.rmtree(broken, ignore_errors=True)


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Holds a lock that ends with the process, so that a dead builder never blocks the next.

    Args:
      path: its file.
      wait: False: goes on without the lock where another process holds it; what is given then is False.
    """
    with storage(path), open(path, "a") as file:
        held = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held = False
            if wait:
                log.info("another process is making the same cache; waiting for it")
                report("queue")
                fcntl.flock(file, fcntl.LOCK_EX)
                report("init")
                held = True
        except OSError:  # a file system without locks: work may be done twice, which is safe
            log.debug("%s can't be locked", path)
        yield held


@contextlib.contextmanager
def storage(path: Path) -> Iterator[None]:
    """What can't be written is a StorageError that names the folder."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"data.cache_dir: {path} can't be written: {error.strerror or error}",
            "Free space, or set data.cache_dir (or JTRAIN_CACHE_DIR) to a folder that can be written.",
        ) from error
