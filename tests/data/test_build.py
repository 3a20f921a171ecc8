import json

import numpy as np
import pytest

from jtrain.config.schema import Config, DataConfig
from jtrain.data.build import build_data, cache_options
from jtrain.data.cache import CacheOptions
from jtrain.data.rows import IGNORE
from jtrain.data.tokenise import Recipe
from jtrain.data.tokenizers import ByteTokenizer
from jtrain.errors import ConfigError, DataError

BYTES = ByteTokenizer()


def build(*train, max_length=16, **data):
    return build_data(Config(max_length=max_length, data=DataConfig(train=tuple(map(str, train)), **data)), BYTES)


def jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def spans(rows):
    """Token places that a stream's rows cover, by source."""
    found = []
    for source in rows.sources:
        places = zip(source.plan.starts.tolist(), source.plan.lengths.tolist(), strict=True)
        found.append({place for start, size in places for place in range(start, start + size)})
    return found


def test_a_text_is_divided_into_training_and_its_held_out_end(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 900 + "y" * 99)
    train, held_out = build(tmp_path / "a.txt", eval=0.1)
    assert spans(train) == [set(range(900))]
    assert spans(held_out) == [set(range(900, 1000))]
    batch = held_out.rows(np.arange(len(held_out)))
    assert set(batch["input_ids"][batch["segment_ids"] > 0].tolist()) == {ord("y"), BYTES.eos_id}
    # 100 tokens in rows of 16: 7 rows, each without its first; the end token stands for no byte.
    assert (batch["labels"] != IGNORE).sum() == 93
    assert batch["bytes"].sum() == 92


@pytest.mark.parametrize("packing", ["best_fit", "concat", "none"])
def test_packing_does_not_change_what_is_scored(tmp_path, packing):
    held = jsonl(tmp_path / "b.jsonl", ["b" * n for n in (3, 9, 12, 5, 14, 7)])
    _, rows = build(jsonl(tmp_path / "a.jsonl", ["a" * 40] * 3), eval=(str(held),), packing=packing)
    batch = rows.rows(np.arange(len(rows)))
    assert ((batch["labels"] != IGNORE).sum(), batch["bytes"].sum()) == (50, 44)  # of each all but the first byte; ends


def test_every_source_holds_out_its_own_end(tmp_path):
    first, second = jsonl(tmp_path / "a.jsonl", ["a" * 9] * 20), jsonl(tmp_path / "b.jsonl", ["b" * 9] * 10)
    train, held_out = build(first, second, eval=0.1)
    assert [len(places) for places in spans(held_out)] == [20, 10]
    for kept, held in zip(spans(train), spans(held_out), strict=True):
        assert not kept & held


def test_evaluation_files_are_used_whole(tmp_path):
    train, held_out = build(
        jsonl(tmp_path / "a.jsonl", ["a" * 30]), eval=(str(jsonl(tmp_path / "b.jsonl", ["b" * 20])),), packing="none"
    )
    assert [len(places) for places in spans(train) + spans(held_out)] == [31, 21]


def test_without_evaluation_there_are_no_evaluation_rows(tmp_path):
    assert build(jsonl(tmp_path / "a.jsonl", ["abc"]))[1] is None


def test_weights_and_order_come_from_the_config(tmp_path):
    first, second = jsonl(tmp_path / "a.jsonl", ["a" * 15] * 8), jsonl(tmp_path / "b.jsonl", ["b" * 15] * 8)
    train, _ = build(first, second, weights=(3.0, 1.0), shuffle=False)
    tokens = train.rows(np.arange(16))["input_ids"][:, 0].tolist()
    assert tokens.count(ord("a")) == 12


def test_how_sources_are_tokenised_comes_from_the_config():
    section = {"cache_dir": "/c", "num_workers": 3, "on_bad_record": "skip", "max_bad_records": 5}
    texts = {"text_field": "body", "append_eos": False, "prepend_bos": True}
    found = cache_options(Config(data=DataConfig(**section, **texts)))
    assert found == CacheOptions(
        folder="/c", num_workers=3, on_bad_record="skip", max_bad_records=5, recipe=Recipe("body", False, True)
    )


def test_the_seed_chooses_the_order(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [chr(97 + n) * 15 for n in range(20)])
    orders = []
    for seed in (0, 0, 1):
        config = Config(seed=seed, max_length=16, data=DataConfig(train=(str(path),)))
        orders.append(build_data(config, BYTES)[0].rows(np.arange(20))["input_ids"][:, 0].tolist())
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_a_fraction_that_leaves_nothing_is_a_config_error(tmp_path, fraction):
    with pytest.raises(ConfigError, match=r"data\.eval"):
        build(jsonl(tmp_path / "a.jsonl", ["abc"]), eval=fraction)


def test_no_training_data_is_a_config_error():
    with pytest.raises(ConfigError, match=r"data\.train is empty"):
        build()


@pytest.mark.parametrize("field", ["train", "eval"])
def test_missing_data_names_its_field(tmp_path, field):
    there, gone = str(jsonl(tmp_path / "a.jsonl", ["abc"])), str(tmp_path / "gone.jsonl")
    train, evaluation = (gone, there) if field == "train" else (there, gone)
    with pytest.raises(DataError, match=rf"data\.{field}: .*gone\.jsonl does not exist"):
        build(train, eval=(evaluation,))


def test_a_record_in_memory_with_half_of_a_surrogate_pair_is_named_or_left_out():
    records = [{"text": "abc"}, {"text": "a\ud800"}]
    with pytest.raises(DataError, match=r"train_dataset\[1\] holds half of a surrogate pair"):
        build_data(Config(max_length=4), BYTES, train=records)
    rows, _ = build_data(Config(max_length=4, data=DataConfig(on_bad_record="skip")), BYTES, train=records)
    assert spans(rows) == [{0, 1, 2, 3}]  # "abc" and its end token
