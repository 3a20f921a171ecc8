"""The train step sends little more than the mathematics needs: at most 1.10 times, on every axis.

The least, per device and step, from the config alone. N layers, A bytes of a rank's activations [b, L, D]:

- data: one all-reduce of the gradients.
- fsdp: two gathers (forward, backward) and one reduce-scatter a weight, embedding and head included.
- tensor (Megatron-LM's sequence parallelism, Korthikanti et al. 2022, section 4.2): a layer gathers A twice and
  scatters it twice, forward and again backward; full rematerialisation gathers twice and scatters once more (what the
  second half gives is not needed). The embedding scatters forward and gathers backward, the head the other way round.
  The softmax over a divided vocabulary sums three numbers a token.
- norms are whole everywhere: their gradients are reduced over every axis that divides tokens.
"""

import math

import pytest

from jtrain.models.config import DecoderConfig
from tests.parity.census import Census, Needs, census, decoder_program

BOUND = 1.10
LENGTH, ROWS = 64, 8
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "remat": "full",
    "tie_word_embeddings": False,
}


def least(mesh: dict[str, int], shape: DecoderConfig, *, rows: int = ROWS, compute: int = 4) -> Needs:
    """What a step of one micro-batch needs; `compute` is the size of a number in the compute type."""
    need = Needs(mesh)
    layers, d, tensor = shape.num_hidden_layers, shape.hidden_size, mesh["tensor"]
    heads = shape.head_size * (2 * shape.num_attention_heads + 2 * shape.kv_heads)
    kernels = layers * d * (heads + 3 * shape.intermediate_size)
    tables = shape.vocab_size * d * (1 if shape.tie_word_embeddings else 2)
    stored = (kernels + tables) / tensor
    need.gather("fsdp", compute * stored, times=2)
    # The gradients of embedding and head are summed in float32.
    gradients = (compute * kernels + 4 * tables) / tensor
    need.scatter("fsdp", gradients)
    need.reduce("data", gradients / mesh["fsdp"])
    for axis in ("data", "fsdp", "tensor"):
        need.reduce(axis, 4 * (2 * layers + 1) * d)

    tokens = rows * LENGTH / (mesh["data"] * mesh["fsdp"])
    recomputed = {"full": 3, "none": 0}[shape.remat]
    need.gather("tensor", compute * tokens * d, times=layers * (8 + recomputed) + 4)
    need.reduce("tensor", 4 * tokens, times=3)
    return need


def taken_and_needed(
    mesh: dict[str, int], *, compute: int = 4, config: dict | None = None, **shape
) -> tuple[Census, Needs]:
    program, decoder = decoder_program(mesh, SHAPE | shape, length=LENGTH, rows=ROWS, **(config or {}))
    return census(program, length=LENGTH), least(dict(program.mesh.shape), decoder, compute=compute)


def check(taken: Census, need: Needs, bound: float = BOUND) -> None:
    for axis, size in need.mesh.items():
        ratio = taken.sent(axis) / need.sent(axis) if need.sent(axis) else math.inf if taken.sent(axis) else 0.0
        print(f"{axis}={size}: {taken.sent(axis):,} bytes, {ratio:.3f} of the least")
        assert ratio <= bound, f"{axis}: {ratio:.3f} times the least, {need.sent(axis):,.0f} bytes\n{taken.table()}"


@pytest.mark.parametrize("mesh", [{"data": 4}, {"fsdp": 4}, {"tensor": 4}, {"fsdp": 4, "tensor": 2}], ids=str)
def test_a_step_sends_no_more_than_a_tenth_above_the_least(mesh):
    check(*taken_and_needed(mesh))


@pytest.mark.grid
@pytest.mark.parametrize("changes", [{}, {"remat": "none"}, {"tie_word_embeddings": True}, {"bf16": True}], ids=str)
@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 4},
        {"fsdp": 4},
        {"tensor": 4},
        {"data": 2, "fsdp": 4},
        {"data": 4, "tensor": 2},
        {"fsdp": 4, "tensor": 2},
        {"data": 2, "fsdp": 2, "tensor": 2},
    ],
    ids=str,
)
def test_a_step_sends_no_more_than_a_tenth_above_the_least_in_any_form(mesh, changes, request):
    if changes.get("tie_word_embeddings") and mesh.get("data", 1) > 1:
        # Look-up and head each reduce a gradient of the table, and XLA:CPU adds them afterwards: 1.13 here, where the
        # table is an eighth of the model. TPU and GPU compilers may add first (XLA's AllReduceReassociate).
        request.applymarker(pytest.mark.xfail(strict=True, reason="a tied table's two gradients cross data apart"))
    half = changes.get("bf16", False)
    shape = {name: value for name, value in changes.items() if name != "bf16"}
    check(
        *taken_and_needed(mesh, compute=2 if half else 4, config={"precision": "bf16-mixed"} if half else {}, **shape)
    )
