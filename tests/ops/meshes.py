"""The mesh and table that the tests of this folder trace under."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jtrain.ops.logical import logical_rules

AXES = ("data", "tensor")
RULES = {"batch": ("data",), "heads": ("tensor",), "kv_heads": ("tensor",), "vocab": ("tensor",)}


@contextlib.contextmanager
def on_mesh(data: int, tensor: int) -> Iterator[Mesh]:
    devices = np.array(jax.devices()[: data * tensor]).reshape(data, tensor)
    mesh = Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 2)
    with logical_rules(mesh, RULES):
        yield mesh
