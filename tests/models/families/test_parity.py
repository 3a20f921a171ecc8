"""Logits, loss and every gradient of transformers 5.24, for every family; see fixtures/README.md."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ..build import jit
from .folders import NAMES, Folder, flat, folder, forward, gradient_norms, model, run

ONCE_MORE = [
    "deepseek-v3-yarn", "gemma3-linear", "gpt-oss-clamped", "llama-linear", "mixtral", "olmoe", "phi3-short",
    "qwen2-yarn",
]  # fmt: skip
"""Folders whose backward pass is that of another one: their gradients belong to the grid."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.grid) if name in ONCE_MORE else name for name in NAMES]
)
def test_logits_loss_and_gradients_equal_those_of_transformers(name):
    one = folder(name)
    logits, loss, gradients = run(whole(one), one.batch, jit)
    check_logits(one, logits, loss)
    check_gradients(one, gradients)


@pytest.mark.parametrize("name", ONCE_MORE)
def test_logits_and_loss_equal_those_of_transformers(name):
    one = folder(name)
    check_logits(one, *forward(whole(one), one.batch, jit))


@pytest.mark.parametrize("name", ["gemma2", "gpt2", pytest.param("mixtral", marks=pytest.mark.grid)])
def test_in_float64_only_the_rounding_of_transformers_is_left(name):
    with jax.enable_x64(True):
        one = folder(name)
        logits, loss = forward(whole(one, "float64"), one.batch, jit)
        assert logits.dtype == np.float64
        check_logits(one, logits, loss, tolerance=1e-6, of_loss=1e-6)


def whole(one: Folder, dtype: str = "float32"):
    """The model, and a look whether the key map has left a parameter out."""
    ours = model(one, dtype)
    left = [path for path, value in flat({"": ours.params, "v": ours.variables}).items() if np.isnan(value).any()]
    assert not left, f"no tensor brings {left}"
    return ours


def check_logits(one: Folder, logits: jax.Array, loss: jax.Array, tolerance=2e-5, of_loss=5e-6) -> None:
    """What is found is below 3e-6 and 1e-6; the two forms of GELU are 1e-4 apart."""
    live = one.batch[1] == 1
    theirs = one.oracle["logits"][live]
    off = np.abs(np.asarray(logits)[live] - theirs).max() / (theirs.max() - theirs.min())
    assert off < tolerance
    assert abs(float(loss) - one.oracle["loss"][0]) < of_loss


def check_gradients(one: Folder, gradients: dict) -> None:
    ours = gradient_norms(one, jax.device_get(gradients))
    theirs = {key.removeprefix("gradnorm."): value[0] for key, value in one.oracle.items() if "gradnorm." in key}
    assert ours.keys() == theirs.keys()
    for key, norm in theirs.items():
        assert ours[key] == pytest.approx(norm, rel=1e-4, abs=1e-6), key
