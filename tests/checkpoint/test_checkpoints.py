import json
import os
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import abstract, make_mesh, make_state, numpy_params, same_bits
from jax.sharding import NamedSharding, PartitionSpec

from jtrain.checkpoint import Checkpoints, DamagedCheckpoint
from jtrain.errors import CheckpointError, Exit


def flip(path, bit):
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def values_file(folder):
    """The largest file: array values, which Orbax itself does not check."""
    files = [os.path.join(root, name) for root, _, names in os.walk(folder) for name in names]
    return max(files, key=os.path.getsize)


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    """A run with the steps 1, 2, 3, not to be changed: copy it."""
    folder = tmp_path_factory.mktemp("three")
    with Checkpoints(folder, save_total_limit=None) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, make_state(step, make_mesh(2, 2, 2)), {"tokens": step})
    return folder


@pytest.fixture
def run(three_steps, tmp_path):
    shutil.copytree(three_steps, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize("shape", [(1, 1, 1), (8, 1, 1), (1, 4, 2)])
def test_a_checkpoint_restores_bit_by_bit_onto_any_mesh(three_steps, shape):
    mesh = make_mesh(*shape)
    checkpoints = Checkpoints(three_steps, read_only=True)
    state, meta, step = checkpoints.restore(abstract(make_state(0, make_mesh(2, 2, 2)), mesh))
    assert (step, meta) == (3, {"tokens": 3})
    assert same_bits(state["params"], numpy_params(3))
    assert same_bits(state, make_state(3, mesh))
    assert state["params"]["w"].sharding == NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    assert jax.tree.structure(state) == jax.tree.structure(make_state(0, mesh))


def test_the_state_may_be_donated_as_soon_as_save_returns(tmp_path, mesh):
    overwrite = jax.jit(lambda state: jax.tree.map(lambda x: x * 0 - 7, state), donate_argnums=0)
    x = jax.device_put(np.arange(1 << 20, dtype="f"), NamedSharding(mesh, PartitionSpec("data")))
    with Checkpoints(tmp_path) as checkpoints:
        state = {"x": x + 0}
        checkpoints.save(1, state, {})
        jax.block_until_ready(overwrite(overwrite(state)))
        restored, _, _ = checkpoints.restore({"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)})
    np.testing.assert_array_equal(restored["x"], np.arange(1 << 20, dtype="f"))


def test_events_come_in_order_and_durable_means_that_the_manifest_is_there(tmp_path, mesh):
    events = []

    def on_event(kind, fields):
        events.append(
            (kind, fields["step"], (tmp_path / "checkpoints" / str(fields["step"]) / "manifest.json").exists())
        )

    with Checkpoints(tmp_path, on_event=on_event) as checkpoints:
        assert checkpoints.durable_step is None
        checkpoints.save(4, make_state(4, mesh), {})
        checkpoints.wait()
        assert checkpoints.durable_step == 4
    assert [(kind, step) for kind, step, _ in events if kind == "durable"] == [("durable", 4)]
    assert ("durable", 4, True) in events and ("save", 4, False) in events


def test_a_step_that_was_saved_or_restored_is_not_saved_again(run, mesh):
    with Checkpoints(run, save_total_limit=None) as checkpoints:
        _, _, step = checkpoints.restore(abstract(make_state(0, mesh)))
        assert not checkpoints.save(step, make_state(0, mesh), {})
        assert checkpoints.save(4, make_state(4, mesh), {})
        assert not checkpoints.save(4, make_state(0, mesh), {})  # also while it is still being written
        checkpoints.wait()
        state, _, _ = checkpoints.restore(abstract(make_state(0, mesh)))
        assert same_bits(state, make_state(4, mesh))


def test_meta_is_copied_when_save_is_called(tmp_path, mesh):
    meta = {"filler": list(range(300_000)), "callbacks": [{"patience": 1}]}  # takes a while to write
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state(1, mesh), meta)
        meta["callbacks"][0]["patience"] = 2
        checkpoints.wait()
        assert checkpoints.read_meta(1)["callbacks"] == [{"patience": 1}]


def test_a_synchronous_save_is_durable_when_it_returns(tmp_path, mesh):
    with Checkpoints(tmp_path, async_save=False) as checkpoints:
        checkpoints.save(1, make_state(1, mesh), {})
        assert checkpoints.durable_step == 1 and checkpoints.steps() == [1]


def test_an_asynchronous_save_returns_before_it_is_written_and_the_next_one_waits(tmp_path, mesh, monkeypatch):
    gate, order = threading.Event(), []
    from jtrain.checkpoint import finish

    original = finish.write_manifest

    def slow(folder, manifest):
        assert gate.wait(30)
        order.append(f"sealed {manifest.step}")
        original(folder, manifest)

    monkeypatch.setattr(finish, "write_manifest", slow)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state(1, mesh), {})
        order.append("returned 1")
        checkpoints.poll()  # does not wait
        assert checkpoints.durable_step is None
        gate.set()
        checkpoints.save(2, make_state(2, mesh), {})
        order.append("returned 2")
    assert order[:2] == ["returned 1", "sealed 1"]
    assert checkpoints.steps() == [1, 2]


def test_the_best_and_the_newest_survive_also_after_a_restart(tmp_path, mesh, log):
    state = make_state(0, mesh)

    def open_checkpoints():
        return Checkpoints(tmp_path, save_total_limit=2, best_metric="eval_loss", on_event=log)

    with open_checkpoints() as checkpoints:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
            checkpoints.save(step, state, {}, {"eval_loss": loss})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3]
    with open_checkpoints() as checkpoints:
        checkpoints.save(4, state, {})  # without evaluation
        checkpoints.wait()
        assert checkpoints.steps() == [2, 4] and checkpoints.best_steps() == [2]
        checkpoints.save(5, state, {}, {"eval_loss": 0.5})
        checkpoints.wait()
        assert checkpoints.best_steps() == [5]
    assert sorted(os.listdir(tmp_path / "checkpoints" / "_trash")) == []


