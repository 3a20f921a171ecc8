import json
import shutil

import pytest
import xxhash
from etils import epath

from jtrain.checkpoint.manifest import (
    DamagedCheckpoint,
    check_files,
    hash_file,
    hash_files,
    new_manifest,
    parse_manifest,
    read_manifest,
    write_manifest,
)
from jtrain.errors import CheckpointError, Exit


@pytest.fixture
def step(tmp_path):
    folder = epath.Path(tmp_path / "7")
    (folder / "state").mkdir(parents=True)
    (folder / "state" / "values").write_bytes(bytes(range(256)) * 3)
    (folder / "meta").write_text("{}")
    records = hash_files(folder, ["state/values", "meta"])
    write_manifest(
        folder, new_manifest(7, records, {"params/w": ("float32", (2, 3))}, {"loss": 1.5, "x": float("nan")})
    )
    return folder


def test_what_is_written_is_read(step):
    manifest = read_manifest(step)
    assert manifest.step == 7
    assert manifest.files["meta"] == (2, xxhash.xxh3_128(b"{}").hexdigest())
    assert manifest.arrays == {"params/w": ("float32", (2, 3))}
    assert manifest.metrics == {"loss": 1.5, "x": None}
    assert manifest.size == 768 + 2
    assert json.loads((step / "manifest.json").read_text())["step"] == 7  # plain JSON for other programs
    check_files(step, manifest)


def test_a_file_longer_than_a_chunk_has_the_hash_of_its_whole(tmp_path):
    data = bytes(range(251)) * ((17 << 20) // 251)
    (tmp_path / "x").write_bytes(data)
    assert hash_file(epath.Path(tmp_path / "x")) == (len(data), xxhash.xxh3_128(data).hexdigest())


def test_every_single_bit_of_the_manifest_is_covered(step):
    data = (step / "manifest.json").read_bytes()
    parse_manifest("7", data)
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedCheckpoint):
            parse_manifest("7", bytes(flipped))


@pytest.mark.parametrize("cut", [0, 1, 20, -1])
def test_a_manifest_that_was_cut_is_damaged(step, cut):
    path = step / "manifest.json"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DamagedCheckpoint, match=r"step 7 is damaged: manifest\.json"):
        read_manifest(step)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda p: p.unlink(), "missing"),
        (lambda p: p.write_bytes(b""), "0 bytes instead of 768"),
        (lambda p: p.write_bytes(p.read_bytes()[:384]), "384 bytes instead of 768"),
        (lambda p: p.write_bytes(b"\x01" + p.read_bytes()[1:]), "hash differs"),
    ],
)
def test_damage_names_step_file_and_reason(step, damage, reason):
    damage(step / "state" / "values")
    with pytest.raises(DamagedCheckpoint) as caught:
        check_files(step, read_manifest(step))
    assert (caught.value.step, caught.value.file, caught.value.reason) == ("7", "state/values", reason)
    assert caught.value.exit_code == Exit.CHECKPOINT


def test_a_link_out_of_the_checkpoint_is_refused_and_a_stray_file_ignored(step, tmp_path):
    (step / "stray").write_text("x")
    check_files(step, read_manifest(step))
    outside = tmp_path / "outside"
    outside.write_text("{}")
    (step / "meta").unlink()
    (tmp_path / "7" / "meta").symlink_to(outside)
    with pytest.raises(DamagedCheckpoint, match="points out"):
        check_files(step, read_manifest(step))


def test_a_folder_that_is_a_link_is_refused_too(step, tmp_path):
    shutil.move(tmp_path / "7" / "state", tmp_path / "elsewhere")
    (tmp_path / "7" / "state").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedCheckpoint, match="state/values: points out"):
        check_files(step, read_manifest(step))


def test_a_manifest_that_names_a_file_outside_is_refused(step):
    write_manifest(step, new_manifest(7, {"../secret": (0, "")}, {}, {}))
    with pytest.raises(DamagedCheckpoint, match="points out"):
        check_files(step, read_manifest(step))


def test_a_newer_format_is_refused_with_the_version_that_wrote_it(step, monkeypatch):
    monkeypatch.setattr("jtrain.checkpoint.manifest.FORMAT", 2)
    write_manifest(step, read_manifest(step))
    monkeypatch.setattr("jtrain.checkpoint.manifest.FORMAT", 1)
    with pytest.raises(CheckpointError, match="format 2, written by jtrain") as caught:
        read_manifest(step)
    assert not isinstance(caught.value, DamagedCheckpoint)
