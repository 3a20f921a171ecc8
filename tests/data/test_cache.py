import dataclasses
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from jtrain.data import cache
from jtrain.data.cache import CacheOptions, cache_folder, open_plan, open_store
from jtrain.data.packing import plan_rows
from jtrain.data.quarantine import read_quarantine
from jtrain.data.tokenise import Recipe
from jtrain.data.tokenizers import ByteTokenizer
from jtrain.errors import ConfigError, DataError, StorageError

BYTES = ByteTokenizer()
OPTIONS = CacheOptions()
PARALLEL = CacheOptions(num_workers=2, chunk_bytes=300, parallel_bytes=0)
SKIP = CacheOptions(on_bad_record="skip", max_bad_records=2)


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def documents(store):
    return [store.tokens[a:b].tolist() for a, b in zip(store.edges[:-1], store.edges[1:], strict=True)]


def entries():
    """Finished caches and temporary ones."""
    return sorted(path.name for path in (cache_folder() / "tokens").iterdir() if path.is_dir())


def test_documents_come_back_with_their_end_tokens(tmp_path):
    store = open_store(write_jsonl(tmp_path / "a.jsonl", ["ab", "", "é"]), BYTES, OPTIONS)
    assert documents(store) == [[97, 98, 256], [0xC3, 0xA9, 256]]
    assert store.tokens.dtype == np.uint16
    assert isinstance(store.tokens, np.memmap)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (Recipe(append_eos=False), [97]),
        (Recipe(prepend_bos=True), [257, 97, 256]),
        (Recipe(text_field="other"), [98, 256]),
    ],
)
def test_the_recipe_says_what_a_document_holds(tmp_path, recipe, expected):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "other": "b"}\n')
    assert documents(open_store(str(tmp_path / "a.jsonl"), BYTES, CacheOptions(recipe=recipe))) == [expected]


