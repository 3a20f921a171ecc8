import json
import threading
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.errors import Exit, StorageError
from jtrain.observe import jsonlines
from jtrain.observe.jsonlines import JsonLines, read_lines


def test_a_line_is_on_disk_as_soon_as_it_is_appended(tmp_path):
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.append({"a": 1})
    assert (tmp_path / "m.jsonl").read_text() == '{"a": 1}\n'


def test_numbers_that_are_not_finite_become_null_and_array_scalars_become_numbers(tmp_path):
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.append(
        {"nan": float("nan"), "inf": np.float32("inf"), "f": np.float32(0.5), "i": np.int64(3), "j": jnp.ones(2)}
    )
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {
        "nan": None,
        "inf": None,
        "f": 0.5,
        "i": 3,
        "j": [1.0, 1.0],
    }


@pytest.mark.parametrize("torn", ['{"a": 2', "x" * 10_000])
def test_a_torn_last_line_is_cut_when_the_file_is_opened_again(tmp_path, torn):
    path = tmp_path / "m.jsonl"
    path.write_text('{"a": 1}\n' + torn)
    assert list(read_lines(path)) == [{"a": 1}]
    JsonLines(path).append({"a": 3})
    assert path.read_text() == '{"a": 1}\n{"a": 3}\n'


def test_a_file_that_holds_nothing_but_a_torn_line_starts_empty(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"a"')
    JsonLines(path).close()
    assert path.read_text() == ""


def test_lines_from_many_threads_do_not_mix(tmp_path):
    lines = JsonLines(tmp_path / "m.jsonl")
    threads = [threading.Thread(target=lambda: [lines.append({"x": "y" * 500}) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [line["x"] for line in read_lines(tmp_path / "m.jsonl")] == ["y" * 500] * 200


def test_a_file_that_cannot_be_written_ends_with_the_storage_code_and_its_path(tmp_path):
    with pytest.raises(StorageError, match=r"missing/m\.jsonl") as caught:
        JsonLines(tmp_path / "missing" / "m.jsonl")
    assert caught.value.exit_code == Exit.STORAGE == 14


def test_d2_a_disk_that_is_full_for_a_while_ends_nothing_and_loses_no_line(monkeypatch, tmp_path, caplog):
    lines, write = JsonLines(tmp_path / "m.jsonl"), jsonlines.os.write
    lines.append({"a": 1})

    def full(fd, data):
        if len(data) > 4:
            return write(fd, data[:4])  # part of a line still fits
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(jsonlines.os, "write", full)
        for number in (2, 3):
            lines.append({"a": number})
            assert (tmp_path / "m.jsonl").read_text() == '{"a": 1}\n'
    lines.append({"a": 4})
    assert [line["a"] for line in read_lines(tmp_path / "m.jsonl")] == [1, 2, 3, 4]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/m.jsonl can't be written: [Errno 28] No space left on device; the run goes on, and its lines wait"
    ]
    lines.close()


def test_d2_lines_that_still_wait_at_the_close_are_told_of(monkeypatch, tmp_path, caplog):
    lines = JsonLines(tmp_path / "m.jsonl")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jsonlines.os, "write", full)
    lines.append({"a": 1})
    lines.close()
    assert "1 lines could not be written and are lost" in caplog.text


def test_a_short_write_is_continued(monkeypatch, tmp_path):
    lines = JsonLines(tmp_path / "m.jsonl")
    write = jsonlines.os.write
    monkeypatch.setattr(jsonlines.os, "write", lambda fd, data: write(fd, data[:3]))
    lines.append({"a": 1})
    assert (tmp_path / "m.jsonl").read_text() == '{"a": 1}\n'


def test_an_object_store_gets_the_whole_file_at_the_close_and_keeps_earlier_lines(monkeypatch):
    class Store:
        """A path on a store that knows whole objects only."""

        objects: ClassVar[dict[str, str]] = {}

        def __init__(self, name):
            self.name = name

        def __fspath__(self):
            return f"gs://bucket/{self.name}"

        def exists(self):
            return self.name in self.objects

        def read_text(self):
            return self.objects[self.name]

        def write_text(self, text):
            self.objects[self.name] = text

    monkeypatch.setattr(jsonlines.epath, "Path", Store)
    for value in (1, 2):
        lines = JsonLines("m.jsonl")
        lines.append({"a": value})
        lines.close()
    assert Store.objects == {"m.jsonl": '{"a": 1}\n{"a": 2}\n'}


def test_after_the_close_a_line_is_dropped(tmp_path):
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.close()
    lines.close()
    lines.append({"a": 1})
    assert (tmp_path / "m.jsonl").read_text() == ""