@pytest.mark.parametrize("name", ["values", "manifest.json", "meta/metadata", "state/_METADATA"])
def test_a_damaged_newest_step_is_put_in_quarantine_and_the_one_before_is_used(run, mesh, log, name):
    folder = run / "checkpoints" / "3"
    path = values_file(folder) if name == "values" else folder / name
    flip(path, 100)
    checkpoints = Checkpoints(run, on_event=log)
    with pytest.raises(DamagedCheckpoint, match="step 3"):
        checkpoints.verify(3)
    state, meta, step = checkpoints.restore(abstract(make_state(0, mesh)))
    assert step == meta["tokens"] == checkpoints.durable_step == 2
    assert same_bits(state, make_state(2, mesh))
    assert checkpoints.steps() == [1, 2]
    assert os.listdir(run / "checkpoints" / "_quarantine") == ["3"]
    (event,) = log.of("corrupt")
    assert event["step"] == 3 and event["file"] == os.path.relpath(path, folder)
    # the run goes on: step 3 is made again
    assert checkpoints.save(3, make_state(3, mesh), {})
    checkpoints.close()
    assert checkpoints.steps() == [1, 2, 3]


def test_when_nothing_is_intact_it_ends_and_leaves_everything_so_that_a_second_start_ends_too(run, mesh):
    for step in (1, 2, 3):
        flip(values_file(run / "checkpoints" / str(step)), 7)
    for _ in range(2):
        checkpoints = Checkpoints(run)
        with pytest.raises(CheckpointError, match="none of the checkpoints") as caught:
            checkpoints.restore(abstract(make_state(0, mesh)))
        assert caught.value.exit_code == Exit.CHECKPOINT
        assert checkpoints.steps() == [1, 2, 3]


def test_a_step_asked_for_by_number_is_not_replaced_by_another(run, mesh):
    checkpoints = Checkpoints(run)
    assert checkpoints.restore(abstract(make_state(0, mesh)), step=1)[2] == 1
    flip(values_file(run / "checkpoints" / "2"), 7)
    with pytest.raises(DamagedCheckpoint, match="step 2"):
        checkpoints.restore(abstract(make_state(0, mesh)), step=2)
    with pytest.raises(CheckpointError, match="no finished checkpoint of step 9"):
        checkpoints.restore(abstract(make_state(0, mesh)), step=9)
    assert checkpoints.steps() == [1, 2, 3]


def test_an_empty_run_has_nothing_to_restore(tmp_path, mesh):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == [] and checkpoints.durable_step is None
    with pytest.raises(CheckpointError, match="no finished checkpoint"):
        checkpoints.restore(abstract(make_state(0, mesh)))


def test_going_back_moves_the_steps_ahead_aside_when_the_new_line_saves(run, mesh, log):
    with Checkpoints(run, on_event=log, save_total_limit=None) as checkpoints:
        checkpoints.restore(abstract(make_state(0, mesh)), step=1)
        assert checkpoints.steps() == [1, 2, 3]  # nothing is moved by reading
        checkpoints.save(2, make_state(20, mesh), {"tokens": 20})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2] and checkpoints.read_meta(2) == {"tokens": 20}
    assert sorted(os.listdir(run / "checkpoints" / "_superseded")) == ["2", "3"]
    assert log.of("superseded") == [{"steps": [2, 3]}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["params"].update(w=jax.ShapeDtypeStruct((16, 25), jnp.float32)), "params/w: float32[16, 24]"),
        (lambda s: s["params"].update(w=jax.ShapeDtypeStruct((16, 24), jnp.bfloat16)), "bfloat16[16, 24] in this run"),
        (lambda s: s["params"].pop("b"), "params/b: in the checkpoint only"),
        (lambda s: s["params"].update(c=jax.ShapeDtypeStruct((1,), jnp.float32)), "params/c: not in the checkpoint"),
        (lambda s: s.update(opt_state=()), "opt_state/1/0/mu/b: in the checkpoint only"),
    ],
)
def test_another_model_is_refused_with_the_paths_and_nothing_is_moved(three_steps, mesh, change, message):
    wanted = abstract(make_state(0, mesh))
    change(wanted)
    checkpoints = Checkpoints(three_steps, read_only=True)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.restore(wanted)
    assert message in str(caught.value) and "init_from" in caught.value.remedy
    assert checkpoints.steps() == [1, 2, 3]


