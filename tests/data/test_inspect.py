import json

from jtrain.data.inspect import describe
from jtrain.data.packing import plan_rows
from jtrain.data.rows import EvalRows, PackedRows, TrainRows
from jtrain.data.store import TokenStore
from jtrain.data.tokenizers import ByteTokenizer

BYTES = ByteTokenizer()


def source(*texts, max_length=12):
    store = TokenStore.from_documents([*ids, BYTES.eos_id] for ids in BYTES.encode_batch(texts))
    return PackedRows(store, plan_rows(store.edges, max_length, "best_fit"), token_bytes=BYTES.token_bytes())


def test_a_row_is_shown_as_text_with_its_loss_mask():
    found = describe(TrainRows([source("hello", "you")], seed=0), None, BYTES, rows=1)
    (row,) = found["examples"]
    assert row["segments"] == [
        [{"text": "h", "tokens": 1, "target": False}, {"text": "ello", "tokens": 5, "target": True}],
        [{"text": "y", "tokens": 1, "target": False}, {"text": "ou", "tokens": 3, "target": True}],
    ]
    assert (row["tokens"], row["targets"], row["bytes"]) == (10, 8, 6)
    assert json.loads(json.dumps(found)) == found


def test_sizes_are_those_of_each_split():
    evaluation = EvalRows([source("a" * 11), source("b" * 5)])
    found = describe(TrainRows([source("hello", "you", "x" * 20)], seed=0), evaluation, BYTES, rows=0)
    assert {name: found["train"][name] for name in ("rows", "tokens", "documents", "segments", "max_length")} == {
        "rows": 3,
        "tokens": 31,
        "documents": 3,
        "segments": 4,
        "max_length": 12,
    }
    assert found["train"]["fill"] == 31 / 36
    assert [entry["fill"] for entry in found["eval"]["sources"]] == [1.0, 0.5]
    assert found["eval"]["fill"] == 0.75
