"""How many parameters a decoder has, by arithmetic: no array is made."""

from __future__ import annotations

from jtrain.models.config import DecoderConfig


def attention_product_count(c: DecoderConfig) -> int:
    """Entries of one layer's attention kernels: what a token is multiplied with."""
    d, heads, size = c.hidden_size, c.num_attention_heads, c.head_size
    if c.kv_lora_rank is None:
        return d * size * (2 * heads + 2 * c.kv_heads)
    query = d * heads * size if c.q_lora_rank is None else c.q_lora_rank * (d + heads * size)
    rope, nope = c.qk_rope_head_dim or 0, c.qk_nope_head_dim or 0
    latent = d * (c.kv_lora_rank + rope) + c.kv_lora_rank * heads * (nope + c.value_size)
    return query + latent + heads * c.value_size * d


def _attention_parameter_count(c: DecoderConfig) -> int:
    heads, kv_heads, size = c.num_attention_heads, c.kv_heads, c.head_size
    count = attention_product_count(c) + (c.kv_lora_rank or 0) + (c.q_lora_rank or 0)  # the latents' norms
    if c.attention_bias:
        count += size * (heads + 2 * kv_heads)
    if c.out_bias:
        count += c.hidden_size
    if c.qk_norm != "none":
        count += size * (2 if c.qk_norm == "head" else heads + kv_heads)
    return count + (heads if c.attention_sinks else 0)


def layer_parameter_count(config: DecoderConfig, *, experts: int | None = None) -> int:
    """Parameters of one layer.

    Args:
      config: the decoder.
      experts: routed experts that are counted; by default a dense feed-forward.
    """
    c = config
    kernels = 3 if c.gated else 2
    if experts is None:
        mlp = kernels * c.hidden_size * c.intermediate_size
        if c.mlp_bias:
            mlp += (kernels - 1) * c.intermediate_size + c.hidden_size
    else:
        mlp = kernels * c.hidden_size * c.expert_size * (experts + c.n_shared_experts) + c.hidden_size * c.num_experts
        if c.expert_bias:
            mlp += experts * ((kernels - 1) * c.expert_size + c.hidden_size)
        if c.router_offset:
            mlp += c.num_experts
    norms = 4 if c.norm_position == "sandwich" else 2
    return _attention_parameter_count(c) + mlp + norms * _norm_parameter_count(c)


def parameter_count(config: DecoderConfig, *, embedding: bool = True, active: bool = False) -> int:
    """Parameters of the whole decoder.

    Args:
      config: the decoder.
      embedding: False leaves the embedding tables and an untied head out, as scaling laws count.
      active: True counts the experts that a token goes through, in place of all.
    """
    c = config
    count = c.num_dense_layers * layer_parameter_count(c) + _norm_parameter_count(c)
    if c.num_experts:
        experts = c.num_experts_per_tok if active else c.num_experts
        count += c.num_expert_layers * layer_parameter_count(c, experts=experts)
    if embedding:
        count += c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings or c.num_labels else 2)
        count += c.num_labels * c.hidden_size
        if c.position_embedding == "learned":
            count += c.max_position_embeddings * c.hidden_size
    return count


def _norm_parameter_count(config: DecoderConfig) -> int:
    return config.hidden_size * (1 if config.norm == "rmsnorm" else 2)