def test_a_second_run_opens_what_the_first_made(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", ["hello", "you"])
    first = open_store(path, BYTES, OPTIONS)
    monkeypatch.setattr(cache, "tokenise_chunk", None)
    assert documents(open_store(path, BYTES, OPTIONS)) == documents(first)


def test_a_copy_of_the_data_elsewhere_is_the_same_data(tmp_path, monkeypatch):
    first = open_store(write_jsonl(tmp_path / "a.jsonl", ["hello"]), BYTES, OPTIONS)
    shutil.copy(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    os.utime(tmp_path / "b.jsonl", (1, 1))
    monkeypatch.setattr(cache, "tokenise_chunk", None)
    assert open_store(str(tmp_path / "b.jsonl"), BYTES, OPTIONS).fingerprint == first.fingerprint


def test_changed_data_is_tokenised_again_even_within_the_clock_s_grain(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["hello"])
    stamp = os.stat(path).st_mtime_ns
    first = open_store(path, BYTES, OPTIONS)
    write_jsonl(tmp_path / "a.jsonl", ["world"])  # as long as before
    os.utime(path, ns=(stamp, stamp))
    second = open_store(path, BYTES, OPTIONS)
    assert documents(second) == [[*b"world", 256]]
    assert first.fingerprint != second.fingerprint


def test_every_part_of_the_recipe_and_the_tokenizer_is_in_the_fingerprint(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "other": "a"}\n')

    class Other(ByteTokenizer):
        fingerprint = "other"

    recipes = [Recipe(), Recipe(append_eos=False), Recipe(prepend_bos=True), Recipe(text_field="other")]
    stores = [open_store(str(tmp_path / "a.jsonl"), BYTES, CacheOptions(recipe=recipe)) for recipe in recipes]
    stores.append(open_store(str(tmp_path / "a.jsonl"), Other(), OPTIONS))
    assert len({store.fingerprint for store in stores}) == 5


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_several_processes_make_the_same_tokens_as_one(tmp_path, kind, monkeypatch):
    texts = [f"document {n} has some words — ü" for n in range(60)]
    if kind == "jsonl":
        path = write_jsonl(tmp_path / "a.jsonl", texts)
    else:
        path = str(tmp_path / "a.txt")
        Path(path).write_text(" ".join(texts), encoding="utf-8")
        chunks = cache.plan_chunks
        monkeypatch.setattr(cache, "plan_chunks", lambda path, kind, size: chunks(path, kind, size, whole_text=500))
    one = open_store(path, BYTES, dataclasses.replace(PARALLEL, num_workers=1))
    monkeypatch.setenv("JTRAIN_CACHE_DIR", str(tmp_path / "other"))
    reports = []
    several = open_store(path, BYTES, PARALLEL, progress=lambda done, total: reports.append((done, total)))
    assert documents(several) == documents(one)
    expected = texts if kind == "jsonl" else [" ".join(texts)]
    assert [bytes(document[:-1]).decode() for document in documents(one)] == expected
    size = os.stat(path).st_size
    assert reports[-1] == (size, size)
    assert len(reports) > 3


def test_a_bad_record_names_file_record_and_line_however_the_file_is_cut(tmp_path):
    lines = [json.dumps({"text": "x" * 50}) for _ in range(40)]
    lines[17], lines[30] = "{", "[]"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    for options in (OPTIONS, dataclasses.replace(OPTIONS, chunk_bytes=200), PARALLEL):
        with pytest.raises(DataError, match=r"a\.jsonl: line 18 is not JSON"):
            open_store(str(tmp_path / "a.jsonl"), BYTES, options)
        assert entries() == []


def test_records_are_counted_by_file(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["a", "b", "c"])
    (tmp_path / "b.jsonl").write_text('{"text": "d"}\n{\n')
    with pytest.raises(DataError, match=r"b\.jsonl: line 2"):
        open_store(str(tmp_path), BYTES, OPTIONS)


def test_bad_records_are_skipped_up_to_the_limit_and_listed(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{\n{"text": "b"}\n{"body": "secret"}\n')
    store = open_store(str(tmp_path / "a.jsonl"), BYTES, SKIP)
    assert documents(store) == [[97, 256], [98, 256]]
    listed = [json.loads(line) for line in (store.path / "quarantine.jsonl").read_text().splitlines()]
    assert [(Path(entry["file"]).name, entry["index"]) for entry in listed] == [("a.jsonl", 2), ("a.jsonl", 4)]
    assert "fields are: body" in listed[1]["reason"]
    assert str(store.path / "quarantine.jsonl") in caplog.text


def test_one_bad_record_more_ends_the_run(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + "{\n" * 3)
    with pytest.raises(DataError, match=r"more than 2 bad records .* line 2"):
        open_store(str(tmp_path / "a.jsonl"), BYTES, SKIP)


def test_a_cache_made_with_skip_does_not_hide_bad_records_from_a_run_that_fails_on_them(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{\n')
    open_store(str(tmp_path / "a.jsonl"), BYTES, SKIP)
    with pytest.raises(DataError, match="line 2 is not JSON"):
        open_store(str(tmp_path / "a.jsonl"), BYTES, OPTIONS)


def test_a_bad_record_is_named_where_its_file_lies_now(tmp_path):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text('{"text": "moved"}\n{\n')
    open_store(str(tmp_path / "old"), BYTES, SKIP)
    store = open_store(str(tmp_path / "new"), BYTES, SKIP)
    (listed,) = read_quarantine(store.path)
    assert listed["file"] == str(tmp_path / "new" / "a.jsonl")
    with pytest.raises(DataError, match=r"old/a\.jsonl: line 2"):
        open_store(str(tmp_path / "old"), BYTES, OPTIONS)


def test_a_text_file_that_is_not_utf_8_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8: byte 0xe9 at 3"):
        open_store(str(tmp_path / "a.txt"), BYTES, OPTIONS)


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n'])
def test_data_without_text_is_a_data_error(tmp_path, content):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match="holds no text"):
        open_store(str(tmp_path / "a.jsonl"), BYTES, OPTIONS)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_a_data_error(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["a"])
    os.chmod(path, 0)
    with pytest.raises(DataError, match="can't be read: Permission denied"):
        open_store(path, BYTES, OPTIONS)


@pytest.mark.parametrize("name", ["append_eos", "prepend_bos"])
def test_a_token_that_the_tokenizer_does_not_have_is_refused(tmp_path, name):
    class Plain(ByteTokenizer):
        eos_id = bos_id = None

    recipe = Recipe(**{"append_eos": False, "prepend_bos": False, name: True})
    with pytest.raises(DataError, match=f"data.{name} is true"):
        open_store(write_jsonl(tmp_path / "a.jsonl", ["a"]), Plain(), CacheOptions(recipe=recipe))


def test_an_interrupted_build_leaves_nothing_that_could_be_taken_for_a_cache(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", ["a"] * 100)

    def interrupted(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_store(path, BYTES, PARALLEL, progress=interrupted)
    assert entries() == []
    assert len(documents(open_store(path, BYTES, PARALLEL))) == 100


def test_what_a_killed_build_left_is_swept_by_the_next(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["a"])
    store = open_store(path, BYTES, OPTIONS)
    shutil.rmtree(store.path)
    left = cache.temporary(store.path)
    left.mkdir()
    (left / "000000.tokens").write_bytes(b"xx")
    open_store(path, BYTES, OPTIONS)
    assert entries() == [store.path.name]


@pytest.mark.parametrize("name", ["tokens.bin", "edges.npy", "meta.json"])
def test_a_cache_that_was_cut_short_is_made_again(tmp_path, name):
    path = write_jsonl(tmp_path / "a.jsonl", ["hello", "you"])
    store = open_store(path, BYTES, OPTIONS)
    before = documents(store)
    os.truncate(store.path / name, (store.path / name).stat().st_size // 2)
    assert documents(open_store(path, BYTES, OPTIONS)) == before


def test_a_second_process_waits_for_the_first_and_uses_its_work(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", ["hello"])
    made = open_store(path, BYTES, OPTIONS)
    kept = tmp_path / "kept"
    shutil.copytree(made.path, kept)
    shutil.rmtree(made.path)
    monkeypatch.setattr(cache, "tokenise_chunk", None)
    found = []
    with open(f"{made.path}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=lambda: found.append(open_store(path, BYTES, OPTIONS)))
        second.start()
        second.join(0.2)
        assert second.is_alive()
        kept.rename(made.path)
    second.join(10)
    assert documents(found[0]) == [[*b"hello", 256]]


def test_two_processes_at_once_make_one_cache(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [f"document {n}" for n in range(500)])
    code = (
        "import sys; from jtrain.data.cache import *; from jtrain.data.tokenizers import ByteTokenizer;"
        "print(open_store(sys.argv[1], ByteTokenizer(), CacheOptions()).fingerprint); assert 'jax' not in sys.modules"
    )
    root = str(Path(cache.__file__).parents[2])
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, path], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root}
        )
        for _ in range(2)
    ]
    answers = {process.communicate()[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert [name.encode() for name in entries()] == [answer.strip() for answer in answers]


def test_a_cache_that_cannot_be_written_names_the_folder_and_the_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    options = CacheOptions(folder=str(tmp_path / "file" / "inside"))
    with pytest.raises(StorageError, match=r"data\.cache_dir") as error:
        open_store(write_jsonl(tmp_path / "a.jsonl", ["a"]), BYTES, options)
    assert str(tmp_path / "file") in error.value.message


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_a_storage_error(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", ["a" * 100_000])
    real = cache.tokenise_chunk

    def onto_a_full_disk(chunk, recipe, tokenizer, out):
        os.symlink("/dev/full", f"{out}.tokens")
        return real(chunk, recipe, tokenizer, out)

    monkeypatch.setattr(cache, "tokenise_chunk", onto_a_full_disk)
    with pytest.raises(StorageError, match="No space left"):
        open_store(path, BYTES, OPTIONS)
    assert entries() == []


def test_a_cache_folder_is_local(monkeypatch):
    with pytest.raises(ConfigError, match="memory-mapped"):
        cache_folder("gs://bucket/cache")
    monkeypatch.delenv("JTRAIN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/jtrain/data")
    assert cache_folder("here") == Path("here")


def test_plans_are_kept_beside_the_tokens(tmp_path, monkeypatch):
    store = open_store(write_jsonl(tmp_path / "a.jsonl", [f"{n}" * n for n in range(1, 30)]), BYTES, OPTIONS)
    wanted = plan_rows(store.edges, 32, "best_fit")
    open_plan(store, store.edges, 32, "best_fit")
    monkeypatch.setattr(cache, "plan_rows", None)
    found = open_plan(store, store.edges, 32, "best_fit")
    for name in ("starts", "lengths", "first"):
        assert np.array_equal(getattr(found, name), getattr(wanted, name))


def test_plans_of_other_lengths_packings_and_stretches_are_others(tmp_path):
    store = open_store(write_jsonl(tmp_path / "a.jsonl", ["abc"] * 9), BYTES, OPTIONS)
    plans = [
        open_plan(store, store.edges, 8, "best_fit"),
        open_plan(store, store.edges, 12, "best_fit"),
        open_plan(store, store.edges, 8, "none"),
        open_plan(store, store.edges[:5], 8, "best_fit"),
    ]
    assert [plan.rows for plan in plans] == [5, 3, 9, 2]


def test_a_plan_that_was_cut_short_is_made_again(tmp_path):
    store = open_store(write_jsonl(tmp_path / "a.jsonl", [f"{n}" * n for n in range(1, 30)]), BYTES, OPTIONS)
    wanted = open_plan(store, store.edges, 32, "best_fit")
    (part,) = store.path.glob("plan-*/starts.npy")
    os.truncate(part, part.stat().st_size // 2)
    assert np.array_equal(open_plan(store, store.edges, 32, "best_fit").starts, wanted.starts)
    assert np.array_equal(np.load(part), wanted.starts)
