"""The parameters of every layer as arrays of their own, where that makes decoding faster."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jtrain.tasks.loaded import LoadedModel

_LEAST_BYTES = 2**25
"""Of a stack's parameters. In smaller models the time to compile every layer by itself is more than is gained."""
_STACKS = ("dense_layers", "layers")


def layer_views(model: LoadedModel) -> dict[str, list[Any]] | None:
    """Parameters by stack and layer, which share the memory of the stacked ones; None where a scan does as well.

    On one CPU device only: XLA's CPU backend copies a layer out of its stack before it multiplies with it, which in
    decoding, where every parameter is used once a token, is most of the time. Other backends read it where it lies.
    """
    devices = model.mesh.devices
    stacks = {name: model.params[name] for name in _STACKS if name in model.params}
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(stacks))
    if devices.size > 1 or devices.flat[0].platform != "cpu" or size < _LEAST_BYTES:
        return None
    return {name: _of_stack(stack, devices.flat[0]) for name, stack in stacks.items()}


def _of_stack(stack: Any, device: jax.Device) -> list[Any]:
    leaves, structure = jax.tree.flatten(stack)
    # NumPy sees a CPU array where it lies, and so does JAX a NumPy array that begins at a multiple of 64 bytes (others
    # are copied). The stacked array can't be given away as long as views of it live.
    arrays = [np.asarray(leaf) for leaf in leaves]
    return [
        jax.tree.unflatten(structure, [jax.device_put(array[layer], device) for array in arrays])
        for layer in range(len(arrays[0]))
    ]
