"""The compiled step of a decoder on a mesh: what it keeps, and what it never makes."""

import math
import re

import pytest

from tests.train.tiny import LENGTH, tiny_batch, tiny_program

VOCAB, WIDTH, LAYERS, TENSOR = 222, 32, 3, 2


@pytest.fixture(scope="module")
def program():
    shape = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "remat": "full", "dropout": 0.1}
    return tiny_program("data=2,fsdp=2,tensor=2", devices=8, shape=shape)


@pytest.fixture(scope="module")
def text(program):
    return program.train_step.lower(program.plan.abstract, tiny_batch(program)).compile().as_text()


def shapes(text):
    """Dimensions of every array of the program, as one device has it."""
    found = set(re.findall(r"\b(?:pred|bf16|[fsu]\d+)\[([\d,]+)\]", text))
    return {tuple(map(int, dimensions.split(","))) for dimensions in found}


def test_no_buffer_of_tokens_by_vocabulary_exists_in_the_compiled_step(program, text):
    tokens, part = program.batch.rows // 4 * LENGTH, VOCAB // TENSOR
    by_vocabulary = [shape for shape in shapes(text) if {part, VOCAB} & set(shape)]
    assert max(map(math.prod, by_vocabulary)) <= tokens * part // 2  # two chunks, the head's gradient is smaller


def test_between_the_blocks_activations_are_kept_divided_along_the_sequence(program, text):
    rows = program.batch.rows // 4
    assert (LAYERS, rows, LENGTH // TENSOR, WIDTH) in shapes(text)
    assert (LAYERS, rows, LENGTH, WIDTH) not in shapes(text)
