import jax
import pytest

from jtrain.observe.devices import DEVICES, device_spec, peak_flops


@pytest.mark.parametrize(
    ("kind", "name", "bf16"),
    [
        # Kinds as jax reports them; peaks as the vendors publish them, dense.
        ("TPU v4", "TPU v4", 275e12),
        ("TPU v5 lite", "TPU v5e", 197e12),
        ("TPU v5e", "TPU v5e", 197e12),
        ("TPU v5", "TPU v5p", 459e12),
        ("TPU v5p", "TPU v5p", 459e12),
        ("TPU v6 lite", "TPU v6e", 918e12),
        ("TPU v6e", "TPU v6e", 918e12),
        ("TPU7x", "TPU 7x", 1153.5e12),
        ("NVIDIA A100-SXM4-40GB", "A100", 312e12),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", "H100", 989.5e12),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756.5e12),
        ("NVIDIA H200", "H200", 989.5e12),
        ("NVIDIA GH200 480GB", "GH200", 989.5e12),
        ("NVIDIA B200", "B200", 2250e12),
        ("NVIDIA GB200", "GB200", 2500e12),
        ("NVIDIA L4", "L4", 121e12),
        ("NVIDIA L40S", "L40S", 362e12),
        ("Tesla T4", "T4", None),
        ("Tesla V100-SXM2-16GB", "V100", None),
    ],
)
def test_a_device_is_known_by_the_name_jax_gives_it(kind, name, bf16):
    assert device_spec(kind).name == name
    assert peak_flops(kind, "bf16-mixed") == bf16


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA A10G", "TPU v4 lite", "NVIDIA RTX A6000"])
def test_a_device_that_is_not_in_the_table_has_no_peak_rather_than_a_wrong_one(kind):
    assert device_spec(kind) is None and peak_flops(kind, "bf16-mixed") is None


def test_the_cpu_of_this_machine_is_unknown():
    assert device_spec(jax.devices()[0].device_kind) is None


def test_the_peak_is_that_of_the_operands_of_the_precision():
    assert peak_flops("NVIDIA H100 80GB HBM3", "32-true") == 67e12
    assert peak_flops("Tesla V100-SXM2-16GB", "16-mixed") == 125e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp8-mixed") == 1979e12
    # Six bfloat16 passes make one float32 product on a TPU.
    assert peak_flops("TPU v5p", "32-true") == pytest.approx(459e12 / 6)


def test_every_row_has_sane_units():
    for _, spec in DEVICES:
        assert all(1e12 < peak < 1e16 for peak in spec.flops.values())
        assert 8e9 <= spec.memory_bytes < 1e12 and 1e11 < spec.bandwidth < 1e13 and spec.source
