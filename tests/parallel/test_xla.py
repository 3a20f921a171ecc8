import jax
import pytest

from jtrain.parallel.xla import compiler_options


@pytest.mark.parametrize("run_once", (False, True))
def test_every_cpu_option_is_known_to_this_jaxlib(run_once):
    options = compiler_options("cpu", run_once=run_once)
    assert options and int(jax.jit(lambda x: x + 1, compiler_options=options)(1)) == 2


def test_gpu_options_follow_determinism():
    assert compiler_options("cuda", deterministic=True)["xla_gpu_deterministic_ops"] is True
    assert "xla_gpu_deterministic_ops" not in compiler_options("gpu")
