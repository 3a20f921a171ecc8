"""Models and datasets of the Hugging Face hub, through the `huggingface_hub` package (the extra `hub`).

Nothing is fetched but weights as safetensors, JSON and tokenizer files, or the data files of one split: no code, no
pickle. What is there already (HF_HUB_CACHE, HF_HOME) is not fetched again, and is enough without a network.
HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE mean what they mean there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jtrain.data.files import SUFFIXES
from jtrain.errors import ConfigError, DataError, JtrainError

COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)
"""Small files that stand beside the weights of a model."""
MODEL_FILES = (
    "config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    *COMPANIONS,
    "additional_chat_templates/*.jinja",
)
"""Patterns of what is fetched of a model."""

_MODEL = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*?)(?:@([\w./-]+))?")
_DATASET = re.compile(r"hf:([\w-][\w.-]*/[\w-][\w.-]*?)((?:/[\w.-]+)*)(?:@([\w./-]+))?(?::([\w.-]+))?")
_SPLITS = ("train", "validation", "valid", "val", "dev", "eval", "test")
_NUMBERED = re.compile(r"-\d{5}-of-(\d{5})\.")
_PARQUET = "refs/convert/parquet"  # where the hub keeps every dataset as Parquet, as <config>/<split>/<number>.parquet


class _Dataset(NamedTuple):
    repo: str
    folder: str
    revision: str | None
    split: str | None


def hub_folder(spec: str, *, field: str = "model.path") -> Path:
    """The local folder of a model, fetched where it is not there yet.

    Args:
      spec: `org/name`, or `org/name@revision` (a branch, tag or commit).
      field: the config field, for messages.

    Raises:
      ConfigError: the package is missing, there is no such model or revision, it is gated, or the hub is out of reach.
    """
    found = _MODEL.fullmatch(spec)
    if found is None:
        raise ConfigError(f"{field}: {spec!r} is no name of a model", "write org/name or org/name@revision")
    return _snapshot(f"{field}: {spec}", found[1], found[2], "model", MODEL_FILES, ConfigError)


def hub_dataset_files(spec: str, *, field: str = "data.train") -> list[str]:
    """The local files of one split of a dataset, fetched where they are not there yet, in order of their names.

    Args:
      spec: `hf:org/name[/folder][@revision][:split]`. Without a split it is train, or, where no file is of a split,
        all data there is. `folder` is needed where the repository holds several datasets.
      field: the config field, for messages.

    Raises:
      DataError: the package is missing, there is no such dataset, revision or split, it is gated, or the hub is out of
        reach; or the files are in several folders.
    """
    what = f"{field}: {spec}"
    found = _DATASET.fullmatch(spec)
    if found is None:
        raise DataError(f"{what} is no name of a dataset", "write hf:org/name[@revision][:split]")
    wanted = _Dataset(found[1], found[2].strip("/"), found[3], found[4])
    names = _names(what, wanted, wanted.revision)
    chosen, revision = _of_split(names, wanted), wanted.revision
    if not chosen and revision is None:
        try:
            converted = _names(what, wanted, _PARQUET)
        except DataError:
            converted = []
        chosen, revision = _of_split(converted, wanted), _PARQUET
    if not chosen:
        there = ", ".join(names[:12]) or "none"
        raise DataError(
            f"{what}: no data file of the split {wanted.split or 'train'}; there are: {there}",
            f"name a split, as in hf:{wanted.repo}:test; read are {', '.join(SUFFIXES)}",
        )
    folders = sorted({name.rpartition("/")[0] for name in chosen})
    roots = sorted({_above_split(folder) for folder in folders})
    if len(roots) > 1:
        raise DataError(
            f"{what}: files of that split are in several folders: {', '.join(roots[:12])}",
            f"name one: hf:{wanted.repo}/{roots[0]}{f':{wanted.split}' if wanted.split else ''}",
        )
    counts = {int(found[1]) for name in chosen if (found := _NUMBERED.search(name))}
    if counts and len(chosen) < max(counts):
        raise DataError(
            f"{what}: {len(chosen)} of {max(counts)} files are on this machine, and the hub can't be reached",
            "fetch the rest with a network",
        )
    folder = _snapshot(what, wanted.repo, revision, "dataset", chosen, DataError)
    return [str(folder / name) for name in sorted(chosen)]


def _of_split(names: Iterable[str], wanted: _Dataset) -> list[str]:
    data = [name for name in names if name.lower().endswith(tuple(SUFFIXES))]
    if wanted.folder:
        data = [name for name in data if name.startswith(f"{wanted.folder}/")]
    chosen = [name for name in data if _is_of(name, wanted.split or "train")]
    if not chosen and wanted.split is None:
        chosen = [name for name in data if not any(_is_of(name, split) for split in _SPLITS)]
    return chosen


def _is_of(name: str, split: str) -> bool:
    """Whether the split's name stands in a path as a word of its own: data/train-00000-of-00002.parquet."""
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(split)}(?![A-Za-z0-9])", name) is not None


