"""The order of training rows, at random access: every answer is a function of a key and a position.

Nothing here is stored, so a run that is stopped at any step goes on with the same rows on any number of hosts.
The code is ours rather than a library's because its numbers may never change under a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

# "data" in ASCII: keeps the data's keys apart from those of other random streams of the same seed.
DATA_STREAM = 0x64617461
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 8
_SMALL = 4096
_SHARE_BITS = 26


def key64(*parts: int) -> int:
    """One 64-bit key from several integers; a change of any part changes every bit with equal chance."""
    key = 0
    for part in parts:
        key = int(_mix(np.asarray([(key ^ (part & _MASK)) + _GOLDEN & _MASK], np.uint64))[0])
    return key


def permute(positions: np.ndarray, size: int, key: int) -> np.ndarray:
    """Places of `positions` in a permutation of range(size) that `key` chooses.

    A Feistel network over the next power of two, walked until it falls inside (Black and Rogaway 2002): constant
    memory. Below 4096 items the hashes are sorted instead, which is uniform where a network of few bits is not.

    Args:
      positions: int64 [n], each in [0, size).

    Returns:
      int64 [n].
    """
    if size <= _SMALL:
        return _small_permutation(size, key)[positions]
    bits = (size - 1).bit_length()
    result = np.asarray(positions).astype(np.uint64)
    walking = np.arange(len(result))
    while len(walking):
        result[walking] = _feistel(result[walking], bits, key)
        walking = walking[result[walking] >= size]
    return result.astype(np.int64)


class Mixture:
    """Interleaves several endless streams by weight, exactly and at random access.

    After n items, source s has given n * weight[s] / sum(weights) items, to within as many items as there are sources.
    (Shares are rounded to 2^-26, which adds one more item in every hundred million.)
    """

    def __init__(self, weights: Sequence[float]):
        tail = np.cumsum(np.asarray(weights, np.float64)[::-1])[::-1]
        shares = np.asarray(weights, np.float64) / tail
        # Integers, so that the counts are monotone; a share that rounds to 0 would never be read.
        self._shares = [max(1, round(share * (1 << _SHARE_BITS))) for share in shares[:-1]]

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, place in that source's own stream) of items of the mixed stream; int64 [n] each."""
        rest = np.asarray(positions, np.int64).copy()
        source = np.full(len(rest), len(self._shares), np.int64)
        open_ = np.ones(len(rest), bool)
        for number, share in enumerate(self._shares):
            before = rest * share >> _SHARE_BITS
            here = open_ & ((rest + 1) * share >> _SHARE_BITS > before)
            source[here] = number
            open_ &= ~here
            rest = np.where(here, before, np.where(open_, rest - before, rest))
        return source, rest


@lru_cache(maxsize=64)
def _small_permutation(size: int, key: int) -> np.ndarray:
    return np.argsort(_mix(np.arange(size, dtype=np.uint64) + np.uint64(key)), kind="stable")


def _feistel(x: np.ndarray, bits: int, key: int) -> np.ndarray:
    left_bits, right_bits = bits - bits // 2, bits // 2
    left, right = x >> np.uint64(right_bits), x & np.uint64((1 << right_bits) - 1)
    for round_ in range(_ROUNDS):
        round_key = np.uint64((key + (round_ + 1) * _GOLDEN) & _MASK)
        mask = np.uint64((1 << left_bits) - 1)
        left, right = right, (left ^ _mix(right + round_key)) & mask
        left_bits, right_bits = right_bits, left_bits
    return left << np.uint64(right_bits) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014), on uint64."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