def test_opening_clears_what_a_killed_run_left_and_a_reader_leaves_it(run):
    root = run / "checkpoints"
    (root / "_trash" / "1").mkdir(parents=True)
    (root / "4.orbax-checkpoint-tmp").mkdir()
    (root / "3" / "manifest.json").unlink()
    before = sorted(os.listdir(root))
    reader = Checkpoints(run, read_only=True)
    assert reader.steps() == [1, 2] and sorted(os.listdir(root)) == before
    with pytest.raises(RuntimeError, match="read-only"):
        reader.save(9, {}, {})
    assert Checkpoints(run).steps() == [1, 2]
    assert sorted(os.listdir(root)) == ["1", "2", "_quarantine"]
    assert os.listdir(root / "_quarantine") == ["unfinished"]


def test_a_state_with_anything_but_numbers_is_refused(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(TypeError, match="rng"):
            checkpoints.save(1, {"rng": jax.random.key(0)}, {})
        with pytest.raises(TypeError, match="name is str"):
            checkpoints.save(1, {"name": "x"}, {})
        with pytest.raises(TypeError, match="JSON"):
            checkpoints.save(1, {"x": jnp.ones(1)}, {"x": object()})


def test_half_precision_integers_and_scalars_keep_their_dtype(tmp_path):
    state = {
        "h": jnp.arange(5, dtype=jnp.bfloat16),
        "i": jnp.int8(3),
        "m": jnp.array([True, False]),
        "e": jnp.zeros((0, 3)),
    }
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        restored, _, _ = checkpoints.restore(abstract(state))
    assert same_bits(state, restored)


def test_a_save_takes_the_space_that_was_asked_for_before_it(tmp_path, log):
    with Checkpoints(tmp_path, on_event=log) as checkpoints:
        checkpoints.save(1, {"x": jnp.zeros((512, 512), jnp.float32)}, {})  # 1 MiB that would compress to nothing
    assert 1 << 20 <= log.of("durable")[0]["bytes"] < 1.1 * (1 << 20)


@pytest.mark.faults
def test_the_memory_of_the_process_is_flat_over_fifty_saves(tmp_path):
    psutil = pytest.importorskip("psutil")
    sizes = []
    with Checkpoints(tmp_path, save_total_limit=2) as checkpoints:
        for step in range(1, 61):
            checkpoints.save(step, {"x": jnp.full((1024, 1024), step, jnp.float32)}, {})  # 4 MiB
            checkpoints.wait()
            sizes.append(psutil.Process().memory_info().rss >> 20)
    assert sizes[-1] - sizes[9] < 50  # a state kept at every save would be 200 MiB


def test_a_hundred_random_bit_flips_over_all_files_are_all_caught(run):
    folder = run / "checkpoints" / "3"
    names = sorted(os.path.relpath(os.path.join(r, n), folder) for r, _, ns in os.walk(folder) for n in ns)
    assert set(json.loads((folder / "manifest.json").read_text())["files"]) == {*names} - {"manifest.json"}
    checkpoints = Checkpoints(run, read_only=True)
    rng = np.random.default_rng(0)
    for trial in range(100):
        path = folder / names[trial % len(names)]
        if not path.stat().st_size:
            continue
        bit = int(rng.integers(path.stat().st_size * 8))
        flip(path, bit)
        with pytest.raises(DamagedCheckpoint) as caught:
            checkpoints.verify(3)
        assert caught.value.file == os.path.relpath(path, folder)
        flip(path, bit)
    checkpoints.verify(3)


def test_a_program_that_goes_back_to_a_step_of_its_own_saves_the_later_ones_anew(tmp_path, mesh):
    with Checkpoints(tmp_path, save_total_limit=None) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, make_state(step, mesh), {"line": 1})
        checkpoints.restore(abstract(make_state(0, mesh)), step=1)
        assert checkpoints.save(2, make_state(20, mesh), {"line": 2})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2] and checkpoints.read_meta(2) == {"line": 2}


def test_of_saves_that_were_cut_off_again_and_again_only_the_newest_is_kept(run):
    root = run / "checkpoints"
    for step in (3, 2):
        (root / str(step) / "manifest.json").unlink()
        Checkpoints(run)
    assert os.listdir(root / "_quarantine") == ["unfinished"]
    assert json.loads((root / "_quarantine" / "unfinished" / "meta" / "metadata").read_text()) == {"tokens": 2}
