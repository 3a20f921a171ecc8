"""Eight CPU devices for every test process, and one cache of compiled programs for the whole session."""

import os
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
# Eight devices share two cores: a collective may wait long for its slowest member. Compiling is most of the cost of the
# tests, and half of that is LLVM's: machine code that runs a few steps need not be fast.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds=1800 "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
_OWN_CACHE = "JAX_COMPILATION_CACHE_DIR" not in os.environ
if _OWN_CACHE:  # the workers of pytest-xdist and the tests' subprocesses inherit it
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jtrain-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"

import jax  # noqa: E402

jax.devices()  # the backend is up: a config of fewer devices then takes the first of these eight


def pytest_sessionfinish(session):
    if _OWN_CACHE:
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
