"""Run directories at gs://, and second places at gs:// and s3://, against emulators on this machine.

They need more than `jtrain[test]`: `pip install 'jtrain[gcs,s3]' gcp-storage-emulator 'moto[server]'`. What is missing
skips its tests; the same logic runs against a store in memory in test_backup.py.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys

import fsspec
import jax
import numpy as np
import pytest
from checkpoint_states import same_bits
from etils import epath
from etils.epath import backend as epath_backend
from kill_worker import state_of as killed_state

from jtrain.checkpoint import Checkpoints, DamagedCheckpoint, RunLease, arrays, files, layout, lease, open_run_dir
from jtrain.checkpoint.backup import open_backup
from jtrain.checkpoint.lease_files import files_of
from jtrain.checkpoint.manifest import check_files, read_manifest
from jtrain.errors import ConfigError
from jtrain.observe.metrics import read_events, read_metrics
from tests.train.fits import make

pytestmark = pytest.mark.faults
OPTIMIZER = {"name": "adamw"}


def state_of(step):
    return {"w": np.arange(2048, dtype=np.float32).reshape(32, 64) * step, "step": np.int32(step)}


ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state_of(0))


@contextlib.contextmanager
def environment(values):
    """Variables for this process and those that it starts; file systems that were made before are forgotten."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        epath_backend.fsspec_backend._get_filesystem.cache_clear()
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        epath_backend.fsspec_backend._get_filesystem.cache_clear()


@pytest.fixture(scope="module")
def gs():
    """A bucket of a GCS emulator."""
    pytest.importorskip("gcsfs", reason="pip install 'jtrain[gcs]'")
    emulator = pytest.importorskip("gcp_storage_emulator.server", reason="pip install gcp-storage-emulator")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    address = f"http://127.0.0.1:{port}"
    variables = {
        "STORAGE_EMULATOR_HOST": address,  # gcsfs
        "TENSORSTORE_GCS_HTTP_URL": address,
        "GCE_METADATA_ROOT": "127.0.0.1:1",  # nobody is asked for credentials
        "NO_GCE_CHECK": "true",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }
    try:
        with environment(variables):
            yield "gs://bucket"
    finally:
        server.stop()


@pytest.fixture(scope="module")
def s3():
    """A bucket of an S3 emulator."""
    pytest.importorskip("s3fs", reason="pip install 'jtrain[s3]'")
    moto = pytest.importorskip("moto.server", reason="pip install 'moto[server]'")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    address = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    try:
        with environment(keys | {"AWS_ENDPOINT_URL": address}):
            fsspec.filesystem("s3").mkdir("bucket")
            yield "s3://bucket"
    finally:
        server.stop()


@pytest.fixture(params=["gs", "s3"])
def place(request):
    """A second place in each store."""
    return f"{request.getfixturevalue(request.param)}/{request.node.originalname}"


def bits(trainer):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(trainer.state.params)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    trainer = make(tmp_path_factory.mktemp("whole") / "run", max_steps=10, optimizer=OPTIMIZER)
    trainer.fit()
    return bits(trainer)


# A run directory in a store


def test_a_run_at_gs_saves_retains_and_goes_on_with_the_bits_of_an_undisturbed_one(gs, undisturbed):
    run, section = f"{gs}/whole/run", {"save_steps": 2, "save_total_limit": 2}
    make(run, max_steps=6, checkpoint=section, optimizer=OPTIMIZER).fit()
    assert Checkpoints(run, read_only=True).steps() == [4, 6]
    trainer = make(run, max_steps=10, checkpoint=section, optimizer=OPTIMIZER)
    trainer.fit()
    assert bits(trainer) == undisturbed
    assert Checkpoints(run, read_only=True).steps() == [8, 10]
    assert [event["step"] for event in read_events(run, "durable")] == [2, 4, 6, 8, 10]
    assert read_events(run, "resume")[-1]["step"] == 6
    assert [line["step"] for line in read_metrics(run, "train")] == [1, 4, 6, 8, 10]
    left = {
        name.split("/checkpoints/")[1].split("/")[0] for name in fsspec.filesystem("gcs").find(f"{run}/checkpoints")
    }
    assert left == {"8", "10"}


