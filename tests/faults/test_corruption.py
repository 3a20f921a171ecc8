"""C1 to C14: files of a checkpoint that are gone, empty, cut or flipped are found, named, and never trained on."""

from __future__ import annotations

import collections
import json
import os
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from jtrain.checkpoint import Checkpoints, DamagedCheckpoint, arrays, manifest
from jtrain.checkpoint.manifest import read_manifest, write_manifest
from jtrain.errors import CheckpointError, Exit
from jtrain.observe.metrics import read_events
from tests.train.fits import checkpoints as steps_of
from tests.train.fits import make

KINDS = {
    "C1-values": r"state/ocdbt\.process_0/d/.*",
    "C2-tree": r"state/d/.*",
    "C3-index": r"state/manifest\.ocdbt",
    "C4-process-index": r"state/ocdbt\.process_0/manifest\.ocdbt",
    "C5-arrays-metadata": r"state/_METADATA",
    "C6-commit-mark": r"(.*/)?commit_success\.txt",
    "C7-step-metadata": r"_CHECKPOINT_METADATA",
    "C8-data-state": r"meta/metadata",
    "C9-manifest": r"manifest\.json",
    "C10-shardings": r"state/(_sharding|array_metadatas/.*)",
}
"""Row of the matrix -> its files. The data state, the counters and the callbacks' state are one JSON item."""
ACTIONS = ("delete", "zero", "half", "flip")
ALWAYS = {"C10-shardings"}  # not every version of Orbax writes them


def state_of(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {
        "w": rng.normal(size=(64, 96)).astype(np.float32),
        "b": rng.normal(size=96).astype(np.float32),
        "step": np.int32(step),
    }


ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state_of(0))


