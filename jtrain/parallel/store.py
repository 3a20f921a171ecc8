"""The key-value store of jax's coordination service: what the processes of a run leave for each other to read.

It needs no device and no collective, so that it also works while the devices hang. A call may wait for as long as the
coordinator does not answer: never call it from a thread that has to be on time.
"""

from __future__ import annotations

from typing import Any, Protocol

from jax._src import distributed  # the client has no public name


class Store(Protocol):
    """What is needed of it."""

    def put(self, key: str, value: str, *, replace: bool = False) -> bool:
        """Writes; False: the key has a value already, which stays unless `replace`."""
        ...

    def get(self, key: str) -> str | None:
        """The value, if there is one, at once."""
        ...

    def below(self, prefix: str) -> dict[str, str]:
        """The last part of the key -> value, of all keys `<prefix>/...`."""
        ...


class Coordination:
    """The store of the processes that this one has joined."""

    def __init__(self) -> None:
        self._client: Any = distributed.global_state.client

    def put(self, key: str, value: str, *, replace: bool = False) -> bool:
        try:
            self._client.key_value_set(key, value, allow_overwrite=replace)
        except RuntimeError:  # somebody was faster, or the coordinator is gone
            return False
        return True

    def get(self, key: str) -> str | None:
        try:
            return self._client.key_value_try_get(key)
        except RuntimeError:  # there is none, or the coordinator is gone
            return None

    def below(self, prefix: str) -> dict[str, str]:
        try:
            return {key.rpartition("/")[2]: value for key, value in self._client.key_value_dir_get(prefix)}
        except RuntimeError:
            return {}


def store() -> Store | None:
    """The store of this run's processes; None where there is one process, or they have not met yet."""
    state = distributed.global_state
    return None if state.client is None or state.num_processes < 2 else Coordination()
