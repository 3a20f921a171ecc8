import jax.numpy as jnp
import pytest

from jtrain.errors import ConfigError
from jtrain.train.loss import Loss, call_loss

ONE = jnp.float32(1)


def returns(value):
    return call_loss(lambda model, batch, rng: value, None, {}, None)


def test_scalars_of_any_kind_are_taken():
    for loss in (Loss(ONE, jnp.int32(2)), Loss(ONE, 2, {"a": (ONE, 2.0), "b": [1, 2]})):
        assert returns(loss) is loss


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1.0, "returned a float"),
        ((ONE, ONE), "returned a tuple"),
        (None, "returned a NoneType"),
        (Loss(jnp.zeros(3), ONE), r"the loss is no \(sum, count\) of two scalars: \[\(3,\), \(\)\]"),
        (Loss(ONE, jnp.ones(3)), "the loss is no"),
        (Loss(ONE, ONE, {"a": ONE}), "a is no"),
        (Loss(ONE, ONE, {"a": (ONE, ONE, ONE)}), "a is no"),
        (Loss(ONE, ONE, None), "metrics is a NoneType"),
    ],
)
def test_what_is_no_sum_and_count_is_answered_with_what_it_is(value, message):
    with pytest.raises(ConfigError, match=message):
        returns(value)
