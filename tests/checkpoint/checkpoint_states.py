"""A small state with an optax chain, on any mesh of the eight CPU devices."""

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

SPECS = {"w": PartitionSpec("fsdp", "tensor"), "b": PartitionSpec("tensor"), "step": PartitionSpec()}


def make_mesh(data, fsdp, tensor):
    devices = np.array(jax.devices()[: data * fsdp * tensor]).reshape(data, fsdp, tensor)
    return Mesh(devices, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def numpy_params(seed):
    rng = np.random.default_rng(seed)
    return {"w": rng.normal(size=(16, 24)).astype("f"), "b": rng.normal(size=24).astype("f")}


def make_state(seed, mesh):
    params = {k: jax.device_put(v, NamedSharding(mesh, SPECS[k])) for k, v in numpy_params(seed).items()}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    step = jax.device_put(np.int32(seed), NamedSharding(mesh, SPECS["step"]))
    return {"step": step, "params": params, "opt_state": optimizer.init(params)}


def abstract(state, mesh=None):
    def of(x):
        spec = getattr(x.sharding, "spec", PartitionSpec())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec) if mesh else x.sharding)

    return jax.tree.map(of, state)


def same_bits(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


class Log:
    """Keeps events."""

    def __init__(self):
        self.events = []

    def __call__(self, kind, fields):
        self.events.append((kind, fields))

    def of(self, kind):
        return [fields for name, fields in self.events if name == kind]