def _above_split(folder: str) -> str:
    above, _, last = folder.rpartition("/")
    return above if any(_is_of(last, split) for split in _SPLITS) else folder


def _names(what: str, wanted: _Dataset, revision: str | None) -> list[str]:
    """Files of a dataset's repository; of the copy on this machine where the hub is out of reach."""

    def listed() -> list[str]:
        import huggingface_hub

        return huggingface_hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT")).list_repo_files(
            wanted.repo, repo_type="dataset", revision=revision
        )

    def copied() -> list[str]:
        import huggingface_hub

        root = Path(_cache() or huggingface_hub.constants.HF_HUB_CACHE) / f"datasets--{wanted.repo.replace('/', '--')}"
        ref = root / "refs" / (revision or "main")
        folder = root / "snapshots" / (ref.read_text() if ref.is_file() else revision or "")
        if not ref.is_file() and not (revision and folder.is_dir()):
            raise DataError(
                f"{what} is not on this machine, and the hub can't be reached"
                + (" (HF_HUB_OFFLINE is set)" if _offline() else ""),
                "fetch it once with a network, or give the path of a copy",
            )
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    if _offline():
        return _guarded(what, copied, DataError)
    try:
        return sorted(_guarded(what, listed, DataError))
    except DataError:
        try:
            return copied()
        except DataError:
            pass
        raise


def _snapshot(
    what: str,
    repo: str,
    revision: str | None,
    kind: str,
    patterns: Iterable[str],
    error: type[JtrainError],
) -> Path:
    def fetch() -> str:
        import huggingface_hub

        return huggingface_hub.snapshot_download(
            repo,
            repo_type=kind,
            revision=revision,
            endpoint=os.environ.get("HF_ENDPOINT"),
            cache_dir=_cache(),
            allow_patterns=list(patterns),
            local_files_only=_offline(),
        )

    return Path(_guarded(what, fetch, error))


def _cache() -> str | None:
    if "HF_HUB_CACHE" in os.environ:
        return os.environ["HF_HUB_CACHE"]
    return os.path.join(os.environ["HF_HOME"], "hub") if "HF_HOME" in os.environ else None


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _guarded(what: str, call: Callable[[], Any], error: type[JtrainError]) -> Any:
    """`call()`, with what goes wrong in it said as an error of ours."""
    try:
        from huggingface_hub import errors
    except ImportError as missing:
        raise error(
            f"{what}: the package huggingface_hub is not installed", "pip install 'jtrain[hub]', or give a local path"
        ) from missing
    try:
        return call()
    except errors.GatedRepoError as cause:
        raise error(
            f"{what} is gated", "accept its conditions on its page, then set HF_TOKEN (or run hf auth login)"
        ) from cause
    except errors.RevisionNotFoundError as cause:
        raise error(f"{what}: there is no such revision", "give a branch, tag or commit of the repository") from cause
    except errors.RepositoryNotFoundError as cause:
        raise error(
            f"{what}: the hub has no such repository, or this user may not see it",
            "check the name (a local path needs ./ before it); for a private one set HF_TOKEN",
        ) from cause
    except errors.HFValidationError as cause:
        raise error(f"{what}: {cause}", "write org/name or org/name@revision") from cause
    except errors.LocalEntryNotFoundError as cause:
        raise error(
            f"{what} is not on this machine as a whole, and the hub can't be reached"
            + (" (HF_HUB_OFFLINE is set)" if _offline() else f": {_short(cause)}"),
            "fetch it once with a network, or give the path of a copy: no file or folder here has that name",
        ) from cause
    except (OSError, RuntimeError) as cause:  # of the connection: its classes differ by release
        raise error(
            f"{what} can't be fetched: {type(cause).__name__}: {_short(cause)}",
            "check the network, HF_ENDPOINT and the disk",
        ) from cause


def _short(cause: Exception) -> str:
    """The library's messages are long, and repeat the address several times."""
    text = " ".join(str(cause).split())
    return text if len(text) <= 200 else f"{text[:200]}..."
