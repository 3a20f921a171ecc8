import gzip
import itertools
import json
import os

import pytest

from jtrain.data.files import find_files, kind_of
from jtrain.data.sources import Bad, plan_chunks, read_chunk
from jtrain.errors import DataError

TEXTS = ["first", "zweites — ü", "", "quatre\nlignes", "五"] * 4


def read(path, *, field="text", **sizes):
    return [
        record for chunk in plan_chunks(str(path), kind_of(str(path)), **sizes) for record in read_chunk(chunk, field)
    ]


def write(path, texts=TEXTS, field="text"):
    """The texts as a file of the kind that its name says."""
    kind = kind_of(str(path))
    if kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({field: texts, "other": list(range(len(texts)))}), path, row_group_size=3)
    elif kind == "array_record":
        from array_record.python.array_record_module import ArrayRecordWriter

        writer = ArrayRecordWriter(str(path), "group_size:1")
        for text in texts:
            writer.write(json.dumps({field: text}).encode())
        writer.close()
    else:
        content = "".join(json.dumps({field: text}) + "\n" for text in texts).encode()
        path.write_bytes(gzip.compress(content) if str(path).endswith(".gz") else content)
    return path


NAMES = ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.array_record"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk_bytes", [1, 64, 1 << 20])
def test_every_kind_gives_its_records_in_order_however_it_is_cut(tmp_path, name, chunk_bytes):
    assert read(write(tmp_path / name), chunk_bytes=chunk_bytes) == TEXTS


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_text_file_is_one_document(tmp_path, name):
    content = "one\n\ntwo ü\n".encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert read(tmp_path / name) == ["one\n\ntwo ü\n"]


@pytest.mark.parametrize("chunk_bytes", [1, 7, 50])
@pytest.mark.parametrize("text", ["word ü — 東京 more\n\nwords  here " * 9, "東京" * 30, "x" * 100])
def test_a_long_text_is_cut_between_words_and_characters_and_loses_nothing(tmp_path, chunk_bytes, text):
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    chunks = plan_chunks(str(tmp_path / "a.txt"), "text", chunk_bytes, whole_text=10)
    parts = [part for chunk in chunks for part in read_chunk(chunk, "text")]
    assert "".join(parts) == text
    assert [chunk.opens for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert [chunk.closes for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    if " " in text:
        assert len(chunks) > 1
        assert all(part[0].isspace() and not before[-1].isspace() for before, part in itertools.pairwise(parts))


def test_a_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "hello"}\n')
    assert read(tmp_path / "a.txt") == read(tmp_path / "a.jsonl") == ["hello"]


def test_a_last_line_without_its_end_counts_and_blank_lines_do_not(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n  \n{"text": "b"}')
    assert read(tmp_path / "a.jsonl") == ["a", None, None, "b"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "is not JSON"),
        (b"[1]", "is not a JSON object but list"),
        (b"null", "is not a JSON object but null"),
        (b'{"body": "x", "id": 1}', "has no field 'text'; its fields are: body, id"),
        (b'{"text": null}', "has no text in field 'text' but null"),
        (b'{"text": 3}', "has no text in field 'text' but int"),
        (b'{"text": "\xff"}', "is not UTF-8: byte 0xff"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b'{"text": ' + b"[" * 100_000 + b"}", "is not JSON"),
    ],
)
def test_a_bad_line_says_what_is_wrong_and_the_others_are_read(tmp_path, line, reason):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n' + line + b'\n{"text": "b"}\n')
    first, bad, last = read(tmp_path / "a.jsonl")
    assert (first, last) == ("a", "b")
    assert isinstance(bad, Bad)
    assert reason in bad.reason


def test_a_text_file_that_is_not_utf_8_names_byte_and_place(tmp_path):
    (tmp_path / "a.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (bad,) = read(tmp_path / "a.txt")
    assert bad.reason == "is not UTF-8: byte 0xe9 at 3"


def test_a_parquet_file_without_the_column_says_which_it_has(tmp_path):
    with pytest.raises(DataError, match="no column 'text'; the columns are: body, other"):
        read(write(tmp_path / "a.parquet", field="body"))


def test_a_parquet_null_is_a_bad_record(tmp_path):
    first, bad = read(write(tmp_path / "a.parquet", texts=["a", None]))
    assert first == "a"
    assert bad.reason == "has no text in field 'text' but null"


@pytest.mark.parametrize("name", ["a.parquet", "a.array_record", "a.jsonl.gz"])
@pytest.mark.parametrize("damage", ["no such format", "cut short"])
def test_a_damaged_file_is_a_data_error_that_names_it(tmp_path, name, damage):
    path = tmp_path / name
    if damage == "cut short":
        whole = write(path).read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    else:
        path.write_bytes(b"something else entirely, but long enough " * 20)
    with pytest.raises(DataError, match=name):
        read(path)


def test_files_are_found_by_path_glob_folder_and_url(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "notes.md", "c.txt"):
        (tmp_path / name).write_text("")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "d.jsonl").write_text("")
    names = lambda pattern: [os.path.relpath(path, tmp_path) for path in find_files(pattern, field="data.train")]
    assert names(f"{tmp_path}/b.jsonl") == ["b.jsonl"]
    assert names(f"{tmp_path}/*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names(f"{tmp_path}/**/*.jsonl") == ["a.jsonl", "b.jsonl", "deep/d.jsonl"]
    assert names(str(tmp_path)) == ["a.jsonl", "b.jsonl", "c.txt", "deep/d.jsonl"]
    assert find_files(f"file://{tmp_path}/*.txt", field="data.train") == [f"file://{tmp_path}/c.txt"]


def test_a_url_is_read_like_a_path():
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/texts/a.jsonl", b'{"text": "far"}\n{"text": "away"}\n')
    (path,) = find_files("memory://texts/*.jsonl", field="data.train")
    assert read(path) == ["far", "away"]


@pytest.mark.parametrize("pattern", ["gone.txt", "*.txt", "gone/", "file:///gone/a.txt", "nosuch://bucket/a.txt"])
def test_what_is_not_there_is_a_data_error_that_names_field_and_value(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as error:
        find_files(pattern, field="data.eval")
    assert "data.eval" in error.value.message
    assert pattern.strip("/") in error.value.message


def test_an_unknown_kind_lists_the_known_ones():
    with pytest.raises(DataError, match=r"\.parquet"):
        kind_of("a.csv")
