"""A1, A2, K7: damaged data is named or left out, whatever its form; changed data is refused; a killed worker is told.

A run is a small language model, or only the reading of its data, in this process; the exit code is that of the error.
"""

import gzip
import hashlib
import json
import os
import signal
import threading
import time

import numpy as np
import psutil
import pytest

from jtrain.config.load import load_config
from jtrain.data import cache
from jtrain.data.build import build_data
from jtrain.data.cache import CacheOptions, open_store
from jtrain.data.quarantine import read_quarantine
from jtrain.data.tokenizers import load_tokenizer
from jtrain.errors import DataError, Exit

slow = pytest.mark.faults


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    """Token caches of this test alone."""
    monkeypatch.setenv("JTRAIN_CACHE_DIR", str(tmp_path.with_name(f"{tmp_path.name}-cache")))


BYTES = load_tokenizer("bytes")
TEXTS = [f"record {number} has some words" for number in range(40)]
RECORDS = {
    "pretrain": lambda text: {"text": text},
    "sft-texts": lambda text: {"text": text},
    "sft-prompts": lambda text: {"prompt": text, "completion": f"{text}!"},
    "sft-chat": lambda text: {
        "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"{text}!"}]
    },
    "dpo": lambda text: {"prompt": text, "chosen": f"{text}!", "rejected": f"{text}?"},
    "reward": lambda text: {"prompt": text, "chosen": f"{text}!", "rejected": f"{text}?"},
}
"""Every task's form of data -> a record of it."""
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


def lines_of(records):
    return [json.dumps(record).encode() for record in records]


