import numpy as np
import pytest

from jtrain.data.arrays import ArrayRows
from jtrain.data.rows import IGNORE
from jtrain.errors import DataError

IMAGES = np.arange(10, dtype=np.float32).reshape(5, 2)
LABELS = np.arange(5, dtype=np.int32)


def test_arrays_and_a_list_of_dicts_give_the_same_rows():
    dicts = [{"image": image, "labels": label} for image, label in zip(IMAGES, LABELS, strict=True)]
    by_arrays, by_dicts = ArrayRows({"image": IMAGES, "labels": LABELS}, seed=1), ArrayRows(dicts, seed=1)
    for name, values in by_arrays.rows(np.arange(12)).items():
        assert np.array_equal(values, by_dicts.rows(np.arange(12))[name])
    assert by_arrays.fingerprint == by_dicts.fingerprint


def test_every_pass_has_an_order_of_its_own():
    labels = ArrayRows({"labels": LABELS}, seed=0).rows(np.arange(10))["labels"].reshape(2, 5)
    assert sorted(labels[0]) == sorted(labels[1]) == list(range(5))
    assert labels[0].tolist() != labels[1].tolist()


def test_filling_rows_of_an_evaluation_weigh_nothing():
    rows = ArrayRows({"image": IMAGES, "labels": LABELS}, once=True)
    batch = rows.rows(np.arange(4, 7))
    assert len(rows) == 5
    assert batch["row_weight"].tolist() == [1, 0, 0]
    assert batch["labels"].tolist() == [4, IGNORE, IGNORE]
    assert batch["row_weight"].dtype == np.float32


def test_the_caller_s_arrays_are_not_written_to():
    labels = LABELS.copy()
    ArrayRows({"labels": labels}, once=True).rows(np.arange(8))
    assert np.array_equal(labels, LABELS)


def test_weights_of_the_dataset_are_kept():
    rows = ArrayRows({"x": IMAGES, "row_weight": np.asarray([1, 2, 3, 4, 5], np.float32)}, once=True)
    assert rows.rows(np.arange(3, 7))["row_weight"].tolist() == [4, 5, 0, 0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"a": np.zeros(3), "b": np.zeros(4)}, "different lengths"),
        ([], "no examples"),
        ({}, "no examples"),
        ({"a": np.float32(3)}, "no examples"),
        ({"a": np.zeros(3), "s": np.asarray(["x"] * 3)}, "'s' holds <U1"),
        ({0: np.zeros(3)}, "0 holds float64"),
        ([1, 2], "an example is a int, not a dict"),
        ("text", "an example is a str, not a dict"),
    ],
)
def test_a_dataset_that_is_no_dataset_is_refused(data, message):
    with pytest.raises(DataError, match=message):
        ArrayRows(data)


def test_examples_of_different_shapes_are_named():
    with pytest.raises(DataError, match=r"\[0, 1\] differ"):
        ArrayRows([{"x": np.zeros(2)}, {"x": np.zeros(3)}], shuffle=False).rows(np.arange(2))
