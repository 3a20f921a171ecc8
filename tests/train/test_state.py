import jax
import pytest

from jtrain.parallel.sharding import bytes_per_device
from tests.train.tiny import tiny_program


def test_a_state_is_born_in_the_shards_of_its_plan():
    program = tiny_program("fsdp=4,tensor=2", devices=8)
    state = program.init()
    for leaf, planned in zip(jax.tree.leaves(state), jax.tree.leaves(program.plan.abstract), strict=True):
        assert leaf.sharding.is_equivalent_to(planned.sharding, leaf.ndim)
        assert leaf.dtype == planned.dtype


@pytest.mark.parametrize(
    ("strategy", "params", "moments"),
    (("ddp", 1, 1), ("zero1", 1, 8), ("zero2", 1, 8), ("zero3", 8, 8)),
)
def test_a_strategy_divides_what_its_name_says(strategy, params, moments):
    program = tiny_program(devices=8, strategy=strategy)
    abstract = program.plan.abstract
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract.params))
    # The vocabulary of 101 and the norms leave a small remainder undivided.
    assert whole / bytes_per_device(abstract.params) == pytest.approx(params, rel=0.35)
    assert 2 * whole / bytes_per_device(abstract.opt_state) == pytest.approx(moments, rel=0.35)
    gradients = [place.spec for place in jax.tree.leaves(program.plan.gradients)]
    divided = any("data" in str(spec) for spec in gradients)
    assert divided == (strategy == "zero2")