def test_a_damaged_object_is_found_and_its_step_moved_to_quarantine(gs):
    run = f"{gs}/damaged"
    with Checkpoints(run, save_total_limit=None) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(step), {"step": step})
    folder = epath.Path(run) / "checkpoints" / "2"
    path = max((folder / name for name in files.walk(folder)), key=lambda path: path.stat().length)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    told = []
    checkpoints = Checkpoints(run, on_event=lambda kind, fields: told.append((kind, fields)))
    with pytest.raises(DamagedCheckpoint, match=r"step 2 is damaged: state/.*: hash differs"):
        checkpoints.verify(2)
    state, _, step = checkpoints.restore(ABSTRACT)
    assert step == 1 and same_bits(state, state_of(1)) and checkpoints.steps() == [1]
    assert [fields["step"] for kind, fields in told if kind == "corrupt"] == [2]
    kept = epath.Path(run) / "checkpoints" / "_quarantine" / "2"
    assert (kept / path.relative_to(folder)).read_bytes() == bytes(data) and not folder.exists()


def test_what_another_process_has_written_is_seen_at_once(gs):
    run = layout.run_path(f"{gs}/listed")
    (run / "checkpoints" / "1" / "manifest.json").write_bytes(b"{}")
    assert layout.finished_steps(run / "checkpoints") == [1]
    other = fsspec.filesystem("gcs", skip_instance_cache=True)  # its memory is its own, as another process's is
    other.pipe_file(f"{run}/checkpoints/2/manifest.json", b"{}")
    assert layout.finished_steps(run / "checkpoints") == [1, 2]
    other.rm_file(f"{run}/checkpoints/1/manifest.json")
    assert layout.finished_steps(run / "checkpoints") == [2]


@pytest.mark.parametrize("point", ["before_manifest", "after_manifest"])
def test_k4_a_save_into_gs_that_is_killed_is_no_step_and_the_next_start_goes_on(gs, point):
    run = f"{gs}/killed/{point}"
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    worker = os.path.join(os.path.dirname(__file__), "kill_worker.py")
    process = subprocess.run(
        [sys.executable, worker, run, point],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": root, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    newest = 4 if point == "after_manifest" else 3
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), killed_state(0))
    with Checkpoints(run, save_total_limit=2) as checkpoints:
        state, meta, step = checkpoints.restore(abstract)
        assert step == newest and meta == {"step": newest} and same_bits(state, killed_state(newest))
        checkpoints.save(5, killed_state(5), {"step": 5})
        checkpoints.wait()
        assert checkpoints.steps()[-1] == 5
        for step in checkpoints.steps():
            checkpoints.verify(step)


def test_orbax_can_not_write_to_s3_which_is_why_a_run_directory_there_is_refused(s3, tmp_path):
    """When this fails Orbax has learned it: then `layout.check_store` may let s3:// pass."""
    import orbax.checkpoint as ocp

    with (
        pytest.raises(ValueError, match="should be absolute"),
        ocp.Checkpointer(arrays.state_handler()) as writer,
    ):
        writer.save(epath.Path(f"{s3}/orbax"), args=ocp.args.PyTreeSave({"w": np.zeros(4, np.float32)}))
    with pytest.raises(ConfigError, match="Orbax reads and writes checkpoints in folders and at gs:// only"):
        make(f"{s3}/run", max_steps=1).fit()


# A second place in a store


def opened(run, place, **options):
    backup = open_backup(place, open_run_dir(run))
    backup.bring_back()
    return Checkpoints(run, backup=backup, **options)


