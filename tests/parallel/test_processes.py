import os
from types import SimpleNamespace

import jax
import pytest

from jtrain.config import load_config
from jtrain.errors import ConfigError
from jtrain.parallel import processes


@pytest.fixture
def start(monkeypatch):
    """`start(**fields)` as if no backend were up yet: what jax is told, and how it would join the others."""
    monkeypatch.setattr(processes, "_backend_is_up", lambda: False)
    for name in ("SLURM_STEP_NODELIST", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)

    def run(**fields):
        told, joined = {}, []
        monkeypatch.setattr(jax.config, "update", told.__setitem__)
        monkeypatch.setattr(jax.distributed, "initialize", lambda **arguments: joined.append(arguments))
        processes.start(load_config({"compile_cache": ""} | fields, env={}))
        return SimpleNamespace(told=told, joined=joined)

    return run


def test_of_the_runs_cpu_devices_every_process_makes_its_share(start):
    assert start(accelerator="cpu", devices=8).told == {"jax_platforms": "cpu", "jax_num_cpu_devices": 8}
    address = {"coordinator_address": "host:1", "num_processes": 2, "process_id": 1}
    told = start(accelerator="cpu", devices=8, distributed=address).told
    assert told["jax_num_cpu_devices"] == 4 and told["jax_cpu_collectives_implementation"] == "gloo"


def test_the_accelerator_chooses_the_platforms_and_auto_leaves_them(start):
    for accelerator, platforms in (("gpu", "cuda,rocm"), ("tpu", "tpu")):
        with pytest.raises(ConfigError, match=f"accelerator='{accelerator}', but jax already runs on 'cpu'"):
            start(accelerator=accelerator)
        assert processes._PLATFORMS[accelerator] == platforms
    assert start().told == {}


@pytest.mark.parametrize(("given", "bound"), ((None, "host:1"), ("10.0.0.1:2", "10.0.0.1:2")))
def test_the_coordinator_listens_where_it_is_told_and_never_on_all_interfaces(start, given, bound):
    distributed = {"coordinator_address": "host:1", "num_processes": 2, "process_id": 0, "bind_address": given}
    (joined,) = start(distributed=distributed).joined
    assert joined == {
        "coordinator_address": "host:1", "num_processes": 2, "process_id": 0, "coordinator_bind_address": bound
    }  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "joins"),
    (
        ({}, False),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "node[1-4]"}, True),
        ({"SLURM_NTASKS": "4"}, False),  # in a batch script, or after salloc: only srun starts several
        ({"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "node1"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
    ),
)
def test_a_launcher_that_started_several_processes_is_noticed(start, monkeypatch, environment, joins):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert start().joined == ([{}] if joins else [])


def test_the_address_to_listen_on_reaches_a_launcher_that_finds_the_rest(start, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    joined = start(distributed={"bind_address": "10.0.0.1:2"}).joined
    assert joined == [{"coordinator_bind_address": "10.0.0.1:2"}]


@pytest.mark.parametrize("of_jax", [False, True])
def test_the_compile_cache_is_a_private_folder(start, of_jax, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    assert start(compile_cache=str(folder)).told["jax_compilation_cache_dir"] == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    for mode in (0o770, 0o777, 0o1777):
        folder.chmod(mode)
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder))
        with pytest.raises(ConfigError, match="can be written by, another user") as caught:
            start(compile_cache="auto" if of_jax else str(folder))
        assert f"chmod 700 {folder}" in caught.value.remedy
        assert caught.value.message.startswith("JAX_COMPILATION_CACHE_DIR" if of_jax else "compile_cache")


def test_a_compile_cache_in_a_bucket_keeps_its_name(start):
    assert start(compile_cache="gs://bucket/x").told["jax_compilation_cache_dir"] == "gs://bucket/x"


def test_a_compile_cache_that_cannot_be_made_is_done_without(start, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert start(compile_cache=str(tmp_path / "file" / "inside")).told == {} and "no compile cache" in caplog.text


def test_the_usual_compile_cache_is_the_users_own_unless_jax_has_one(start, tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert start(compile_cache="auto").told["jax_compilation_cache_dir"] == os.path.join(tmp_path, "jtrain", "xla")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    assert start(compile_cache="auto").told == {}


def test_fewer_devices_than_there_are_may_be_used_and_more_are_refused(start):
    assert len(processes.start(load_config({"devices": 4, "compile_cache": ""}, env={}))) == 4 < len(jax.devices())
    with pytest.raises(ConfigError, match=f"there are {len(jax.devices())} cpu devices"):
        start(devices=32)
