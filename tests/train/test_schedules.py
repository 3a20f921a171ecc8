import math

import numpy as np
import pytest

from jtrain.train.schedules import make_schedule

NAMES = ("constant", "linear", "cosine", "wsd", "rsqrt")


@pytest.mark.parametrize("name", NAMES)
def test_warm_up_rises_by_k_over_w_and_update_w_uses_the_peak(name):
    schedule = make_schedule(name, peak=2.0, total=100, warmup=10, min_ratio=0.1, decay=20)
    np.testing.assert_allclose([schedule(k) for k in range(1, 11)], [0.2 * k for k in range(1, 11)], rtol=1e-6)


@pytest.mark.parametrize("name", ("linear", "cosine", "wsd"))
def test_the_last_update_uses_the_minimum(name):
    schedule = make_schedule(name, peak=2.0, total=100, warmup=10, min_ratio=0.1, decay=20)
    assert float(schedule(100)) == pytest.approx(0.2, rel=1e-6)


def test_values_between_by_hand():
    def at(name: str, k: int) -> float:
        return float(make_schedule(name, peak=1.0, total=110, warmup=10, min_ratio=0.1, decay=20)(k))

    assert at("constant", 60) == 1.0
    assert at("linear", 60) == pytest.approx(0.55, rel=1e-6)  # half-way from 1 to 0.1
    assert at("cosine", 60) == pytest.approx(0.55, rel=1e-6)
    assert at("cosine", 35) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)), rel=1e-6)
    assert at("wsd", 90) == 1.0
    assert at("wsd", 100) == pytest.approx(0.55, rel=1e-6)
    assert at("rsqrt", 40) == pytest.approx(0.5, rel=1e-6)  # sqrt(10 / 40)
    assert at("rsqrt", 110) == pytest.approx(math.sqrt(10 / 110), rel=1e-6)


def test_without_warm_up_the_first_update_is_one_step_into_the_decay():
    schedule = make_schedule("linear", peak=1.0, total=10, warmup=0, min_ratio=0.0)
    np.testing.assert_allclose([schedule(k) for k in (1, 10)], [0.9, 0.0], atol=1e-7)
