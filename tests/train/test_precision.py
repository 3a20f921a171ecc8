import jax.numpy as jnp
import numpy as np

from jtrain.train.precision import LossScale, precision_policy


class Device:
    def __init__(self, platform, kind):
        self.platform, self.device_kind = platform, kind


def test_auto_chooses_by_device():
    assert precision_policy("auto", Device("cpu", "cpu")).name == "32-true"
    assert precision_policy("auto", Device("tpu", "TPU v5p")).name == "bf16-mixed"
    assert precision_policy("auto", Device("gpu", "NVIDIA H100 80GB HBM3")).name == "bf16-mixed"
    assert precision_policy("auto", Device("gpu", "Tesla T4")).name == "16-mixed"


def test_casting_leaves_integers_alone():
    cast = precision_policy("bf16-mixed").cast({"w": jnp.ones(2), "i": jnp.arange(2)})
    assert cast["w"].dtype == jnp.bfloat16 and cast["i"].dtype == jnp.int32


def test_the_loss_scale_halves_on_overflow_and_doubles_after_two_thousand_good_steps():
    scale = LossScale(jnp.float32(1024.0), jnp.int32(0))
    down = scale.update(jnp.bool_(False))
    assert (float(down.scale), int(down.good_steps)) == (512.0, 0)
    almost = LossScale(jnp.float32(1024.0), jnp.int32(1999)).update(jnp.bool_(True))
    assert (float(almost.scale), int(almost.good_steps)) == (2048.0, 0)
    up = scale.update(jnp.bool_(True))
    np.testing.assert_array_equal([up.scale, up.good_steps], [1024.0, 1])
    assert float(LossScale(jnp.float32(1.0), jnp.int32(0)).update(jnp.bool_(False)).scale) == 1.0
