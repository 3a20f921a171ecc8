import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jtrain.checkpoint import arrays
from jtrain.errors import CheckpointError


def test_paths_are_readable_for_dicts_tuples_and_named_tuples():
    params = {"layers": {"kernel": jnp.ones((2, 3))}}
    state = {"params": params, "opt_state": optax.chain(optax.clip(1.0), optax.adam(1e-3)).init(params)}
    assert set(arrays.flatten(state)) == {
        "params/layers/kernel",
        "opt_state/1/0/count",
        "opt_state/1/0/mu/layers/kernel",
        "opt_state/1/0/nu/layers/kernel",
    }


def test_nest_and_unflatten_undo_flatten():
    tree = {"a": (jnp.ones(1), [jnp.zeros(2)]), "b": {"c": jnp.ones(3)}}
    flat = arrays.flatten(tree)
    assert arrays.nest(flat) == {"a": {"0": flat["a/0"], "1": {"0": flat["a/1/0"]}}, "b": {"c": flat["b/c"]}}
    assert jax.tree.structure(arrays.unflatten(tree, flat)) == jax.tree.structure(tree)


def test_two_arrays_with_one_path_are_refused():
    with pytest.raises(TypeError, match="same path"):
        arrays.flatten({"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}})


def test_size_counts_each_array_once():
    assert arrays.size_bytes([np.zeros((3, 5), np.float32), np.zeros((), np.int8)]) == 61


def test_a_long_list_of_differences_is_cut():
    wanted = {f"p{i:02d}": ("float32", (1,)) for i in range(40)}
    with pytest.raises(CheckpointError, match="… and 28 more") as caught:
        arrays.require_equal({}, wanted, "here")
    assert caught.value.message.count("not in the checkpoint") == 12
