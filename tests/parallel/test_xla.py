import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jtrain.errors import ConfigError
from jtrain.parallel import xla
from jtrain.parallel.xla import REGISTRY, Option, compiler_options, options_of_run, refusal
from tests.parity.census import decoder_program

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("run_once", (False, True))
def test_every_cpu_option_is_known_to_this_jaxlib(run_once):
    options = compiler_options("cpu", run_once=run_once)
    assert options and int(jax.jit(lambda x: x + 1, compiler_options=options)(1)) == 2


def test_every_gpu_option_is_a_field_of_this_jaxlib_s_options():
    # They are fields of one message for all platforms, which XLA:CPU reads, too; the GPU plugin has jaxlib's version.
    options = compiler_options("gpu", overlap=True, slices=True, deterministic=True)
    assert len(options) > 8
    assert refusal(jax.devices()[0], tuple(options.items())) is None


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_every_option_is_known_to_the_compiler_of_a_device_that_is_not_here(platform):
    module, spec = ("libtpu", None) if platform == "tpu" else ("jax_plugins", os.environ.get("JTRAIN_GPU_SPEC"))
    if importlib.util.find_spec(module) is None or (platform == "gpu" and spec is None):
        pytest.skip("needs libtpu" if platform == "tpu" else "needs the CUDA plugin, and JTRAIN_GPU_SPEC")
    command = [sys.executable, "tests/parallel/xla_compile.py", platform, *([spec] if spec else [])]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": "."}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["options"] and found["refused"] == {} and "xla_no_such_option" in found["unknown"]
    assert found["of_run"] == found["options"]


def test_every_row_has_a_reason_and_no_name_stands_twice_for_a_platform():
    assert all(len(row.why) > 10 and not row.name.startswith("-") for row in REGISTRY)
    names = [(row.platform, row.name) for row in REGISTRY]
    assert len(names) == len(set(names))
    assert all(isinstance(row.value, str) for row in REGISTRY if row.platform == "tpu"), "libtpu takes strings"


def test_gpu_options_follow_determinism():
    assert compiler_options("cuda", deterministic=True)["xla_gpu_deterministic_ops"] is True
    assert "xla_gpu_deterministic_ops" not in compiler_options("gpu")


def test_overlap_gives_an_accelerator_its_options_and_off_takes_them_away():
    assert compiler_options("cuda", overlap=True)["xla_gpu_enable_latency_hiding_scheduler"] is True
    assert compiler_options("tpu", overlap=True)["xla_tpu_enable_async_collective_fusion"] == "true"
    assert compiler_options("cuda") == {} and compiler_options("tpu") == {}
    slow = "xla_tpu_enable_data_parallel_all_reduce_opt"
    assert slow in compiler_options("tpu", overlap=True, slices=True) and slow not in compiler_options(
        "tpu", slices=True
    )


def test_an_option_that_left_is_given_to_the_jaxlibs_that_have_it(monkeypatch):
    name = "xla_gpu_enable_pipelined_all_gather"
    for version, has in (((0, 10), True), ((0, 12), False)):
        monkeypatch.setattr(xla, "_version", lambda version=version: version)
        assert (name in compiler_options("gpu", overlap=True)) == has


def test_an_option_that_a_compiler_does_not_know_is_left_out_with_a_word(monkeypatch, caplog):
    class Device:
        platform = "tpu"

    said = {"xla_new_name": "No such compile option"}
    monkeypatch.setattr(xla, "refusal", lambda device, options: next((said[n] for n, _ in options if n in said), None))
    rows = (Option("tpu", "overlap", "xla_new_name", "true", ""), Option("tpu", "overlap", "xla_old_name", "true", ""))
    monkeypatch.setattr(xla, "REGISTRY", rows)
    assert options_of_run(Device(), {}) == {"xla_old_name": "true"}
    assert "xla_new_name is left out" in caplog.text
    assert options_of_run(Device(), {"xla_own": True, "xla_limit": 4}) == {
        "xla_old_name": "true", "xla_own": "true", "xla_limit": "4"
    }  # fmt: skip


def test_an_option_of_the_user_reaches_the_compiler_of_the_step():
    given = {"xla_cpu_collective_call_terminate_timeout_seconds": 77}
    assert options_of_run(jax.devices()[0], given) == given
    with pytest.raises(ConfigError) as caught:
        decoder_program({}, {}, rows=1, xla_options={"xla_cpu_collective_call_terminate_timeout": 77})
    assert "xla_options.xla_cpu_collective_call_terminate_timeout: 77 is refused" in caught.value.message
    assert caught.value.remedy == "did you mean xla_cpu_collective_call_terminate_timeout_seconds?"


def test_a_value_of_the_wrong_kind_is_refused():
    with pytest.raises(ConfigError, match=r"xla_options\.xla_backend_optimization_level: 'high' is refused"):
        options_of_run(jax.devices()[0], {"xla_backend_optimization_level": "high"})
