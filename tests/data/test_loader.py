import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jtrain.data.arrays import ArrayRows
from jtrain.data.loader import DataLoader
from jtrain.errors import ConfigError, DataError


class Counting:
    """Row n holds n; counts what is read."""

    def __init__(self, fails_at=None):
        self.read = []
        self.threads = set()
        self.fails_at = fails_at

    def __len__(self):
        return 1000

    def rows(self, indices):
        if self.fails_at in indices:
            raise DataError(f"row {self.fails_at} is gone")
        self.read.extend(indices.tolist())
        self.threads.add(threading.current_thread().name)
        tokens = np.repeat(np.asarray(indices, np.int32)[:, None], 3, axis=1)
        return {"input_ids": tokens, "bytes": np.asarray(indices, np.int32)}


def sharding(*spec, shape=(2, 2, 2), axes=("data", "fsdp", "tensor")):
    mesh = Mesh(np.asarray(jax.devices()[: int(np.prod(shape))]).reshape(shape), axes)
    return NamedSharding(mesh, PartitionSpec(*spec))


BATCH = (None, ("data", "fsdp"))


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_row_r_of_step_k_is_row_k_times_the_batch_plus_r(accumulation):
    with DataLoader(Counting(), global_batch_size=16, accumulation=accumulation, sharding=sharding(*BATCH)) as loader:
        for step in (0, 1, 2):
            batch = loader[step]
            assert batch["input_ids"].shape == (accumulation, 16 // accumulation, 3)
            assert np.asarray(batch["bytes"]).ravel().tolist() == list(range(16 * step, 16 * step + 16))
            assert np.asarray(batch["row"]).ravel().tolist() == list(range(16))


def test_the_rows_lie_where_the_sharding_says():
    where = sharding(*BATCH)
    with DataLoader(Counting(), global_batch_size=8, sharding=where) as loader:
        batch = loader[0]
    assert batch["input_ids"].sharding.is_equivalent_to(where, 3)
    assert batch["bytes"].sharding.is_equivalent_to(where, 2)
    mesh = where.mesh
    for shard in batch["bytes"].addressable_shards:
        data, fsdp, _ = np.argwhere(mesh.devices == shard.device)[0]
        assert shard.data.ravel().tolist() == [4 * data + 2 * fsdp, 4 * data + 2 * fsdp + 1]


@pytest.mark.parametrize(
    ("shape", "spec"), [((8, 1, 1), BATCH), ((1, 1, 8), BATCH), ((2, 2, 2), (None, "data", "fsdp"))]
)
def test_the_mesh_changes_nothing_in_the_batch(shape, spec):
    rows = ArrayRows({"x": np.arange(400, dtype=np.float32).reshape(50, 8)}, seed=3)
    with DataLoader(rows, global_batch_size=16, accumulation=2, sharding=sharding(*spec, shape=shape)) as loader:
        found = {name: np.asarray(values) for name, values in loader[5].items()}
    wanted = rows.rows(np.arange(80, 96))["x"].reshape(2, 8, 8)
    assert np.array_equal(found["x"], wanted)


def test_any_order_of_steps_gives_the_same_batches():
    order = [3, 4, 5, 1, 5, 0, 1, 2, 9, 8]
    with DataLoader(Counting(), global_batch_size=8, sharding=sharding(*BATCH), prefetch=3) as loader:
        for step in order:
            assert np.asarray(loader[step]["bytes"]).ravel().tolist() == list(range(8 * step, 8 * step + 8)), step


def test_what_was_read_ahead_in_vain_is_not_kept():
    with DataLoader(Counting(), global_batch_size=8, sharding=sharding(*BATCH), prefetch=2) as loader:
        for step in (0, 1, 50, 51, 7, 8):
            loader[step]
        assert sorted(loader._ahead) == [9, 10]


def test_every_row_is_read_once_and_ahead_of_its_step():
    rows = Counting()
    with DataLoader(rows, global_batch_size=8, accumulation=2, sharding=sharding(*BATCH), stop=6) as loader:
        for step in range(6):
            loader[step]
    assert sorted(rows.read) == list(range(48))
    assert any(name.startswith("jtrain-data") for name in rows.threads)


def test_nothing_is_read_ahead_without_prefetch():
    rows = Counting()
    with DataLoader(rows, global_batch_size=8, sharding=sharding(*BATCH), prefetch=0) as loader:
        loader[0]
    assert rows.threads == {threading.current_thread().name}
    assert len(rows.read) == 8


def test_a_batch_that_was_read_ahead_is_not_waited_for():
    rows = Counting()
    read, slow = rows.rows, 0.2
    rows.rows = lambda indices: (time.sleep(slow), read(indices))[1]
    with DataLoader(rows, global_batch_size=8, sharding=sharding(*BATCH)) as loader:
        loader[0]
        assert loader.last_wait_seconds >= slow
        time.sleep(3 * slow)
        loader[1]
        assert loader.last_wait_seconds < slow


def test_an_error_of_a_row_is_raised_at_its_own_step():
    with DataLoader(Counting(fails_at=20), global_batch_size=8, sharding=sharding(*BATCH)) as loader:
        loader[0]
        loader[1]
        with pytest.raises(DataError, match="row 20"):
            loader[2]


def test_a_closed_loader_leaves_no_thread():
    before = threading.active_count()
    loader = DataLoader(Counting(), global_batch_size=8, sharding=sharding(*BATCH))
    loader[0]
    loader.close()
    assert threading.active_count() <= before


def test_wide_types_become_the_ones_that_jax_has():
    rows = ArrayRows({"x": np.zeros((8, 2), np.float64), "n": np.zeros(8, np.int64)})
    with DataLoader(rows, global_batch_size=8, sharding=sharding(*BATCH)) as loader:
        assert {str(values.dtype) for values in loader[0].values()} == {"float32", "int32"}


def test_rows_that_cannot_be_divided_are_a_config_error():
    with pytest.raises(ConfigError, match="10 rows a step can't be cut into 4"):
        DataLoader(Counting(), global_batch_size=10, accumulation=4, sharding=sharding(*BATCH))
    with pytest.raises(ConfigError, match="6 rows of a micro-batch can't be divided"):
        DataLoader(Counting(), global_batch_size=6, sharding=sharding(*BATCH))


def test_a_batch_that_is_not_there_can_be_given_up_and_holds_up_no_end():
    over = threading.Event()

    class Stalls(Counting):
        def rows(self, indices):
            if indices[0] >= 8:
                over.wait(30)
            return super().rows(indices)

    asked = []
    began = time.monotonic()
    try:
        with DataLoader(Stalls(), global_batch_size=8, sharding=sharding(*BATCH)) as loader:
            assert loader.get(0, lambda: False) is not None
            assert loader.get(1, lambda: asked.append(1) or len(asked) == 2) is None
    finally:
        over.set()
    assert len(asked) == 2 and time.monotonic() - began < 15
