import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.errors import ConfigError
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


def test_fp8_is_refused_where_the_device_has_none():
    """And emulated where that is asked for. Products of 8-bit floats come with compute capability 8.9 (Ada, Hopper)."""

    def gpu(kind, capability):
        device = Device("gpu", kind)
        device.compute_capability = capability
        return device

    for device in (jax.devices("cpu")[0], gpu("NVIDIA A100-SXM4-80GB", "8.0")):
        with pytest.raises(ConfigError, match=r"(?s)fp8-mixed on .*bf16-mixed, or fp8: emulate"):
            precision_policy("fp8-mixed", device)
        assert precision_policy("fp8-mixed", device, "emulate").fp8 == "emulate"
    for device in (gpu("NVIDIA L4", "8.9"), gpu("NVIDIA H100 80GB HBM3", "9.0"), gpu("NVIDIA B200", "10.0")):
        policy = precision_policy("fp8-mixed", device)
        assert (policy.fp8, policy.parameter_dtype, policy.compute_dtype) == ("native", jnp.float32, jnp.bfloat16)
    assert precision_policy("bf16-mixed", device, "emulate").fp8 is None