def test_steps_are_copied_into_a_store_and_the_same_stay_there(place, tmp_path):
    with opened(tmp_path / "run", place, save_total_limit=2) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, state_of(step), {"step": step})
            checkpoints.wait()
            checkpoints.wait_for_backup()
    root = layout.checkpoints_root(layout.run_path(place))
    assert layout.finished_steps(root) == [3, 4]
    for step in (3, 4):
        manifest = read_manifest(root / str(step))
        check_files(root / str(step), manifest)
        assert {*files.walk(root / str(step))} == {*manifest.files, "manifest.json"}
    assert {entry.name for entry in root.iterdir()} == {"3", "4"}


def test_a_run_whose_directory_is_gone_goes_on_from_the_store(place, tmp_path, undisturbed):
    section = {"save_steps": 2, "save_total_limit": 2, "backup": place}
    run = tmp_path / "run"
    make(run, max_steps=6, checkpoint=section, optimizer=OPTIMIZER).fit()
    shutil.rmtree(run)
    trainer = make(run, max_steps=10, checkpoint=section, optimizer=OPTIMIZER)
    trainer.fit()
    assert bits(trainer) == undisturbed
    assert read_events(run, "backup_restored")[-1]["step"] == 6 == read_events(run, "resume")[-1]["step"]
    assert layout.finished_steps(layout.checkpoints_root(layout.run_path(place))) == [8, 10]


def test_steps_that_a_run_went_back_from_are_set_aside_in_the_store(place, tmp_path):
    run = tmp_path / "run"
    with opened(run, place, save_total_limit=None) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state_of(step), {"line": 1})
        checkpoints.wait()
        checkpoints.wait_for_backup()
    with opened(run, place, save_total_limit=None) as checkpoints:
        checkpoints.restore(ABSTRACT, step=1)
        checkpoints.save(2, state_of(7), {"line": 2})
        checkpoints.wait()
        checkpoints.wait_for_backup()
    root = layout.checkpoints_root(layout.run_path(place))
    assert layout.finished_steps(root)[-1] == 2
    assert {entry.name for entry in (root / "_superseded").iterdir()} >= {"3"}
    shutil.rmtree(run)
    with opened(run, place) as checkpoints:
        state, meta, step = checkpoints.restore(ABSTRACT)
    assert (step, meta) == (2, {"line": 2}) and same_bits(state, state_of(7))


def test_a_step_that_can_not_be_copied_yet_is_told_of_with_the_stores_words(place, tmp_path, monkeypatch):
    from jtrain.checkpoint import transfer

    monkeypatch.setattr(transfer, "ATTEMPTS", 2)
    monkeypatch.setattr(transfer, "FIRST_PAUSE_SECONDS", 0.01)
    told = []
    with opened(tmp_path / "run", place, on_event=lambda kind, fields: told.append((kind, fields))) as checkpoints:
        checkpoints._backup._root = layout.run_path(place.replace("bucket", "no-such-bucket"))
        checkpoints.save(1, state_of(1), {})
        checkpoints.wait()
        checkpoints.wait_for_backup()
    (failed,) = [fields for kind, fields in told if kind == "backup_failed"]
    assert failed["step"] == 1 and failed["failures"] == 1 and failed["reason"]
    assert checkpoints.steps() == [1]


def test_l1_to_l3_one_run_holds_a_directory_in_a_store_and_who_was_taken_over_is_told(place, monkeypatch):
    first, second = RunLease(place, seconds=1.0), RunLease(place, seconds=60.0)
    with monkeypatch.context() as patch:
        patch.setattr(lease, "machine", lambda: "far")
        first.acquire()
    with pytest.raises(ConfigError, match="in use by process"):
        second.acquire()  # it is renewed meanwhile
    first._over.set()  # its machine is gone
    second.acquire()
    assert second.token == 2
    if place.startswith("s3"):  # the emulator of GCS knows no ifGenerationMatch
        assert not files_of(place).create(2, b"late")
    with pytest.raises(lease.TakenOver):
        first.check()
    second.check()
    second.release()
