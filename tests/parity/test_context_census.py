"""What a train step sends over `context`, and what it holds, against arithmetic from the config alone.

The least over `context`, per device and step, at c devices and N layers. Ring: a pass over keys and values sends those
of a device c-1 times; under full rematerialisation there are three (forward, its repetition, backward), and the last
one brings float32 gradients of keys and values round and home, c times. Segment ids go with each pass. Ulysses: an
exchange of queries, keys, values and result, in each of the three passes. Both: one all-reduce of the gradients of
this device's parameters.
"""

import pytest

from jtrain.models.config import DecoderConfig
from tests.parity.census import Needs, census, decoder_program

BOUND = 1.10
LENGTH, ROWS = 64, 4
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "remat": "full",
    "tie_word_embeddings": False,
}


def least(mesh: dict[str, int], shape: DecoderConfig, method: str) -> Needs:
    need = Needs(mesh)
    layers, d, c = shape.num_hidden_layers, shape.hidden_size, mesh["context"]
    heads = shape.head_size * (2 * shape.num_attention_heads + 2 * shape.kv_heads)
    stored = 4 * (layers * d * (heads + 3 * shape.intermediate_size) + 2 * shape.vocab_size * d) / mesh["tensor"]
    need.reduce("context", stored / mesh["fsdp"] + 4 * (2 * layers + 1) * d)
    tokens = ROWS * LENGTH / (c * mesh["data"] * mesh["fsdp"])
    keys_and_values = 4 * tokens * 2 * shape.kv_heads * shape.head_size / mesh["tensor"]
    if method == "ring":
        passes = 2 if shape.remat == "save_attention" else 3
        need.permute("context", keys_and_values, times=layers * (passes * (c - 1) + c))
        need.permute("context", 4 * tokens, times=layers * passes * (c - 1))
    else:
        everything = 4 * tokens * heads / mesh["tensor"]
        need.exchange("context", everything, times=3 * layers)
    return need


CASES = [
    pytest.param({"context": 4}, "ring", "full", marks=pytest.mark.grid),
    pytest.param({"context": 4}, "ulysses", "full", marks=pytest.mark.grid),
    ({"context": 4}, "ring", "save_attention"),  # the ring is not run again: two passes instead of three
    ({"fsdp": 2, "context": 2, "tensor": 2}, "ring", "full"),
    ({"fsdp": 2, "context": 2, "tensor": 2}, "ulysses", "full"),
]


@pytest.mark.parametrize(("mesh", "method", "remat"), CASES, ids=str)
def test_a_step_sends_no_more_than_a_tenth_above_the_least(mesh, method, remat):
    changes = SHAPE | {"remat": remat}
    program, shape = decoder_program(mesh, changes, length=LENGTH, rows=ROWS, context={"method": method})
    taken, need = census(program, length=LENGTH), least(dict(program.mesh.shape), shape, method)
    ratio = taken.sent("context") / need.sent("context")
    print(f"{taken.sent('context'):,} bytes, {ratio:.3f} of the least")
    assert ratio <= BOUND, f"{ratio:.3f} times the least, {need.sent('context'):,.0f} bytes\n{taken.table()}"
