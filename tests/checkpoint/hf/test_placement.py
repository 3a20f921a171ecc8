"""Tensors on their way to the devices' shards and back: the same numbers on every mesh, little memory on the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jtrain.checkpoint.hf import placement
from jtrain.checkpoint.hf.companions import Companions
from jtrain.checkpoint.hf.gather import _slicer, part_of, tensor_of
from jtrain.checkpoint.hf.weights import Entry, Match
from jtrain.checkpoint.hf.writer import Planned, plan_shards, write
from jtrain.models.families.keys import Slot, linear, same
from tests.checkpoint.hf.folders import write_folder

N, D, F, V = 4, 8, 12, 10
SPECS = {  # stack [N, D, F], table [V, D]: replicated, cut along columns, along layers, along both
    "replicated": (PartitionSpec(), PartitionSpec()),
    "columns": (PartitionSpec(None, "a", "b"), PartitionSpec("b", "a")),
    "layers": (PartitionSpec("a"), PartitionSpec("a")),
    "both": (PartitionSpec("a", None, "b"), PartitionSpec(("a",), "b")),
    "two axes": (PartitionSpec(("a", "b"), None, None), PartitionSpec(None, ("a", "b"))),
}


class Memory:
    """`Weights` from a dict, which counts what is read."""

    def __init__(self, tensors):
        self.path, self.companions, self.tensors = "memory", Companions(), tensors
        self.entries = {name: Entry("F32", x.shape) for name, x in tensors.items()}
        self.reads = []

    def read(self, name):
        self.reads.append(name)
        return self.tensors[name]


def mesh():
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def pairs_of():
    maps = [linear(f"layer.{n}", Slot("stack", (n,)), (D,), (F,)) for n in range(N)]
    maps += [same("table", Slot("table"), V, D), same("bias", Slot("bias", variable=True), V)]
    return [Match(one.key, one) for one in maps]


@pytest.fixture(scope="module")
def tensors():
    rng = np.random.default_rng(0)
    found = {f"layer.{n}": rng.normal(size=(F, D)).astype(np.float32) for n in range(N)}
    found |= {name: rng.normal(size=shape).astype(np.float32) for name, shape in (("table", (V, D)), ("bias", (V,)))}
    found["layer.2"][0, :2] = (-0.0, 0.0)  # whose sign a sum would lose
    return found


def placed(tensors, spec, dtype=jnp.float32):
    stack, table = (NamedSharding(mesh(), one) for one in SPECS[spec])
    params = {
        "stack": jax.ShapeDtypeStruct((N, D, F), dtype, sharding=stack),
        "table": jax.ShapeDtypeStruct((V, D), dtype, sharding=table),
    }
    bias = jnp.zeros(V, jnp.float32, device=NamedSharding(mesh(), PartitionSpec()))
    loaded = placement.load(Memory(tensors), pairs_of(), params, {"bias": bias})
    for path, leaf in params.items():
        assert loaded[path].sharding == leaf.sharding and loaded[path].dtype == dtype
    return loaded


def bits(array):
    return np.asarray(array).tobytes()


@pytest.mark.parametrize("spec", SPECS)
def test_every_shard_gets_its_part_and_gives_it_back_bit_for_bit(tensors, spec):
    loaded = placed(tensors, spec)
    assert bits(loaded["stack"]) == bits(np.stack([tensors[f"layer.{n}"].T for n in range(N)]))
    assert bits(loaded["table"]) == bits(tensors["table"]) and bits(loaded["bias"]) == bits(tensors["bias"])
    for name, one in pairs_of():
        variables = {"bias": loaded["bias"]}
        assert bits(tensor_of(one, loaded, variables, "float32")) == bits(tensors[name]), name


@pytest.mark.parametrize("spec", ["columns", "two axes"])
def test_among_several_processes_every_device_gets_the_whole_layer(tensors, spec):
    stack = placed(tensors, spec)["stack"]
    layer = _slicer(stack.sharding, stack.shape, 1, "float32", True)(stack, np.int32(2))
    assert layer.is_fully_replicated and bits(layer) == bits(tensors["layer.2"].T)


def test_numbers_are_rounded_to_the_nearest_on_the_way_in_and_out(tensors):
    narrow = placed(tensors, "both", jnp.bfloat16)
    expected = np.stack([tensors[f"layer.{n}"].T for n in range(N)]).astype(ml_dtypes.bfloat16)
    assert bits(narrow["stack"]) == bits(expected)
    wide = placed(tensors, "both")
    assert bits(part_of(wide["stack"], Slot("stack", (3,)), "bfloat16")) == bits(expected[3])


def test_a_map_that_leaves_a_layer_out_or_fills_it_twice_is_a_bug_and_not_zeros(tensors):
    params = {"stack": jax.ShapeDtypeStruct((N, D, F), jnp.float32, sharding=NamedSharding(mesh(), PartitionSpec()))}
    layers = pairs_of()[:N]
    with pytest.raises(RuntimeError, match="filled by 3 parts only"):
        placement.load(Memory(tensors), layers[:3], params)
    with pytest.raises(RuntimeError, match="filled twice"):
        placement.load(Memory(tensors), [*layers, layers[0]], params)


def test_what_no_device_of_this_process_holds_is_not_read(tensors, monkeypatch):
    """As the second of two processes sees it, whose devices have the last two layers."""
    leaf = jax.ShapeDtypeStruct((N, D, F), jnp.float32, sharding=NamedSharding(mesh(), PartitionSpec("a")))
    local = list(mesh().devices[1])
    everywhere = NamedSharding.addressable_devices_indices_map
    monkeypatch.setattr(
        NamedSharding,
        "addressable_devices_indices_map",
        lambda self, shape: {d: everywhere(self, shape)[d] for d in local},
    )
    target, memory = placement._Target("stack", leaf), Memory(tensors)
    for n, (name, one) in enumerate(pairs_of()[:N]):
        if target.wants(one.slots[0]):
            target.put(one.slots[0], *one.split(memory.read(name)))
        assert target.wants(one.slots[0]) == (n >= 2)
    assert memory.reads == ["layer.2", "layer.3"]
    for shard in target._buffer.addressable_shards:
        assert bits(shard.data) == bits(np.stack([tensors["layer.2"].T, tensors["layer.3"].T]))


def test_shards_hold_as_many_tensors_as_fit_and_the_library_reads_them(tmp_path):
    from safetensors.numpy import load_file

    tensors = {f"t{n}": np.arange(n * 100, n * 100 + 10 * n, dtype=np.float32).reshape(n, 10) for n in range(1, 6)}
    shards = plan_shards([Planned(name, x.shape, "float32") for name, x in tensors.items()], 250)
    assert [[one.name for one in shard] for shard in shards] == [["t1", "t2", "t3"], ["t4"], ["t5"]]
    write(tmp_path, shards, tensors.__getitem__)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    for name, file in index["weight_map"].items():
        np.testing.assert_array_equal(load_file(tmp_path / file)[name], tensors[name])


MEASURE = """
import sys, tracemalloc
import jax, numpy as np
jax.devices()
from jtrain.checkpoint.arrays import flatten
from jtrain.checkpoint.hf import placement
from jtrain.checkpoint.hf.gather import tensor_of
from jtrain.checkpoint.hf.writer import Planned, plan_shards, write
from jtrain.tasks.loaded import as_mesh, decoder_model, make_precision, plan_of, rules_for
from jtrain.tasks.opened import open_model
from pathlib import Path

