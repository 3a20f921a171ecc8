import pytest

from jtrain.errors import ConfigError
from jtrain.models.counts import layer_parameter_count, parameter_count

from .build import small


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 18}, "hidden_size 18 is not divisible by model.num_attention_heads 4"),
        ({"num_key_value_heads": 3}, "Key-value heads may be 1, 2, 4"),
        ({"head_dim": 5}, "head is 5"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"norm": "batchnorm"}, "Choose one of rmsnorm, layernorm"),
        ({"remat": "some"}, "Choose one of none, full"),
        ({"n_shared_experts": 1}, "n_shared_experts is 1, and the model has no experts"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok is 5 of model.num_experts 4"),
        ({"num_experts": 4, "first_k_dense_replace": 2}, "first_k_dense_replace is 2 of model.num_hidden_layers 2"),
        ({"num_experts": 4, "mlp_bias": True}, "experts have no biases"),
        ({"num_experts": 4, "expert_capacity_factor": -1.0}, "expert_capacity_factor is -1.0"),
        ({"num_experts": 4, "scoring_func": "tanh"}, "Choose one of softmax, sigmoid"),
    ],
)
def test_numbers_that_make_no_decoder_are_refused_with_the_field_and_a_remedy(changes, words):
    with pytest.raises(ConfigError, match=words) as caught:
        small(**changes)
    assert caught.value.remedy


def test_heads_are_filled_in_from_the_width():
    config = small(num_key_value_heads=None)
    assert (config.kv_heads, config.head_size) == (4, 4)


def test_parameters_are_counted_by_arithmetic():
    # 16 wide, 4 heads of 4, 2 key-value heads, 24 feed-forward, 37 tokens, 2 layers:
    # q 256, k 128, v 128, o 256, three kernels of 384, two norms of 16.
    assert layer_parameter_count(small()) == 256 + 128 + 128 + 256 + 3 * 384 + 2 * 16
    assert parameter_count(small()) == 2 * 1952 + 16 + 2 * 37 * 16
    assert parameter_count(small(tie_word_embeddings=True)) == 2 * 1952 + 16 + 37 * 16
    assert parameter_count(small(), embedding=False) == 2 * 1952 + 16
    # Biases: q 16, k 8, v 8, o 16; up 24, down 16; layernorms carry one each. No gate: one kernel of 384 less.
    plain = small(attention_bias=True, mlp_bias=True, norm="layernorm", activation="gelu")
    assert layer_parameter_count(plain) == 1952 - 384 + 48 + 40 + 2 * 16


def test_experts_are_counted_once_each_and_active_ones_by_choice():
    # Two layers, the first dense (1952); the second has a router 16 * 6 and experts of 3 * 16 * 8, one of them shared.
    moe = small(
        num_experts=6, num_experts_per_tok=2, moe_intermediate_size=8, n_shared_experts=1, first_k_dense_replace=1
    )
    attention_and_norms = 1952 - 3 * 384
    ends = 16 + 2 * 37 * 16
    assert parameter_count(moe) == 1952 + attention_and_norms + 96 + 7 * 384 + ends
    assert parameter_count(moe, active=True) == 1952 + attention_and_norms + 96 + 3 * 384 + ends
    assert small(num_experts=2).expert_size == 24