def write(path, lines):
    """A file of these records (JSON, as bytes), of the kind that its name says."""
    name = path.name
    if name.endswith(".array_record"):
        from array_record.python.array_record_module import ArrayRecordWriter

        writer = ArrayRecordWriter(str(path), "group_size:1")
        for line in lines:
            writer.write(line)
        writer.close()
    elif name.endswith(".parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.Table.from_pylist([json.loads(line) for line in lines])
        pq.write_table(table, path, row_group_size=10, write_page_checksum=True, compression="none")
    else:
        content = b"".join(line + b"\n" for line in lines)
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


def data(form, path, **changes):
    task = form.partition("-")[0]
    fields = {"task": task, "max_length": 128, "model": {"name": "llama"}, "data.train": str(path)} | changes
    if form == "sft-chat":
        fields["data.chat_template"] = TEMPLATE
        fields["sft.assistant_only_loss"] = False
    fields.pop("model")
    return build_data(load_config(fields, env={}), BYTES, progress=False)[0]


def refused(form, path, **changes):
    with pytest.raises(DataError) as caught:
        data(form, path, **changes)
    assert caught.value.exit_code == Exit.DATA == 65 and caught.value.remedy
    return caught.value.message


BAD = {
    "half-a-line": lambda line: line[: len(line) // 2].strip(),
    "wrong-type": lambda line: b"[1, 2]",
    "null": lambda line: b"null",
    "invalid-UTF-8": lambda line: line.replace(b"words", b"w\xffrds"),
}
BY_DEFAULT = [("pretrain", "invalid-UTF-8"), ("sft-chat", "half-a-line"), ("dpo", "wrong-type")]


@pytest.mark.parametrize(
    ("form", "bad"),
    [
        pytest.param(form, bad, id=f"A1-{form}-{bad}", marks=() if (form, bad) in BY_DEFAULT else slow)
        for form in RECORDS
        for bad in BAD
    ],
)
def test_a1_a_bad_record_is_named_by_file_and_line_or_left_out_and_listed(form, bad, tmp_path):
    lines = lines_of(RECORDS[form](text) for text in TEXTS)
    lines[7] = BAD[bad](lines[7])
    path = write(tmp_path / "a.jsonl", lines)
    assert f"{path}: line 8 " in refused(form, path)
    rows = data(form, path, **{"data.on_bad_record": "skip"})
    (store,) = [source.store for source in rows.sources]
    assert store.bad_records == 1
    (entry,) = read_quarantine(store.path)
    assert (entry["file"], entry["index"]) == (str(path), 7) and entry["reason"] and entry["remedy"]
    assert entry["digest"] == hashlib.blake2b(lines[7], digest_size=16).hexdigest()
    good = write(tmp_path / "good.jsonl", lines[:7] + lines[8:])
    (same,) = [source.store for source in data(form, good).sources]
    np.testing.assert_array_equal(store.tokens, same.tokens)


@slow
@pytest.mark.parametrize("form", RECORDS)
def test_a1_more_bad_records_than_allowed_end_the_run_and_the_first_is_named(form, tmp_path):
    lines = lines_of(RECORDS[form](text) for text in TEXTS)
    lines[3] = lines[9] = lines[30] = b"{"
    path = write(tmp_path / "a.jsonl", lines)
    limit = {"data.on_bad_record": "skip", "data.max_bad_records": 2}
    assert f"more than 2 bad records (data.max_bad_records); the first: {path}: line 4 " in refused(form, path, **limit)
    assert len(data(form, path, **limit | {"data.max_bad_records": 3}))


@slow
@pytest.mark.parametrize("form", ["pretrain", "sft-prompts"])
@pytest.mark.parametrize("name", ["a.array_record", "a.parquet", "a.jsonl.gz"])
def test_a1_a_truncated_shard_is_named_with_its_size_or_place_whatever_the_policy(form, name, tmp_path):
    write(tmp_path / "b.jsonl", lines_of(RECORDS[form](text) for text in TEXTS))
    path = write(tmp_path / name, lines_of(RECORDS[form](text * 40) for text in TEXTS))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    for policy in ("fail", "skip"):  # how much is gone is not known: never left out
        message = refused(form, tmp_path, **{"data.on_bad_record": policy})
        assert str(path) in message
        place = f"after line {gunzipped(path)}" if name.endswith(".gz") else f"({len(whole) // 2:,} bytes)"
        assert place in message


def gunzipped(path):
    """Whole lines that a cut file still gives."""
    import zlib

    return zlib.decompressobj(31).decompress(path.read_bytes()).count(b"\n")


@pytest.mark.parametrize("form", ["pretrain", "sft-prompts"])
def test_a1_a_jsonl_shard_that_was_cut_ends_with_a_bad_record(form, tmp_path):
    path = write(tmp_path / "a.jsonl", lines_of(RECORDS[form](text) for text in TEXTS))
    path.write_bytes(path.read_bytes()[:-10])
    assert f"{path}: line 40 is not JSON" in refused(form, path)


@pytest.mark.parametrize("name", ["b.jsonl", "b.txt"])
def test_a1_an_empty_shard_among_others_holds_nothing(name, tmp_path):
    lines = lines_of(RECORDS["pretrain"](text) for text in TEXTS)
    write(tmp_path / "a.jsonl", lines)
    alone = data("pretrain", tmp_path / "a.jsonl")
    (tmp_path / name).write_bytes(b"")
    np.testing.assert_array_equal(data("pretrain", tmp_path).sources[0].store.tokens, alone.sources[0].store.tokens)


@pytest.mark.parametrize("name", ["b.array_record", "b.parquet"])
def test_a1_a_zero_byte_shard_of_a_kind_that_is_never_empty_is_damaged_and_named(name, tmp_path):
    write(tmp_path / "a.jsonl", lines_of(RECORDS["pretrain"](text) for text in TEXTS))
    (tmp_path / name).write_bytes(b"")
    assert f"{tmp_path / name} (0 bytes)" in refused("pretrain", tmp_path)


@slow
@pytest.mark.parametrize("name", ["b.array_record", "b.parquet"])
def test_a1_a_shard_without_records_is_none(name, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    write(tmp_path / "a.jsonl", lines_of(RECORDS["pretrain"](text) for text in TEXTS))
    if name.endswith("parquet"):
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / name)
    else:
        write(tmp_path / name, [])
    assert data("pretrain", tmp_path).sources[0].store.tokens.size


@slow
@pytest.mark.parametrize("pattern", ["gone.jsonl", "gone-*.jsonl", "gone/"])
def test_a1_a_missing_shard_is_named_with_its_field(pattern, tmp_path):
    present = str(write(tmp_path / "a.jsonl", lines_of([{"text": "a b c"}])))
    message = refused("pretrain", "", **{"data.train": [present, str(tmp_path / pattern)]})
    assert message.startswith("data.train: ") and pattern.rstrip("/") in message


@slow
@pytest.mark.parametrize("form", RECORDS)
def test_a1_a_record_of_ten_megabytes_is_read(form, tmp_path):
    size = 10 * 2**20 // (2 if form == "sft-chat" else 1)  # whose text stands there twice
    text = "some words of a long record " * (size // 28)
    path = write(tmp_path / "a.jsonl", lines_of(RECORDS[form](one) for one in ("short", text, "last")))
    (store,) = [source.store for source in data(form, path, **{"max_length": 4096}).sources]
    assert np.diff(store.edges).max() > 10 * 2**20 - 100 and store.bad_records == 0


@pytest.mark.parametrize("form", ["pretrain", "sft-prompts"])
def test_a1_a_flipped_bit_in_array_record_is_found_at_its_record(form, tmp_path):
    lines = lines_of(RECORDS[form](os.urandom(40).hex()) for _ in TEXTS)
    path = write(tmp_path / "a.array_record", lines)
    content = bytearray(path.read_bytes())
    content[200] ^= 4  # in the chunk of the first record, whose header takes 64 bytes behind the file's 64
    path.write_bytes(content)
    assert f"{path}: record 1 can't be read" in refused(form, path)
    rows = data(form, path, **{"data.on_bad_record": "skip"})
    (entry,) = read_quarantine(rows.sources[0].store.path)
    assert entry["index"] == 0 and "hash mismatch" in entry["reason"]
    good = write(tmp_path / "good.array_record", lines[1:])
    np.testing.assert_array_equal(rows.sources[0].store.tokens, data(form, good).sources[0].store.tokens)


def test_a1_a_flipped_bit_in_a_parquet_page_with_a_checksum_is_found(tmp_path):
    path = write(tmp_path / "a.parquet", lines_of({"text": text} for text in TEXTS))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"record 25 has", b"record 24 has"))
    assert str(path) in refused("pretrain", path)


@slow
def test_a1_invalid_utf_8_in_a_parquet_record_costs_that_record_alone(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    prompts = pa.array([b"one", b"tw\xff", b"three"], pa.binary()).view(pa.string())
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": prompts, "completion": ["a", "b", "c"]}), path)
    assert f"{path}: record 2 holds text that is not UTF-8" in refused("sft-prompts", path)
    rows = data("sft-prompts", path, **{"data.on_bad_record": "skip"})
    assert len(rows.sources[0].store.edges) == 3


# -- runs -------------------------------------------------------------------------------------------------------------


def fit(path, run_dir, **changes):
    from jtrain.tasks import trainer_of

    fields = {
        "run_dir": str(run_dir),
        "max_steps": 2,
        "global_batch_size": 2,
        "max_length": 32,
        "accelerator": "cpu",
        "devices": 1,
        "model": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
        "data.train": str(path),
        "data.eval": None,
        "compile_cache": "",
        "checkpoint.save_steps": 0,
        "logging.trackers": [],
    }
    config = load_config(fields | changes, env={})
    trainer = trainer_of("pretrain")(config)
    trainer.fit()
    return trainer


@slow
def test_a1_a_run_lists_in_its_directory_what_it_left_out(tmp_path):
    lines = lines_of({"text": text} for text in TEXTS)
    lines[5] = b"{"
    path = write(tmp_path / "a.jsonl", lines)
    fit(path, tmp_path / "run", **{"data.on_bad_record": "skip"})
    (entry,) = read_quarantine(tmp_path / "run")
    assert (entry["file"], entry["index"], entry["digest"]) == (
        str(path), 5, hashlib.blake2b(b"{", digest_size=16).hexdigest()
    )  # fmt: skip
    assert entry["reason"].startswith("is not JSON")


@slow
def test_a2_data_that_changed_between_starts_is_refused_with_both_fingerprints(tmp_path):
    from jtrain.checkpoint import Checkpoints
    from jtrain.errors import ConfigError

    path = write(tmp_path / "a.jsonl", lines_of({"text": text} for text in TEXTS))
    first = fit(path, tmp_path / "run")
    kept = Checkpoints(tmp_path / "run", read_only=True).read_meta(2)["data"]
    assert kept == first.train_rows.fingerprint
    write(path, lines_of({"text": text} for text in [*TEXTS, "one more"]))
    with pytest.raises(ConfigError, match="fingerprint of the training data") as caught:
        fit(path, tmp_path / "run", max_steps=3)
    assert caught.value.exit_code == Exit.CONFIG == 64
    assert kept in caught.value.message and "init_from" in caught.value.remedy
    other = fit(path, tmp_path / "other", **{"checkpoint.init_from": str(tmp_path / "run")})  # what it names instead
    assert other.counters.step == 2
    write(path, lines_of({"text": text} for text in TEXTS))  # as it was: the same bytes are the same data
    assert fit(path, tmp_path / "run", max_steps=3).counters.step == 3


@slow
def test_k7_a_killed_tokenising_process_ends_with_65_and_the_next_start_has_the_same_order(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", lines_of({"text": f"{text} " * 400} for text in TEXTS * 5))
    options = CacheOptions(num_workers=2, chunk_bytes=20_000, parallel_bytes=0)
    monkeypatch.setenv("JTRAIN_CACHE_DIR", str(tmp_path / "whole"))
    whole = open_store(str(path), BYTES, options)
    monkeypatch.setenv("JTRAIN_CACHE_DIR", str(tmp_path.with_name(f"{tmp_path.name}-cache")))

    def kill():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for child in psutil.Process().children(recursive=True):
                try:
                    if "jtrain.data.worker" in child.cmdline():
                        child.send_signal(signal.SIGKILL)
                        return
                except psutil.Error:
                    continue
            time.sleep(0.002)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(DataError, match=r"a\.jsonl: the process that tokenised it ended with -9") as caught:
        open_store(str(path), BYTES, options)
    killer.join()
    assert caught.value.exit_code == 65 and "data.num_workers" in caught.value.remedy
    assert not [name for name in os.listdir(cache.cache_folder() / "tokens") if not name.endswith(".lock")]
    again = open_store(str(path), BYTES, options)
    np.testing.assert_array_equal(again.tokens, whole.tokens)
    np.testing.assert_array_equal(again.edges, whole.edges)
    assert not [child for child in psutil.Process().children() if "jtrain.data.worker" in child.cmdline()]
