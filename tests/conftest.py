"""Eight CPU devices for the whole test process, before jax is imported anywhere."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds=1800"
