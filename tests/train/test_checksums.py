"""Checksums: the same on every mesh, another one for any flipped bit; the oracle of one array is numpy's."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jtrain.train.checksums import Checksums, _checksum
from tests.train.tiny import tiny_program


def by_numpy(x):
    """Sum of 32-bit words (or of the bits of smaller elements), each times an odd weight of its place."""
    size = x.dtype.itemsize
    words = x.reshape(-1).view(np.uint32 if size > 4 else f"u{size}").astype(np.uint64)
    place = np.arange(words.size, dtype=np.uint64)
    weight = ((place * 2654435761) % 2**32) ^ (place >> 15) | 1
    return int((words * weight % 2**32).sum() % 2**32)


@pytest.mark.parametrize("dtype", (np.float32, ml_dtypes.bfloat16, np.float16, np.int8, np.int32, bool, np.uint8))
def test_a_checksum_is_that_of_the_bits_and_their_places(dtype):
    x = np.random.default_rng(0).integers(0, 100, (7, 5, 3)).astype(dtype)
    found = _checksum(jnp.asarray(x), (None, None, None))
    assert int(found) == by_numpy(x.view(np.uint8) if dtype is bool else x)


def test_every_flipped_bit_changes_it():
    x = np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)
    flips = x.view(np.uint32)[None].repeat(16 * 32, 0).reshape(16, 32, 16)
    for element in range(16):
        flips[element, :, element] ^= np.uint32(1) << np.arange(32, dtype=np.uint32)
    arrays = flips.reshape(-1, 4, 4).view(np.float32)
    found = np.asarray(jax.vmap(lambda a: _checksum(a, (None, None)))(arrays))
    assert len(arrays) == 512 and (found != int(_checksum(jnp.asarray(x), (None, None)))).all()


def test_elements_that_change_places_change_it():
    x = jnp.arange(6.0)
    assert int(_checksum(x, (None,))) != int(_checksum(x[::-1], (None,)))


MESHES = {"data=1": 1, "data=8": 8, "fsdp=8": 8, "data=2,fsdp=2,tensor=2": 8}


def test_the_digest_of_a_state_is_the_same_on_every_mesh_and_names_its_replicas():
    digests = set()
    for mesh, devices in MESHES.items():
        program = tiny_program(mesh, devices=devices)
        checksums, state = Checksums(program.plan), program.init()
        table = checksums(state)
        assert table.shape == (len(checksums.paths), devices)
        for path, row in zip(checksums.paths, table, strict=True):
            groups = checksums.replicas(path)
            assert sorted(groups.ravel()) == list(range(devices))
            assert (row[groups] == row[groups][:, :1]).all(), path
        digests.add(checksums.digest(table))
        # Which devices hold the same part, as jax says.
        leaf = program.plan.abstract.params["embed_tokens"]["embedding"]
        parts = leaf.sharding.devices_indices_map(leaf.shape)
        for group in checksums.replicas("params/embed_tokens/embedding"):
            assert len({str(parts[checksums.devices[place]]) for place in group}) == 1
        assert len({str(part) for part in parts.values()}) == len(checksums.replicas("params/embed_tokens/embedding"))
    assert len(digests) == 1
    other = dataclasses.replace(state, skipped=state.skipped + 1)
    assert checksums.digest(checksums(other)) not in digests
