import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.ops.zigzag import to_zigzag, token_index, zigzag_order, zigzag_ways


def test_a_device_holds_an_early_and_a_late_chunk():
    ids = jnp.arange(12)[None]
    # Three devices, six chunks of two tokens.
    assert to_zigzag(ids, 3)[0].tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    assert to_zigzag(ids, 1) is ids


@pytest.mark.parametrize("ways", [1, 2, 3, 4])
def test_the_index_of_a_token_is_known_where_it_stands(ways):
    x = np.arange(2 * 24 * 3).reshape(2, 24, 3)
    with zigzag_order(ways):
        assert zigzag_ways() == ways
        index = np.asarray(token_index(24))
    assert zigzag_ways() == 1
    np.testing.assert_array_equal(to_zigzag(jnp.asarray(x), ways), x[:, index])
    assert sorted(index.tolist()) == list(range(24))


def test_under_a_causal_mask_all_devices_see_as_much():
    with zigzag_order(4):
        seen = (np.asarray(token_index(64)) + 1).reshape(4, 16).sum(axis=1)
    assert set(seen.tolist()) == {64 * 65 // 2 // 4}


def test_rows_that_can_not_be_cut_are_refused():
    with pytest.raises(ValueError, match="12 tokens in 2 x 4 chunks"):
        to_zigzag(jnp.zeros((1, 12)), 4)