def meta_of(step: int) -> dict:
    return {"counters": {"step": step, "tokens": 1000 * step}, "data": f"fingerprint {step}"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with the steps 1, 2 and 3; not to be changed."""
    run = tmp_path_factory.mktemp("whole") / "run"
    with Checkpoints(run, save_total_limit=None) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, jax.tree.map(jnp.asarray, state_of(step)), meta_of(step))
    return run


@pytest.fixture
def run(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def kind_of(name: str) -> str:
    return next(kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, name))


def of_kind(folder: Path, kind: str) -> Path:
    """The largest file of a kind."""
    names = [name for name in files_of(folder) if kind_of(name) == kind]
    if not names and kind in ALWAYS:
        pytest.skip("this version of Orbax writes no such file")
    return folder / max(names, key=lambda name: (folder / name).stat().st_size)


def damage(path: Path, action: str) -> None:
    data = path.read_bytes()
    if action == "delete":
        path.unlink()
    elif action == "flip":
        path.write_bytes(flipped(data, len(data) * 8 // 2 + 3))
    else:
        path.write_bytes(b"" if action == "zero" else data[: len(data) // 2])


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def same(state: dict, meta: dict, step: int) -> bool:
    wanted = state_of(step)
    return meta == meta_of(step) and all(np.asarray(state[name]).tobytes() == wanted[name].tobytes() for name in wanted)


def test_every_file_of_a_checkpoint_is_of_a_kind_and_in_the_manifest(whole):
    folder = whole / "checkpoints" / "3"
    names = files_of(folder)
    assert {kind_of(name) for name in names} >= {*KINDS} - ALWAYS
    assert {*names} == {*read_manifest(epath.Path(folder)).files, "manifest.json"}


def slow_unless(quick: bool) -> list:
    return [] if quick else [pytest.mark.faults]


@pytest.mark.parametrize(
    ("kind", "action"),
    [
        pytest.param(kind, action, id=f"{kind}-{action}", marks=slow_unless(kind == "C1-values" or action == "flip"))
        for kind in KINDS
        for action in ACTIONS
    ],
)
def test_a_damaged_file_is_named_the_step_before_is_used_and_the_damaged_one_kept(run, kind, action):
    folder = run / "checkpoints" / "3"
    path = of_kind(folder, kind)
    name = path.relative_to(folder).as_posix()
    damage(path, action)
    kept = {name: (folder / name).read_bytes() for name in files_of(folder)}
    told: list[tuple[str, dict]] = []
    gone = kind == "C9-manifest" and action == "delete"  # then the step has never been finished

    with pytest.raises(CheckpointError) as caught:
        Checkpoints(run, read_only=True).restore(ABSTRACT, 3)
    assert caught.value.exit_code == Exit.CHECKPOINT and "step 3" in caught.value.message
    if not gone:
        assert isinstance(caught.value, DamagedCheckpoint)
        assert (caught.value.step, caught.value.file) == ("3", name) and caught.value.reason
        assert name in caught.value.message and "resume from another step" in str(caught.value.remedy)

    checkpoints = Checkpoints(run, on_event=lambda event, fields: told.append((event, fields)))
    state, meta, step = checkpoints.restore(ABSTRACT)
    assert step == 2 and same(state, meta, 2)
    assert checkpoints.steps() == [1, 2] and checkpoints.durable_step == 2
    (corrupt,) = [fields for event, fields in told if event == "corrupt"]
    assert (corrupt["step"], corrupt["file"]) == (3, name) and corrupt["reason"]
    quarantine = Path(corrupt["moved_to"])
    assert quarantine.parent == run / "checkpoints" / "_quarantine"
    assert {name: (quarantine / name).read_bytes() for name in files_of(quarantine)} == kept


def test_orbax_alone_would_not_notice_a_flipped_value(run):
    """Why there is a manifest; and that the flips below do change what is read."""
    folder = run / "checkpoints" / "3"
    path = of_kind(folder, "C1-values")
    path.write_bytes(flipped(path.read_bytes(), 8 * (path.stat().st_size // 2)))
    read = arrays.read_arrays(epath.Path(folder / "state"), arrays.flatten(ABSTRACT))
    assert any(np.asarray(read[name]).tobytes() != value.tobytes() for name, value in state_of(3).items())


def flip_at_random(run: Path, count: int, seed: int) -> dict[str, collections.Counter]:
    """Flips one bit, restores, and puts it back; again and again. Kind -> what came of it."""
    folder, rng = run / "checkpoints" / "3", np.random.default_rng(seed)
    names = [name for name in files_of(folder) if (folder / name).stat().st_size]
    by_kind = collections.defaultdict(list)
    for name in names:
        by_kind[kind_of(name)].append(name)
    outcomes: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    reader = Checkpoints(run, read_only=True)
    for trial in range(count):
        kind = sorted(by_kind)[trial % len(by_kind)]
        name = by_kind[kind][rng.integers(len(by_kind[kind]))]
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(flipped(data, int(rng.integers(len(data) * 8))))
        try:
            state, meta, _ = reader.restore(ABSTRACT, 3)
            outcomes[kind]["harmless" if same(state, meta, 3) else "silent"] += 1
        except DamagedCheckpoint as error:
            outcomes[kind]["detected" if error.file == name else "misnamed"] += 1
        (folder / name).write_bytes(data)
    state, meta, _ = reader.restore(ABSTRACT, 3)
    assert same(state, meta, 3)  # the last flip was undone
    return outcomes


def table_of(outcomes: dict[str, collections.Counter]) -> str:
    columns = ("detected", "harmless", "misnamed", "silent")
    lines = [f"{'files':20}" + "".join(f"{column:>10}" for column in ("flips", *columns))]
    for kind in sorted(outcomes, key=lambda kind: int(re.findall(r"\d+", kind)[0])):
        counts = [outcomes[kind].total(), *(outcomes[kind][column] for column in columns)]
        lines.append(f"{kind:20}" + "".join(f"{count:10}" for count in counts))
    return "\n".join(lines)


@pytest.mark.parametrize("count", [30, pytest.param(500, marks=pytest.mark.faults)])
def test_c1_to_c10_of_flips_in_any_file_none_is_silent(run, count):
    outcomes = flip_at_random(run, count, seed=6)
    print(f"\n{table_of(outcomes)}")
    total = sum(outcomes.values(), collections.Counter())
    assert total.total() == count
    assert total["silent"] == total["misnamed"] == 0, table_of(outcomes)
    assert total["detected"] + total["harmless"] == count


# Of whole runs

FIELDS = {"checkpoint": {"save_steps": 2, "save_total_limit": None}, "optimizer": {"name": "adamw"}}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A run of ten updates that nothing happened to, and one of six with the checkpoints 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("reference")
    undisturbed = make(folder / "whole", max_steps=10, **FIELDS)
    undisturbed.fit()
    make(folder / "run", max_steps=6, **FIELDS).fit()
    return folder / "run", jax.tree.map(np.asarray, undisturbed.state.params)


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    "name", ["values", *(pytest.param(n, marks=pytest.mark.faults) for n in ("meta/metadata", "manifest.json"))]
)
def test_c_a_run_goes_on_from_the_step_before_with_the_bits_of_an_undisturbed_one(name, reference, tmp_path):
    source, params = reference
    run = tmp_path / "run"
    shutil.copytree(source, run)
    folder = run / "checkpoints" / "6"
    damage(of_kind(folder, "C1-values") if name == "values" else folder / name, "flip")
    trainer = make(run, max_steps=10, **FIELDS)
    trainer.fit()
    assert bits(trainer.state.params) == bits(params)
    assert [event["step"] for event in read_events(run, "corrupt")] == [6]
    assert read_events(run, "resume")[-1]["step"] == 4
    assert steps_of(run) == [2, 4, 6, 8, 10] and os.listdir(run / "checkpoints" / "_quarantine") == ["6"]


def test_c11_when_every_step_is_damaged_the_run_ends_with_66_and_does_not_begin_anew(reference, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(reference[0], run)
    for step in (2, 4, 6):
        damage(of_kind(run / "checkpoints" / str(step), "C1-values"), "flip")
    before = {name: (run / "checkpoints" / name).read_bytes() for name in files_of(run / "checkpoints")}
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"none of the checkpoints \[2, 4, 6\] is intact") as caught:
            make(run, max_steps=10, **FIELDS).fit()
        assert caught.value.exit_code == Exit.CHECKPOINT == 66
        assert "start a new run in another run_dir" in str(caught.value.remedy)
    assert {name: (run / "checkpoints" / name).read_bytes() for name in files_of(run / "checkpoints")} == before


@pytest.mark.faults
def test_c12_a_newer_format_is_refused_and_no_older_step_is_taken_in_its_place(reference, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(reference[0], run)
    folder = epath.Path(run / "checkpoints" / "6")
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT", manifest.FORMAT + 1)
        patch.setattr(manifest, "_version", lambda: "9.9.9")
        write_manifest(folder, read_manifest(folder))
    with pytest.raises(CheckpointError, match=r"format 2, written by jtrain 9\.9\.9") as caught:
        make(run, max_steps=10, **FIELDS).fit()
    assert not isinstance(caught.value, DamagedCheckpoint) and caught.value.exit_code == Exit.CHECKPOINT
    assert "install jtrain 9.9.9 or newer" in str(caught.value.remedy)
    assert steps_of(run) == [2, 4, 6] and not (run / "checkpoints" / "_quarantine").exists()


def test_c14_what_does_not_belong_there_is_left_out_and_what_lies_outside_is_not_touched(run, whole, tmp_path):
    outside = tmp_path / "outside"
    shutil.copytree(whole / "checkpoints" / "2", outside)
    before = {name: (outside / name).read_bytes() for name in files_of(outside)}
    root = run / "checkpoints"
    (root / "9").symlink_to(outside)  # a link is no step, whatever lies behind it
    (root / "8.orbax-checkpoint-tmp").symlink_to(outside)
    (root / "7.orbax-checkpoint-tmp").mkdir()
    (root / "5").write_text("a file")
    (root / "007").mkdir()
    (root / "notes.txt").write_text("mine")
    (root / "3" / "stray.pkl").write_bytes(b"\x80\x04.")
    with Checkpoints(run, save_total_limit=1) as checkpoints:
        assert checkpoints.steps() == [1, 2, 3]
        state, meta, step = checkpoints.restore(ABSTRACT)
        assert step == 3 and same(state, meta, 3)
        checkpoints.save(4, jax.tree.map(jnp.asarray, state_of(4)), meta_of(4))
        checkpoints.wait()
        assert checkpoints.steps() == [4]
    left = {entry.name for entry in root.iterdir() if not entry.name.startswith("_")}
    assert left == {"4", "9", "5", "007", "notes.txt"}
    assert {name: (outside / name).read_bytes() for name in files_of(outside)} == before


@pytest.mark.parametrize("name", ["meta/metadata", "state"])
def test_c14_a_step_with_a_link_in_it_is_refused_even_when_the_content_is_right(run, tmp_path, name):
    path = run / "checkpoints" / "3" / name
    shutil.move(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedCheckpoint, match="points out of the checkpoint"):
        Checkpoints(run, read_only=True).restore(ABSTRACT, 3)
    assert Checkpoints(run).restore(ABSTRACT)[2] == 2


GOLDEN = Path(__file__).parents[1] / "checkpoint" / "golden"


@pytest.mark.parametrize("release", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
def test_c13_a_checkpoint_of_every_release_restores_and_its_run_goes_on(release, tmp_path):
    from tests.checkpoint.golden.make_golden import FIELDS, STEP, digests

    run = tmp_path / "run"
    shutil.copytree(GOLDEN / release / "run", run)
    expected = json.loads((GOLDEN / release / "expected.json").read_text())
    trainer = make(run, max_steps=STEP, **FIELDS)
    trainer.fit()  # it is complete: this restores and returns
    assert read_events(run, "resume")[-1]["step"] == STEP and trainer.counters.step == STEP
    assert digests(trainer.state) == expected["arrays"]
    assert trainer.counters.tokens == expected["tokens"] and trainer.counters.examples == expected["examples"]
    longer = make(run, max_steps=STEP + 2, **FIELDS)
    assert np.isfinite(longer.fit().train[-1]["loss"]) and longer.counters.step == STEP + 2
