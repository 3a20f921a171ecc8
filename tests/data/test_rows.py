import numpy as np
import pytest

from jtrain.data.packing import plan_rows
from jtrain.data.rows import IGNORE, EvalRows, PackedRows, TrainRows
from jtrain.data.store import TokenStore
from jtrain.errors import ConfigError, DataError


def packed(documents, max_length, packing="best_fit", **options):
    store = TokenStore.from_documents(documents)
    return PackedRows(store, plan_rows(store.edges, max_length, packing), **options)


def numbered(rows, *, first=0, max_length=4):
    """A source whose row r holds nothing but the token first + r."""
    return packed([[first + row] * max_length for row in range(rows)], max_length)


def test_a_row_by_hand():
    rows = packed([[11, 12, 13], [21, 22]], 7, token_bytes=np.arange(30), pad_id=9).rows(np.asarray([0]))
    assert rows["input_ids"].tolist() == [[11, 12, 13, 21, 22, 9, 9]]
    assert rows["labels"].tolist() == [[IGNORE, 12, 13, IGNORE, 22, IGNORE, IGNORE]]
    assert rows["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 0, 0]]
    assert rows["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0]]
    assert rows["bytes"].tolist() == [12 + 13 + 22]
    assert {values.dtype for values in rows.values()} == {np.dtype(np.int32)}


def test_bytes_are_0_where_the_tokenizer_cannot_tell():
    assert packed([[1, 2, 3]], 4).rows(np.asarray([0]))["bytes"].tolist() == [0]


@pytest.mark.parametrize("packing", ["best_fit", "concat", "none"])
def test_rows_equal_a_slow_assembly_of_the_plan(packing):
    random = np.random.default_rng(0)
    documents = [random.integers(0, 500, size).tolist() for size in random.integers(1, 60, 80)]
    source = packed(documents, 32, packing, token_bytes=np.arange(500), pad_id=499)
    stream = np.concatenate(documents)
    wanted = {"input_ids": [], "labels": [], "segment_ids": [], "position_ids": [], "bytes": []}
    order = random.permutation(len(source))
    for row in order:
        ids, labels, segments, positions = [], [], [], []
        pieces = range(source.plan.first[row], source.plan.first[row + 1])
        for segment, piece in enumerate(pieces, 1):
            start, size = source.plan.starts[piece], source.plan.lengths[piece]
            tokens = stream[start : start + size].tolist()
            ids += tokens
            labels += [IGNORE, *tokens[1:]]
            segments += [segment] * size
            positions += range(size)
        missing = 32 - len(ids)
        wanted["input_ids"].append(ids + [499] * missing)
        wanted["labels"].append(labels + [IGNORE] * missing)
        wanted["segment_ids"].append(segments + [0] * missing)
        wanted["position_ids"].append(positions + [0] * missing)
        wanted["bytes"].append(sum(token for token in labels if token != IGNORE))
    found = source.rows(order)
    for name, values in wanted.items():
        assert found[name].tolist() == values, name


def test_no_rows_are_a_batch_of_no_rows():
    assert packed([[1, 2]], 4).rows(np.zeros(0, np.int64))["input_ids"].shape == (0, 4)


def test_a_row_is_the_same_alone_and_among_others():
    stream = TrainRows([numbered(7), numbered(5, first=50)], seed=3)
    many = stream.rows(np.arange(30))
    for n in (0, 11, 12, 29):
        assert all(np.array_equal(values, many[name][n]) for name, values in stream[n].items())


def test_an_epoch_is_one_pass_over_all_sources_in_an_order_of_its_own():
    stream = TrainRows([numbered(7), numbered(5, first=50)], seed=3)
    assert len(stream) == 12
    first, second = stream.rows(np.arange(24))["input_ids"][:, 0].reshape(2, 12).tolist()
    everything = [*range(7), *range(50, 55)]
    assert sorted(first) == sorted(second) == everything
    assert first != second
    assert everything not in (first, second)


def test_another_seed_is_another_order():
    orders = [TrainRows([numbered(12)], seed=seed).rows(np.arange(12))["input_ids"][:, 0].tolist() for seed in (0, 1)]
    assert orders[0] != orders[1]


def test_without_shuffling_every_epoch_is_in_order():
    stream = TrainRows([numbered(3), numbered(2, first=10)], seed=0, shuffle=False)
    assert stream.rows(np.arange(7))["input_ids"][:, 0].tolist() == [0, 1, 2, 10, 11, 0, 1]


def test_a_weighted_source_repeats_in_epochs_of_its_own():
    stream = TrainRows([numbered(40), numbered(4, first=100)], seed=1, weights=(1, 1))
    source, row = stream.row_ids(np.arange(80))
    assert (source == 0).sum() == 40
    assert sorted(row[source == 0]) == list(range(40))
    small = row[source == 1].reshape(10, 4)
    assert all(sorted(epoch) == [0, 1, 2, 3] for epoch in small.tolist())
    assert len({tuple(epoch) for epoch in small.tolist()}) > 1


def test_weighted_sources_of_one_size_have_orders_of_their_own():
    stream = TrainRows([numbered(12), numbered(12, first=100)], seed=1, weights=(1, 1))
    source, row = stream.row_ids(np.arange(24))
    assert row[source == 0].tolist() != row[source == 1].tolist()


def test_row_ids_name_the_row_that_is_read():
    stream = TrainRows([numbered(9), numbered(6, first=100)], seed=5, weights=(2, 1))
    source, row = stream.row_ids(np.arange(50))
    assert np.array_equal(stream.rows(np.arange(50))["input_ids"][:, 0], source * 100 + row)


def test_evaluation_rows_past_the_end_hold_no_target():
    rows = EvalRows([numbered(3), numbered(2, first=10)])
    assert len(rows) == 5
    batch = rows.rows(np.arange(4, 8))
    assert batch["input_ids"][0, 0] == 11
    assert (batch["labels"][0] != IGNORE).sum() == 3
    assert (batch["labels"][1:] == IGNORE).all()
    assert not batch["segment_ids"][1:].any()
    assert not batch["bytes"][1:].any()


def test_the_fingerprint_follows_the_data_and_the_packing_but_not_the_seed():
    documents = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    base = TrainRows([packed(documents, 4)], seed=0).fingerprint
    assert TrainRows([packed(documents, 4)], seed=9).fingerprint == base
    others = [
        TrainRows([packed([[1, 2, 3], [4, 5], [6, 7, 8, 8]], 4)], seed=0),
        TrainRows([packed(documents, 5)], seed=0),
        TrainRows([packed(documents, 4, "concat")], seed=0),
        TrainRows([packed(documents, 4)], seed=0, shuffle=False),
        TrainRows([packed(documents, 4)], seed=0, weights=(1.0,)),
    ]
    assert len({base, *(other.fingerprint for other in others)}) == 6


def test_no_rows_at_all_or_nothing_to_predict_is_a_data_error():
    empty = packed([], 4)
    for rows in (lambda source: TrainRows([source], seed=0), lambda source: EvalRows([source])):
        with pytest.raises(DataError, match="nothing to predict"):
            rows(packed([[1], [2]], 4))
    with pytest.raises(DataError, match="no rows"):
        TrainRows([empty], seed=0)
    with pytest.raises(DataError, match="no rows"):
        EvalRows([empty])


def test_a_weight_too_many_is_a_config_error():
    with pytest.raises(ConfigError, match="2 numbers for 1 sources"):
        TrainRows([numbered(2)], seed=0, weights=(1, 2))
