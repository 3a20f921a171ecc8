"""The ledger of rows: equal for equal batches, however they are cut; gaps and repetitions are told."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jtrain.train.row_ledger import RowLedger, checksum, read_ledger
from tests.train.fits import examples, make

B, L = 8, 6


def batch(accumulation=1, devices=1, axis="rows", **changes):
    """Rows of a batch on so many devices, cut by rows or by tokens; where there are four, two have a copy."""
    generator = np.random.default_rng(0)
    arrays = {
        "input_ids": generator.integers(0, 99, (B, L)).astype(np.int32),
        "weight": generator.normal(size=B).astype(np.float32),
    } | changes
    copies = 2 if devices == 4 else 1
    mesh = Mesh(np.asarray(jax.devices()[:devices]).reshape(devices // copies, copies), ("cut", "copy"))
    specs = {"rows": PartitionSpec(None, "cut"), "tokens": PartitionSpec(None, None, "cut")}

    def put(array):
        spec = specs[axis] if array.ndim > 1 or axis == "rows" else PartitionSpec()
        shape = (accumulation, B // accumulation, *array.shape[1:])
        return jax.device_put(array.reshape(shape), NamedSharding(mesh, spec))

    return {name: put(array) for name, array in arrays.items()}


@pytest.mark.parametrize("cut", [{"accumulation": 2}, {"devices": 2}, {"devices": 4}, {"devices": 2, "axis": "tokens"}],
                         ids=["micro-batches", "rows", "copies", "tokens"])  # fmt: skip
def test_a_batch_has_the_same_checksum_however_it_is_cut(cut):
    assert checksum(batch(**cut)) == checksum(batch())


def test_rows_in_another_order_and_a_value_that_differs_in_one_bit_have_another_checksum():
    ids = np.asarray(batch()["input_ids"])[0]
    swapped, flipped = ids[[1, 0, *range(2, B)]], ids.copy()
    flipped[3, 2] ^= 1
    assert len({checksum(batch(input_ids=array)) for array in (ids, swapped, flipped)}) == 3


def test_what_two_starts_of_a_run_have_read_is_what_one_has(tmp_path):
    def fit(name, *parts):
        folder = tmp_path / name
        folder.mkdir()
        for max_steps in parts:
            trainer = make(folder / "run", max_steps=max_steps, checkpoint={"save_steps": 2}, data={"shuffle": True},
                           eval={"eval_steps": 2}, held_out=examples(11, 1))  # fmt: skip
            RowLedger(folder).attach(trainer)
            trainer.fit()
        reads, wrong = read_ledger(folder)
        assert not wrong
        return [read[:3] for read in reads]

    whole = fit("whole", 7)
    assert fit("twice", 4, 7) == whole
    assert [step for _, _, step in whole] == list(range(1, 8))
    assert len({number for _, number, _ in whole}) == 7  # each batch of this stream is another


def lines(path, *parts):
    path.write_text("".join(json.dumps(part | {"time": 1.0}) + "\n" for part in parts))


def read(number, checksum=5):
    return {"kind": "read", "batch": number, "checksum": f"{checksum:016x}"}


def begin(number):
    return {"kind": "start", "batch": number}


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ((begin(0), read(0), read(2)), "batch 2 was read where 1 is due"),
        ((begin(0), read(0), read(0)), "batch 0 was read where 1 is due"),
        ((begin(0), read(0), begin(3), read(3)), "a start went on at batch 3, and 1 was never read"),
    ],
    ids=["gap", "repetition", "gap between starts"],
)
def test_a_gap_and_a_repetition_are_told(parts, says, tmp_path):
    lines(tmp_path / "rows-0.jsonl", *parts)
    assert says in read_ledger(tmp_path)[1][0]


def test_the_last_reading_counts_and_processes_add_up(tmp_path):
    lines(tmp_path / "rows-0.jsonl", begin(0), read(0, 1), read(1, 9), begin(1), read(1, 2))
    lines(tmp_path / "rows-1.jsonl", begin(0), read(0, 2**64 - 1), read(1, 7))
    reads, wrong = read_ledger(tmp_path)
    assert not wrong and [one.checksum for one in reads] == [0, 9]
    lines(tmp_path / "rows-1.jsonl", begin(0), read(0, 1))
    assert "rows-1: batches 1 are not those of rows-0" in read_ledger(tmp_path)[1][0]
