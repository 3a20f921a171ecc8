"""Growing memory, by series whose slope is known."""

import itertools
import random

import pytest

from jtrain.observe.growth import SAMPLES, SKIPPED, Growth
from jtrain.observe.host_memory import available_memory, host_memory

MIB, GIB = 2**20, 2**30


def told(series, room=lambda used: 32 * GIB - used, max_steps=10**9, every=10):
    growth = Growth("host", max_steps)
    found = [growth.sample(every * n, int(used), int(room(used))) for n, used in enumerate(series)]
    return [trend for trend in found if trend]


def leak(n, slope=20 * MIB, noise=0):
    rng = random.Random(0)
    return [2 * GIB + slope * i + rng.uniform(-noise, noise) for i in range(n)]


def test_a_leak_is_told_of_with_its_slope_and_its_end():
    trend = told(leak(40))[0]
    assert trend.bytes_per_step == pytest.approx(2 * MIB) and trend.step == 10 * (SKIPPED + SAMPLES - 1 + 1) - 10
    assert trend.full_at == pytest.approx(trend.step + (32 * GIB - trend.bytes) / (2 * MIB), abs=1)
    assert "host memory grows by 2 MiB a step" in str(trend) and f"at step {trend.full_at:,}" in str(trend)


def test_noise_does_not_hide_it_and_it_is_told_of_again_when_half_of_the_way_is_gone():
    trends = told(leak(1400, noise=30 * MIB))
    assert 3 <= len(trends) <= 12
    for before, after in itertools.pairwise(trends):
        assert after.full_at - after.step <= (before.full_at - before.step) / 2


@pytest.mark.parametrize(
    "series",
    [
        [2 * GIB] * 200,
        [2 * GIB + random.Random(n).uniform(0, 200 * MIB) for n in range(200)],
        [2 * GIB + 4 * GIB * (1 - 0.9**n) for n in range(200)],  # a cache that fills
        [2 * GIB + 4 * GIB * (n > 30) for n in range(200)],  # a first evaluation
        leak(200, slope=MIB // 8),
    ],
    ids=["flat", "noise", "cache", "step", "little"],
)
def test_what_does_not_grow_steadily_is_no_matter(series):
    assert told(series) == []


def test_what_fits_until_the_run_ends_is_no_matter():
    assert told(leak(40), max_steps=400) == [] and told(leak(40), max_steps=10**6) != []


def test_the_memory_of_this_process_is_its_own_without_mapped_files(tmp_path):
    import mmap

    file = tmp_path / "big"
    file.write_bytes(bytes(64 * MIB))
    before = host_memory()[0]
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[::4096]) == 0
        assert host_memory()[0] - before < 32 * MIB
    block = bytearray(64 * MIB)
    block[::4096] = b"\1" * len(block[::4096])
    assert host_memory()[0] - before > 48 * MIB
    assert 0 < host_memory()[1] <= available_memory() * 1.2
