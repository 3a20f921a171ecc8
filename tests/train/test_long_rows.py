"""Rows of a million tokens: what a step holds follows from the tokens of a device alone, and no step is run.

The arithmetic, in numbers (of the compute type) a token of a device, with full rematerialisation. The peak stands in
the backward pass of a layer, when its forward has been computed again and the feed-forward's backward begins:

    N D        inputs of the layers, kept
    12 D       inputs and outputs of both norms, residual streams, their gradients
    6 F        gate, up and their product, with gradients
    4 H Dh     queries and attention's result, in order of tokens and in blocks
    8 K Dh     keys and values, in order of tokens, in blocks, on the way, and repeated sums

Nothing in it is a product of lengths: scores exist for one pair of blocks, logits for one chunk.
"""

import pytest

from tests.parity.census import CHEAP, abstract_batch, decoder_program

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "remat": "full",
    "max_position_embeddings": 2**20,
}
BLOCKS = 64 * 2**20
"""Scores of pairs of blocks, logits of a chunk, parameters and gradients: what does not grow with the row."""


def temporary(length: int, context: int, **changes: int) -> tuple[int, int]:
    """Temporary bytes of a device in a compiled step of one row, and what the arithmetic says."""
    program, shape = decoder_program(
        {"context": context}, SHAPE | changes, length=length, rows=1, context={"method": "ring"}
    )
    lowered = program.train_step.lower(program.plan.abstract, abstract_batch(program, length))
    memory = lowered.compile(compiler_options=CHEAP).memory_analysis()
    heads, kv_heads = (n * shape.head_size for n in (shape.num_attention_heads, shape.kv_heads))
    token = (shape.num_hidden_layers + 12) * shape.hidden_size + 6 * shape.intermediate_size + 4 * heads + 8 * kv_heads
    return memory.temp_size_in_bytes, 4 * token * length // context


def check(found: tuple[int, int]) -> None:
    taken, said = found
    assert 0.95 * said < taken < 1.05 * said + BLOCKS, f"{taken:,} bytes, {said:,} by arithmetic"


def test_what_a_device_holds_grows_with_its_tokens_alone():
    short, long = temporary(2**17, 8), temporary(2**18, 8)
    check(long)
    assert long[0] == pytest.approx(2 * short[0], rel=0.02)


@pytest.mark.grid
def test_half_the_row_on_half_the_devices_takes_as_much():
    assert temporary(2**17, 4)[0] == pytest.approx(temporary(2**18, 8)[0], rel=0.05)


@pytest.mark.grid
@pytest.mark.parametrize(
    "changes",
    [{}, {"intermediate_size": 384}, {"num_hidden_layers": 8}, {"num_key_value_heads": 8}, {"hidden_size": 128}],
    ids=str,
)
def test_a_million_tokens_take_what_the_arithmetic_says(changes):
    check(temporary(2**20, 8, **changes))
