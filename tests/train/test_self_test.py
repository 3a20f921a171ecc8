"""The draw at the start of a run. The oracle is the algorithm (Salmon et al. 2011), written out in numpy."""

import jax
import numpy as np
import pytest

from jtrain.errors import ConfigError, NumbersError
from jtrain.train import self_test
from tests.train.fits import examples, make


def threefry(key, high, low):
    rotations, words = ((13, 15, 26, 6), (17, 29, 16, 24)), [np.uint32(word) for word in key]
    words.append(words[0] ^ words[1] ^ np.uint32(0x1BD11BDA))
    a, b = high + words[0], low + words[1]
    for i in range(5):
        for turn in rotations[i % 2]:
            a = a + b
            b = a ^ ((b << np.uint32(turn)) | (b >> np.uint32(32 - turn)))
        a, b = a + words[(i + 1) % 3], b + words[(i + 2) % 3] + np.uint32(i + 1)
    return a, b


def test_the_constant_is_what_the_algorithm_says():
    size = self_test.ROWS * 4
    with np.errstate(over="ignore"):
        key = [int(word[0]) for word in threefry((0, 1), np.zeros(1, np.uint32), np.full(1, 2, np.uint32))]
        high, low = threefry(key, np.zeros(size, np.uint32), np.arange(size, dtype=np.uint32))
        total = ((high ^ low) * (2 * np.arange(size, dtype=np.uint32) + 1)).sum(dtype=np.uint32)
    assert self_test.EXPECTED["threefry2x32", True] == int(total)


@pytest.mark.parametrize("devices", (1, 3, 7, 8))
def test_it_is_drawn_alike_by_any_number_of_devices(devices):
    assert self_test.draw_sum(jax.devices()[:devices]) == self_test.EXPECTED["threefry2x32", True]


def test_a_run_whose_draws_are_others_does_not_begin(tmp_path, monkeypatch):
    monkeypatch.setattr(self_test, "EXPECTED", {("threefry2x32", True): 1})
    self_test.check_draw.cache_clear()
    trainer = make(tmp_path, rows=examples())
    with pytest.raises(NumbersError, match=r"random numbers on 1 x cpu .* are not what they should be") as caught:
        trainer.fit()
    assert caught.value.exit_code == 15 and trainer.counters.step == 0
    self_test.check_draw.cache_clear()


def test_a_generator_that_is_not_the_same_everywhere_is_let_pass(monkeypatch):
    monkeypatch.setattr(self_test, "EXPECTED", {})
    self_test.check_draw.cache_clear()
    self_test.check_draw(tuple(jax.devices()[:1]))
    self_test.check_draw.cache_clear()


def test_another_generator_is_refused_on_a_resume_and_another_version_of_jax_is_told_of(tmp_path, capsys, monkeypatch):
    make(tmp_path, rows=examples(), max_steps=2).fit()
    monkeypatch.setattr(jax, "__version__", "0.99.0")
    make(tmp_path, rows=examples(), max_steps=4).fit()
    assert "changed on resume: the version of jax:" in capsys.readouterr().out
    jax.config.update("jax_threefry_partitionable", False)
    try:
        with pytest.raises(ConfigError, match="drawn with threefry_partitionable=True, now it is False"):
            make(tmp_path, rows=examples(), max_steps=6).fit()
    finally:
        jax.config.update("jax_threefry_partitionable", True)
