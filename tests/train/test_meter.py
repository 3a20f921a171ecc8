import pytest

from jtrain.observe.metrics import read_metrics
from tests.train.fits import make
from tests.train.linear import ROWS, WIDTH


def test_of_a_custom_model_the_flops_are_those_of_the_compiled_step(tmp_path):
    make(tmp_path, max_steps=4).fit()
    line = read_metrics(tmp_path, "train")[-1]
    # x w, and its transpose for the gradient of w: 2 products of ROWS x WIDTH, 2 FLOPs each.
    expected = 2 * 2 * ROWS * WIDTH / line["step_seconds"] / 1e12
    assert line["tflops_per_device"] == pytest.approx(expected, rel=1e-6)
    assert line["mfu"] is None and line["mfu_legacy"] is None  # a CPU's peak is unknown
