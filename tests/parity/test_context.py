"""One answer however the tokens of a row are divided: packed rows, grouped heads, dropout, a mixture, float32."""

import numpy as np
import pytest

from tests.parity.runs import settings, train, write_corpus

STEPS = 3
EIGHT = {"devices": 8, "gradient_accumulation_steps": 1}

CASES = {
    "context8, ring": EIGHT | {"mesh": {"data": 1, "context": 8}},  # four heads: auto takes the ring
    "context2.tensor2.fsdp2, ring": EIGHT
    | {"mesh": {"data": 1, "fsdp": 2, "context": 2, "tensor": 2}, "context": {"method": "ring"}},
    "context2.tensor2.fsdp2, ulysses": EIGHT
    | {"mesh": {"data": 1, "fsdp": 2, "context": 2, "tensor": 2}, "context": {"method": "ulysses"}},
}
MORE = {
    "context8, contiguous": EIGHT | {"mesh": {"data": 1, "context": 8}, "context": {"layout": "contiguous"}},
    "context2.data4, accumulated": {"devices": 8, "mesh": {"data": 4, "context": 2}, "context": {"method": "ring"}},
    "context4.tensor2, one head a device": EIGHT | {"mesh": {"data": 1, "context": 4, "tensor": 2}},
    "context4, ulysses, repeated heads": {
        "devices": 4,
        "mesh": {"data": 1, "context": 4},
        "context": {"method": "ulysses"},
    },
    "context4, odd chunks": {"devices": 4, "mesh": {"data": 1, "context": 4}, "max_length": 24},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def reference(corpus, tmp_path_factory):
    """`max_length` -> the lines of one device, made once."""
    found = {}

    def lines(length):
        if length not in found:
            found[length] = run(corpus, tmp_path_factory.mktemp("reference"), {"max_length": length})
        return found[length]

    return lines


def run(corpus, folder, changes):
    config = settings(corpus, folder / "run", checkpoint={"save_steps": 0}, **changes)
    return train(config, stop_at=STEPS)[0].history.train


def check(lines, expected):
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(lines[0][name], expected[0][name], rtol=1e-6)
    np.testing.assert_allclose(lines[-1]["loss"], expected[-1]["loss"], rtol=1e-5)
    assert [line["tokens"] for line in lines] == [line["tokens"] for line in expected]
    assert lines[0]["mean_token_accuracy"] == pytest.approx(expected[0]["mean_token_accuracy"])


@pytest.mark.parametrize("name", CASES)
def test_a_row_on_several_devices_changes_nothing(name, corpus, reference, tmp_path):
    check(run(corpus, tmp_path, CASES[name]), reference(32))


@pytest.mark.grid
@pytest.mark.parametrize("name", MORE)
def test_further_divisions_change_nothing(name, corpus, reference, tmp_path):
    check(run(corpus, tmp_path, MORE[name]), reference(MORE[name].get("max_length", 32)))
