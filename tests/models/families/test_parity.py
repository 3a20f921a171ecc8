"""Logits, loss and every gradient of transformers 5.24, for every family; see fixtures/README.md."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ..build import jit
from .folders import NAMES, flat, folder, gradient_norms, model, run


@pytest.mark.parametrize("name", NAMES)
def test_logits_loss_and_gradients_equal_those_of_transformers(name):
    one = folder(name)
    ours = model(one)
    assert not [path for path, value in flat(ours.params).items() if np.isnan(value).any()], "parameters left out"
    assert not [path for path, value in flat(ours.variables).items() if np.isnan(value).any()], "variables left out"
    logits, loss, gradients = run(ours, one.batch, jit)
    check(one, logits, loss, gradients)


def check(one, logits, loss, gradients, tolerance=1.0):
    live = one.batch[1] == 1
    theirs = one.oracle["logits"][live]
    worst = np.abs(np.asarray(logits)[live] - theirs).max() / (theirs.max() - theirs.min())
    norms = gradient_norms(one, jax.device_get(gradients))
    expected = {
        key.removeprefix("gradnorm."): float(value[0]) for key, value in one.oracle.items() if "gradnorm." in key
    }
    assert norms.keys() == expected.keys()
    off = {key: norms[key] / expected[key] - 1 for key in norms if expected[key] > 1e-7}
    print(one.hf["model_type"], worst, float(loss) - one.oracle["loss"][0], max(map(abs, off.values())))
    assert worst < 2e-4 * tolerance
    assert abs(float(loss) - one.oracle["loss"][0]) < 1e-5 * tolerance
    assert all(abs(one) < 1e-3 * tolerance for one in off.values()), off
    assert all(norms[key] < 1e-6 for key in norms if key not in off)
