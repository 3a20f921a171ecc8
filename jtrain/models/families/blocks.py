"""Tensor maps of the blocks that most families share; a family passes the names that differ."""

from __future__ import annotations

from dataclasses import dataclass

from jtrain.models.config import DecoderConfig
from jtrain.models.families.keys import Slot, Tensor, linear, same


@dataclass(frozen=True)
class Layer:
    """One layer: where it lies with us and on disk.

    Attributes:
      config: the decoder.
      number: of the layer, dense ones included.
      prefix: of its keys, with the dot at the end.
    """

    config: DecoderConfig
    number: int
    prefix: str

    @property
    def experts(self) -> bool:
        """Whether it has experts."""
        return self.number >= self.config.num_dense_layers

    @property
    def index(self) -> int:
        """Its place within its stack."""
        leading = self.config.first_k_dense_replace
        return self.number - leading if self.experts else self.number

    def slot(self, path: str, *more: int) -> Slot:
        """A parameter of the layer."""
        dense_stack = self.config.num_experts and not self.experts
        return Slot(f"{'dense_layers' if dense_stack else 'layers'}/{path}", (self.index, *more))

    def key(self, name: str) -> str:
        """A key of the layer."""
        return self.prefix + name


def layers(config: DecoderConfig, prefix: str = "model.layers.") -> list[Layer]:
    """All layers."""
    return [Layer(config, n, f"{prefix}{n}.") for n in range(config.num_hidden_layers)]


def embedding(config: DecoderConfig, key: str = "model.embed_tokens.weight") -> Tensor:
    """The token table."""
    return same(key, Slot("embed_tokens/embedding"), config.vocab_size, config.hidden_size)


def head(config: DecoderConfig, key: str = "lm_head.weight") -> list[Tensor]:
    """The output kernel, if it is not the token table; of a sequence classifier that of its scores."""
    if config.num_labels:
        return [linear("score.weight", Slot("score/kernel"), (config.hidden_size,), (config.num_labels,))]
    if config.tie_word_embeddings:
        return []
    return [linear(key, Slot("lm_head/kernel"), (config.hidden_size,), (config.vocab_size,))]


def final_norm(config: DecoderConfig, key: str = "model.norm") -> list[Tensor]:
    """The norm before the head."""
    d = config.hidden_size
    scale = same(f"{key}.weight", Slot("final_norm/scale"), d)
    return [scale] + [same(f"{key}.bias", Slot("final_norm/bias"), d)] * (config.norm == "layernorm")


def norm(layer: Layer, key: str, path: str) -> list[Tensor]:
    """A norm of a layer."""
    d, biased = layer.config.hidden_size, layer.config.norm == "layernorm"
    scale = same(layer.key(f"{key}.weight"), layer.slot(f"{path}/scale"), d)
    return [scale] + [same(layer.key(f"{key}.bias"), layer.slot(f"{path}/bias"), d)] * biased


def attention(layer: Layer, at: str = "self_attn.", out: str = "o_proj") -> list[Tensor]:
    """Separate q, k, v and output projections, with the biases and norms that the config has."""
    c = layer.config
    d, s = c.hidden_size, c.head_size
    tensors = []
    for name, heads in (("q_proj", c.num_attention_heads), ("k_proj", c.kv_heads), ("v_proj", c.kv_heads)):
        path = f"attention/{name}"
        tensors.append(linear(layer.key(f"{at}{name}.weight"), layer.slot(f"{path}/kernel"), (d,), (heads, s)))
        if c.attention_bias:
            bias = same(layer.key(f"{at}{name}.bias"), layer.slot(f"{path}/bias"), heads * s, ours=(heads, s))
            tensors.append(bias)
    tensors += attention_out(layer, f"{at}{out}")
    if c.qk_norm != "none":
        for name, heads in (("q_norm", c.num_attention_heads), ("k_norm", c.kv_heads)):
            shape = (s,) if c.qk_norm == "head" else (heads, s)
            size = s if c.qk_norm == "head" else heads * s
            slot = layer.slot(f"attention/{name}/scale")
            tensors.append(same(layer.key(f"{at}{name}.weight"), slot, size, ours=shape))
    if c.attention_sinks:
        tensors.append(same(layer.key(f"{at}sinks"), layer.slot("attention/sinks"), c.num_attention_heads))
    return tensors


def attention_out(layer: Layer, key: str) -> list[Tensor]:
    """The attention's output projection."""
    c = layer.config
    inputs = (c.num_attention_heads, c.value_size)
    kernel = linear(layer.key(f"{key}.weight"), layer.slot("attention/o_proj/kernel"), inputs, (c.hidden_size,))
    bias = same(layer.key(f"{key}.bias"), layer.slot("attention/o_proj/bias"), c.hidden_size)
    return [kernel] + [bias] * c.out_bias


def feed_forward(layer: Layer, at: str = "mlp.", names: dict[str, str] | None = None) -> list[Tensor]:
    """A dense feed-forward; `names` gives other names for gate_proj, up_proj and down_proj."""
    c = layer.config
    d, f = c.hidden_size, c.intermediate_size
    tensors = []
    for name in ("gate_proj", "up_proj", "down_proj")[0 if c.gated else 1 :]:
        inputs, outputs = ((f,), (d,)) if name == "down_proj" else ((d,), (f,))
        key = layer.key(at + (names or {}).get(name, name))
        tensors.append(linear(f"{key}.weight", layer.slot(f"mlp/{name}/kernel"), inputs, outputs))
        if c.mlp_bias:
            tensors.append(same(f"{key}.bias", layer.slot(f"mlp/{name}/bias"), *outputs))
    return tensors


def experts(layer: Layer, at: str = "mlp.", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")):
    """A router (`gate`) and experts with three kernels each, one tensor an expert and kernel."""
    c = layer.config
    d, f = c.hidden_size, c.expert_size
    tensors = [linear(layer.key(f"{at}gate.weight"), layer.slot("mlp/router"), (d,), (c.num_experts,))]
    for e in range(c.num_experts):
        for name, theirs in zip(("gate_proj", "up_proj", "down_proj"), names, strict=True):
            inputs, outputs = ((f,), (d,)) if name == "down_proj" else ((d,), (f,))
            key = layer.key(f"{at}experts.{e}.{theirs}.weight")
            tensors.append(linear(key, layer.slot(f"mlp/experts/{name}", e), inputs, outputs))
    return tensors