opened = open_model(sys.argv[1])
mesh = as_mesh(sys.argv[2] or None)
plan = plan_of(decoder_model(opened.decoder), mesh, rules_for(mesh), make_precision("float32"))
wanted = flatten(plan.abstract.params)
tensors = {one.key: one for one in opened.family.tensors(opened.decoder)}

def load():
    return opened.load(wanted, {})[0]

def save(params, name):
    shards = plan_shards([Planned(one.key, one.shape, "float32") for one in tensors.values()], 10**9)
    folder = Path(sys.argv[3]) / name
    folder.mkdir(parents=True)
    write(folder, shards, lambda name: tensor_of(tensors[name], params, {}, "float32"))

def peak(work, *arguments):
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    result = work(*arguments)
    highest = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return result, highest - before

save(load(), "first")  # compiles
params, reading = peak(load)
_, writing = peak(save, params, "second")
print(reading, writing)
"""


def test_host_memory_is_at_most_two_of_the_largest_tensor(tmp_path):
    """Numpy's allocations, in a program of its own: 75 tensors of 18 MB in all, the largest of 1 MB."""
    sizes = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 1024, "num_hidden_layers": 8}
    tensors = write_folder(tmp_path / "model", **sizes)
    largest, total = max(x.nbytes for x in tensors.values()), sum(x.nbytes for x in tensors.values())
    assert total > 9 * largest
    root = str(Path(__file__).parents[3])
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "model"), "fsdp=2,tensor=2", str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": root}
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
    reading, writing = map(int, result.stdout.split())
    slack = 600_000  # Python's own objects, and modules that are imported on first use
    assert 0.9 * largest < reading < 2 * largest + slack
    assert 0.9 * largest < writing < 2 * largest + slack
