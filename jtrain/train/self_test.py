"""A test at the start of a run: one random draw over all devices has to have the bits that it always had.

Everything random follows from keys, and nothing random is stored: a resume is exact only while a key gives the same
bits, whatever the version of jax, the compiler and the number of devices (which jax #40232 reports draws to follow).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jtrain.errors import NumbersError
from jtrain.parallel.xla import compiler_options

ROWS = 2**8 * 3**2 * 5
"""Of the draw [rows, 4]: most numbers of devices divide it; where one does not, each device draws all of it."""
EXPECTED = {("threefry2x32", True): 2654675676, ("threefry2x32", False): 1099267866}
"""Generator and `jax_threefry_partitionable` -> `draw_sum`. The first is also what numpy makes of the algorithm."""


@functools.lru_cache(maxsize=8)
def check_draw(devices: tuple[jax.Device, ...]) -> None:
    """Draws once on these devices, and compares. Generators that are not the same everywhere are let pass.

    Raises:
      NumbersError: other bits.
    """
    generator = (jax.config.jax_default_prng_impl, jax.config.jax_threefry_partitionable)
    expected = EXPECTED.get(generator)
    if expected is not None and (found := draw_sum(devices)) != expected:
        raise NumbersError(
            f"random numbers on {len(devices)} x {devices[0].device_kind} with jax {jax.__version__} are not what they "
            f"should be: a test draw sums to {found}, and not to {expected}",
            "take a version of jax that jtrain doctor knows as tested; if it is one, a device computes wrong",
        )


def draw_sum(devices: Sequence[jax.Device]) -> int:
    """Sum modulo 2^32 of the draw's bits, each times an odd weight, drawn in parts by all devices."""
    mesh = Mesh(np.asarray(devices), ("devices",))
    parts = NamedSharding(mesh, PartitionSpec("devices" if ROWS % len(devices) == 0 else None))

    def draw() -> jax.Array:
        bits = jax.random.bits(jax.random.fold_in(jax.random.key(1), 2), (ROWS, 4), jnp.uint32)
        bits = jax.lax.with_sharding_constraint(bits, parts)
        weight = 2 * jnp.arange(4 * ROWS, dtype=jnp.uint32).reshape(ROWS, 4) + 1
        return (bits * weight).sum(dtype=jnp.uint32)

    options = compiler_options(devices[0].platform, run_once=True)
    return int(jax.jit(draw, out_shardings=NamedSharding(mesh, PartitionSpec()), compiler_options=options)())
