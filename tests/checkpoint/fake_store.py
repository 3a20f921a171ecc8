"""An object store in memory, behind gs:// and s3://: no folders, no renames; it fails when it is told to."""

from __future__ import annotations

import threading
from typing import Any

from etils.epath import backend
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from jtrain.checkpoint import layout


class Objects(dict[str, Any]):
    """Several threads write while one lists."""

    def __iter__(self) -> Any:
        return iter(tuple(self.keys()))

    def items(self) -> Any:
        return tuple(super().items())


class Store(MemoryFileSystem):
    """One for all instances. `before(operation, path)` may raise or wait; `log` has what was done, in order."""

    store: dict[str, Any] = Objects()
    pseudo_dirs: list[str] = [""]  # noqa: RUF012
    log: list[tuple[str, str]] = []  # noqa: RUF012
    before: Any = staticmethod(lambda operation, path: None)
    protocol = ("gs", "gcs", "s3")
    lock = threading.RLock()

    def __init__(self, *arguments: Any, finalize_on_close: bool = True, **options: Any):
        super().__init__(*arguments, **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + str(path).partition("://")[2].strip("/") if "://" in str(path) else "/" + str(path).strip("/")

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        pass

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._note("write" if "w" in mode else "read", path)
        with self.lock:
            return super()._open(path, mode, **options)

    def rm_file(self, path: str) -> None:
        self._note("remove", path)
        super().rm_file(path)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self._note("list", path)
        with self.lock:
            return super().ls(path, detail, **options)

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        if self._strip_protocol(path1) in self.store:  # there are no folders
            self._note("copy", path2)
            super().cp_file(path1, path2, **options)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        names = self.find(path) if recursive else [path]
        if not names:
            raise FileNotFoundError(path)
        for name in names:
            self.rm_file(name)

    def _note(self, operation: str, path: str) -> None:
        path = self._strip_protocol(path)
        type(self).before(operation, path)
        self.log.append((operation, path))


def install(monkeypatch: Any) -> type[Store]:
    """Puts it behind gs:// and s3://."""
    for name in ("gs", "gcs", "s3"):
        monkeypatch.setitem(_registry, name, Store)
    monkeypatch.setattr(layout, "_STORES", {})  # no package is needed
    backend.fsspec_backend._get_filesystem.cache_clear()
    Store.clear_instance_cache()
    Store.store.clear()
    Store.pseudo_dirs[:] = [""]
    Store.log.clear()
    Store.before = staticmethod(lambda operation, path: None)
    return Store


def remove() -> None:
    """After the test."""
    backend.fsspec_backend._get_filesystem.cache_clear()
