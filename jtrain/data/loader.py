"""Batches of step k on the devices: `loader[k]` is a function of k alone, in any order of access.

Each process reads the rows that its devices hold, once, on a thread that runs ahead of the steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jtrain.data.rows import Rows
from jtrain.errors import ConfigError

_LOOK_SECONDS = 0.1


class DataLoader:
    """Global batches, cut into micro-batches.

    Row r of step k is row k * global_batch_size + r of `rows`; it stands at [r // b, r % b] of the batch, with
    b = global_batch_size / accumulation. Every array of a row gets the two leading axes; `row` int32 [A, b] is added:
    the row's number r within the step. Where `rows` has `batch_length`, the step's arrays [n, L] are cut to the length
    that it says for all rows of the step (the same in every process); `image_slots` says so of the images of a row.

    Args:
      rows: what is read.
      global_batch_size: rows of a step, over all devices and micro-batches.
      accumulation: micro-batches of a step (A).
      sharding: of the leading axes, e.g. NamedSharding(mesh, P(None, ("data", "fsdp"))).
      prefetch: steps that are read ahead while the steps are asked for in turn; 0: none.
      stop: the step that is never asked for, where it is known: nothing from there on is read ahead.
      whole: rows keep their length, whatever `batch_length` says: for outputs that are put together.

    Attributes:
      last_wait_seconds: how long the last `loader[k]` waited for its data.

    Raises:
      ConfigError: the rows can't be divided into micro-batches or over the devices.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        global_batch_size: int,
        accumulation: int = 1,
        sharding: NamedSharding,
        prefetch: int = 2,
        stop: int | None = None,
        whole: bool = False,
    ):
        if global_batch_size % accumulation:
            raise ConfigError(
                f"{global_batch_size} rows a step can't be cut into {accumulation} equal micro-batches",
                f"global_batch_size must be a multiple of {accumulation}.",
            )
        self._shape = (accumulation, global_batch_size // accumulation)
        self._rows = rows
        self._batch_length = None if whole else getattr(rows, "batch_length", None)
        self._image_slots = getattr(rows, "image_slots", None)
        self._per_token = set(getattr(rows, "per_token", ()))
        self._size = global_batch_size
        self._sharding = sharding
        self._stop = stop
        self._prefetch = prefetch
        self._shardings: dict[int, NamedSharding] = {}
        self._mine = self._local_rows()
        self._place = np.zeros(self._shape, np.int64)
        self._place.flat[self._mine] = np.arange(len(self._mine))
        self._pool = ThreadPoolExecutor(max(1, min(prefetch, 2)), thread_name_prefix="jtrain-data")
        self._ahead: dict[int, Future[dict[str, jax.Array]]] = {}
        self._last = -1
        self._given_up = False
        self.last_wait_seconds = 0.0

    def __getitem__(self, step: int) -> dict[str, jax.Array]:
        """The batch of step >= 0; arrays [A, b, ...], sharded."""
        batch = self.get(step, lambda: False)
        assert batch is not None
        return batch

    def get(self, step: int, give_up: Callable[[], bool]) -> dict[str, jax.Array] | None:
        """The batch of step >= 0, or None: it is not there yet, and `give_up` says that it need not be waited for.

        A reader that was given up may never end: `close` leaves it alone.
        """
        started = time.perf_counter()
        for other in [other for other in self._ahead if not step <= other <= step + self._prefetch]:
            self._ahead.pop(other).cancel()
        in_turn = step == self._last + 1
        self._last = step
        future = self._ahead.pop(step, None)
        if future is None and self._prefetch:
            future = self._pool.submit(self._read, step)
        if in_turn:
            for later in range(step + 1, step + 1 + self._prefetch):
                if later not in self._ahead and (self._stop is None or later < self._stop):
                    self._ahead[later] = self._pool.submit(self._read, later)
        while future is not None and not wait((future,), _LOOK_SECONDS).done:
            if give_up():
                self._given_up = True
                return None
        batch = self._read(step) if future is None else future.result()
        self.last_wait_seconds = time.perf_counter() - started
        return batch

    def close(self) -> None:
        """Ends the threads. The loader can't be used afterwards."""
        self._pool.shutdown(wait=not self._given_up, cancel_futures=True)
        self._ahead.clear()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, step: int) -> dict[str, jax.Array]:
        host = dict(self._rows.rows(step * self._size + self._mine))
        if self._batch_length is not None:
            length = self._batch_length(step * self._size + np.arange(self._size))
            if length is not None:
                cut = {name for name, values in host.items() if values.ndim == 2} | self._per_token
                host = {name: values[:, :length] if name in cut else values for name, values in host.items()}
        if "pixel_values" in host and self._image_slots is not None:
            images, slots = host["pixel_values"], self._image_slots(step * self._size + np.arange(self._size))
            if slots is not None:
                more = slots - images.shape[1]
                host["pixel_values"] = np.pad(images, ((0, 0), (0, more), *[(0, 0)] * (images.ndim - 2)))
        host["row"] = self._mine.astype(np.int32)
        return {name: self._put(values) for name, values in host.items()}

    def _put(self, values: np.ndarray) -> jax.Array:
        values = np.asarray(values)
        shape = (*self._shape, *values.shape[1:])
        sharding = self._sharding_of(len(shape))
        if sharding.is_fully_addressable:
            return jax.device_put(values.reshape(shape), sharding)

        def local(index: Any) -> np.ndarray:
            return values[self._place[index[:2]]][(..., *index[2:])]

        return jax.make_array_from_callback(shape, sharding, local)

    def _sharding_of(self, rank: int) -> NamedSharding:
        """The sharding for arrays of this rank: [A, b] has no axis for a token spec."""
        if rank not in self._shardings:
            spec = PartitionSpec(*tuple(self._sharding.spec)[:rank])
            self._shardings[rank] = NamedSharding(self._sharding.mesh, spec)
        return self._shardings[rank]

    def _local_rows(self) -> np.ndarray:
        """Numbers, within a step, of the rows that this process's devices hold; rising."""
        try:
            indices = self._sharding_of(2).addressable_devices_indices_map(self._shape)
        except ValueError as error:
            raise ConfigError(
                f"the {self._shape[1]} rows of a micro-batch can't be divided over the mesh "
                f"{dict(self._sharding.mesh.shape)} by {self._sharding.spec}",
                "Change global_batch_size, gradient_accumulation_steps or the mesh.",
            ) from error
        held = np.zeros(self._shape, bool)
        for index in indices.values():
            held[index] = True
        return np.flatnonzero(held)
