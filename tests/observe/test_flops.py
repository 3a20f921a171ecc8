import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jtrain.models.config import DecoderConfig
from jtrain.models.decoder import Decoder
from jtrain.models.presets import preset
from jtrain.observe.flops import decoder_flops, matmul_parameters, mfu
from jtrain.observe.hlo import analyze
from jtrain.ops.cross_entropy import cross_entropy

LLAMA3_8B = preset("llama3-8b")


def test_llama3_8b_multiplies_with_its_parameters_less_embedding_and_norms():
    # 8,030,261,248 parameters (the published count) less the embedding 128256·4096 and 65 norms of 4096.
    assert matmul_parameters(LLAMA3_8B) == 8_030_261_248 - 128256 * 4096 - 65 * 4096


def test_the_flops_of_a_token_by_hand():
    # One layer, D=8, 2 heads and 1 kv head of 4, plain feed-forward of 16, V=10, L=3.
    shape = DecoderConfig(10, 8, 16, 1, 2, num_key_value_heads=1, activation="gelu")
    # q 8·8, k and v 8·4 each, o 8·8, up and down 8·16 each, head 8·10.
    assert matmul_parameters(shape) == 64 + 32 + 32 + 64 + 128 + 128 + 80 == 528
    # Tokens of the row see 1, 2 and 3 keys: 2 on average; 2 products of 2·keys·8 FLOPs.
    assert decoder_flops(shape, 3).causal == 3 * (2 * 528 + 4 * 2 * 8)
    assert decoder_flops(shape, 3).legacy == 6 * 528 + 12 * 1 * 2 * 4 * 3
    assert decoder_flops(shape, 3, parameters=600).legacy == 6 * 600 + 12 * 1 * 2 * 4 * 3


def test_a_token_is_multiplied_with_its_own_experts_only():
    # D=8, one dense layer of 16 and two of experts of 4: 2 of 6 and one shared, a router of 8·6; two heads of 4, V=10.
    shape = DecoderConfig(
        10, 8, 16, 3, 2, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=4, n_shared_experts=1,
        first_k_dense_replace=1,
    )  # fmt: skip
    assert matmul_parameters(shape) == 3 * 4 * 64 + 3 * 8 * 16 + 2 * (3 * 3 * 8 * 4 + 48) + 80


def test_windows_and_latents_by_hand():
    # Of 4 tokens with a window of 2: 1, 2, 2, 2 keys; without: 1, 2, 3, 4.
    shape = DecoderConfig(
        10, 8, 16, 2, 2, activation="gelu", sliding_window=2, layer_types=("sliding_attention", "full_attention")
    )
    attention = 4 * 8 * (1.75 + 2.5)
    assert decoder_flops(shape, 4).causal == 3 * (2 * matmul_parameters(shape) + attention)
    # q 8·3, its heads 3·2·(4+2), latent and key 8·(5+2), heads 5·2·(4+6), out 2·6·8, up and down, head.
    latent = DecoderConfig(
        10, 8, 16, 1, 2, activation="gelu", q_lora_rank=3, kv_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=2,
        v_head_dim=6,
    )  # fmt: skip
    assert matmul_parameters(latent) == 24 + 36 + 56 + 100 + 96 + 256 + 80
    assert decoder_flops(latent, 3).causal == 3 * (2 * 648 + 2 * 2 * 2 * (6 + 6))


def test_the_conventions_differ_by_half_the_attention():
    flops = decoder_flops(LLAMA3_8B, 8192)
    assert flops.legacy - flops.causal == 6 * 32 * 4096 * (8192 - 1)


def test_mfu_is_a_ratio_and_unknown_when_a_figure_is():
    assert mfu(6e9, 50_000, 1e15) == pytest.approx(0.3)
    assert mfu(6e9, 50_000, None) is mfu(None, 50_000, 1e15) is mfu(6e9, None, 1e15) is None


def test_a_real_decoder_does_what_the_legacy_convention_counts():
    # Without recomputation, and with an attention that computes the masked half of the scores as well.
    shape = DecoderConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        remat="none",
    )
    with nnx.use_eager_sharding(False):
        graph, parameters = nnx.split(Decoder(shape, nnx.Rngs(0)))

    def loss(parameters, ids):
        model = nnx.merge(graph, parameters)
        positions = jnp.broadcast_to(jnp.arange(64), ids.shape)
        hidden = model.hidden(ids, position_ids=positions, segment_ids=jnp.ones_like(ids), deterministic=True)
        return cross_entropy(hidden, model.head(), ids, chunk_size=16)[0]

    text = jax.jit(jax.grad(loss)).lower(parameters, jnp.zeros((2, 64), jnp.int32)).compile().as_text()
    assert analyze(text).flops == 2 * 64 * decoder_flops(shape, 64).legacy
