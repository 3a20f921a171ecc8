import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jtrain.observe.hlo import analyze


def entry(*lines):
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule m\n\nENTRY %main () -> f32[] {{\n{body}\n}}\n"


def test_a_batched_product_by_hand():
    function = lambda a, b: jnp.einsum("bik,bkj->bij", a, b)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3, 4, 5), (3, 5, 6))]
    assert analyze(jax.jit(function).lower(*shapes).compile().as_text()).flops == 2 * 3 * 4 * 5 * 6


@pytest.mark.parametrize(
    ("window", "out", "pairs"),
    [
        # Five inputs and a kernel of 3, in one dimension: pairs (output, kernel) that meet an input, counted on paper.
        ("{size=3}", 3, 9),
        ("{size=3 pad=1_1}", 5, 3 * 5 - 2),
        ("{size=3 stride=2 pad=1_1}", 3, 3 * 3 - 2),
        ("{size=3 rhs_dilate=2 pad=2_2}", 5, 3 + 5 + 3),
        # Inputs at 0, 2, 4, 6, 8; outputs 0..10 from -1: the middle of the kernel meets 5, its sides 5 each.
        ("{size=3 lhs_dilate=2 pad=2_2}", 11, 15),
    ],
)
def test_a_convolution_counts_the_places_that_meet_an_input(window, out, pairs):
    text = entry(
        "%x = f32[2,5,4]{2,1,0} parameter(0)",
        "%k = f32[3,4,6]{2,1,0} parameter(1)",
        f"ROOT %c = f32[2,{out},6]{{2,1,0}} convolution(%x, %k), window={window}, dim_labels=b0f_0io->b0f",
    )
    # Batch 2, 4 features in, 6 out.
    assert analyze(text).flops == 2 * 2 * 4 * 6 * pairs


def test_a_grouped_convolution_multiplies_within_its_group():
    x, kernel = jax.ShapeDtypeStruct((1, 8, 10), jnp.float32), jax.ShapeDtypeStruct((8, 1, 3), jnp.float32)
    function = lambda x, k: lax.conv_general_dilated(x, k, (1,), "VALID", feature_group_count=8)
    assert analyze(jax.jit(function).lower(x, kernel).compile().as_text()).flops == 2 * 8 * 8 * 3


def test_a_cublas_call_is_a_product():
    text = entry(
        "%a = f32[16,32]{1,0} parameter(0)",
        "%b = f32[32,8]{1,0} parameter(1)",
        'ROOT %g = (f32[16,8]{1,0}, s8[1024]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["0"]}}}',
    )
    cost = analyze(text)
    assert cost.flops == 2 * 16 * 32 * 8 and not cost.opaque
