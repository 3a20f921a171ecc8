"""The shape of a decoder: a frozen dataclass in plain Python, so that presets and parameter counts need no JAX."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from jtrain.models.rope_scaling import RopeScaling

if TYPE_CHECKING:
    from jtrain.models.multimodal_config import ImageConfig

Norm = Literal["rmsnorm", "layernorm"]
NormPosition = Literal["pre", "post", "sandwich"]
QkNorm = Literal["none", "head", "full"]
Positions = Literal["rope", "learned", "none"]
Activation = Literal["swiglu", "geglu", "gelu", "gelu_exact", "quick_gelu", "swiglu_clamped"]
Remat = Literal[
    "none", "full", "minimal", "save_dots", "save_qkv", "save_attention", "save_out", "offload", "offload_dots"
]
Kernel = Literal["auto", "xla", "splash", "cudnn"]
Scoring = Literal["softmax", "sigmoid"]
ExpertKernel = Literal["auto", "blocks", "ragged_dot", "megablox"]


@dataclass(frozen=True)
class DecoderConfig:
    """Shape and parts of a decoder-only transformer. Field names are Hugging Face's where they exist.

    Raises:
      ConfigError: numbers that make no decoder (heads that do not divide, an odd head size, a size below 1).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    """Key-value heads; None: as many as query heads. Each serves a group of query heads (GQA)."""
    head_dim: int | None = None
    """Size of a head; None: hidden_size / num_attention_heads."""
    max_position_embeddings: int = 2048
    position_embedding: Positions = "rope"
    """Rotary; a learned table of `max_position_embeddings` rows added to the tokens' (GPT-2); or none."""
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rope_local_base_freq: float | None = None
    """Base of the sliding layers, which are not stretched (Gemma 3); None: as the others."""
    partial_rotary_factor: float = 1.0
    """Share of a head's channels, from its first one, that turn."""
    rope_interleave: bool = False
    """Whether channel 2i turns with 2i + 1 (DeepSeek), and not i with i + half."""
    no_rope_layers: tuple[int, ...] | None = None
    """One number a layer: 1 turns by position, 0 does not (SmolLM3, Llama 4). None: all turn."""
    sliding_window: int | None = None
    """Tokens that a sliding layer sees, itself included."""
    layer_types: tuple[str, ...] | None = None
    """`full_attention` or `sliding_attention` for every layer; None: all slide where there is a window."""
    tie_word_embeddings: bool = False
    num_labels: int = 0
    """Scores of a sequence classifier, in place of the head of the vocabulary; 0: a language model."""
    embedding_multiplier: float = 1.0
    """Factor on the embedded tokens (Gemma: the root of D; Granite)."""
    residual_multiplier: float = 1.0
    """Factor on both branches before they are added (Granite)."""
    logits_scaling: float = 1.0
    """Logits are divided by it (Granite)."""
    final_logit_softcapping: float | None = None
    """c: logits become c * tanh(logits / c) (Gemma 2)."""
    norm: Norm = "rmsnorm"
    norm_eps: float = 1e-5
    norm_unit_offset: bool = False
    """Whether the stored scale is the factor less one (Gemma)."""
    norm_position: NormPosition = "pre"
    """Where branches are normalised: before; after, on what is added (OLMo 2); or both (Gemma 2)."""
    parallel_residual: bool = False
    """Whether both branches read the layer's input (GPT-NeoX), and not one the other's result."""
    qk_norm: QkNorm = "none"
    """RMSNorm on queries and keys before they turn: every head by itself (Qwen3), or all heads as one (OLMo 2)."""
    activation: Activation = "swiglu"
    """Gated: SwiGLU, GeGLU, gpt-oss' clamped SwiGLU. Plain: GELU by tanh (GPT-2), exact (GPT-NeoX), or
    x * sigmoid(1.702 x) (CLIP)."""
    swiglu_limit: float = 7.0
    """swiglu_clamped: where gate and up are cut off."""
    swiglu_alpha: float = 1.702
    """swiglu_clamped: factor inside of the gate's sigmoid."""
    causal: bool = True
    """Whether a token sees only itself and what comes before; False: an encoder's, which sees its whole document."""
    attention_bias: bool = False
    """Biases on queries, keys and values."""
    attention_out_bias: bool | None = None
    """A bias on the attention's output projection; None: as attention_bias."""
    attention_scale: float | None = None
    """Factor on the scores; None: 1 / sqrt of the size of a query head."""
    attn_logit_softcapping: float | None = None
    """c: scores become c * tanh(scores / c) (Gemma 2)."""
    attention_sinks: bool = False
    """A learned logit a head that takes a share of every softmax and has no value (gpt-oss)."""
    clip_qkv: float | None = None
    """Queries, keys and values are cut off at this size before they turn (OLMoE)."""
    kv_lora_rank: int | None = None
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): size of what keys and values come from."""
    q_lora_rank: int | None = None
    """The same for queries; None: they come from the activations."""
    qk_nope_head_dim: int | None = None
    """Latent attention: channels of a query or key that do not turn."""
    qk_rope_head_dim: int | None = None
    """Latent attention: channels that turn; those of a key are shared by all heads."""
    v_head_dim: int | None = None
    """Latent attention: size of a value."""
    mlp_bias: bool = False
    dropout: float = 0.0
    """Rate of dropout on the embedding and on both residual branches."""
    initializer_range: float = 0.02
    """Standard deviation of the initial kernels and of the embedding."""
    remat: Remat = "full"
    """What the backward pass recomputes; see `jtrain.models.remat`."""
    attention: Kernel = "auto"
    """Attention kernel; see `jtrain.ops.attention`."""
    num_experts: int = 0
    """Routed experts of a layer; 0: a dense feed-forward. See `jtrain.models.moe`."""
    num_experts_per_tok: int = 2
    """Experts that a token goes through, beside the shared ones."""
    moe_intermediate_size: int | None = None
    """Width of an expert; None: intermediate_size."""
    n_shared_experts: int = 0
    """Experts that every token goes through: one feed-forward of this many times the width of an expert."""
    scoring_func: Scoring = "softmax"
    """How router logits become scores: over all experts (Mixtral, Qwen3), or each by itself (DeepSeek-V3)."""
    norm_topk_prob: bool = True
    """Whether the scores of a token's experts are divided by their sum."""
    routed_scaling_factor: float = 1.0
    """What the sum of the routed experts is multiplied by."""
    n_group: int = 1
    """Groups of experts; a token's experts come from the best `topk_group` of them (DeepSeek-V3, section 2.1.2)."""
    topk_group: int = 1
    score_correction_bias: bool = False
    """Whether there is a bias on the scores for the choice; a `router_bias_update_rate` brings one as well."""
    router_offset: bool = False
    """A learned bias of the router's product (gpt-oss)."""
    expert_bias: bool = False
    """Biases on the projections of the routed experts (gpt-oss)."""
    router_aux_loss_coef: float = 0.001
    """Weight of the load-balancing loss of every layer."""
    router_z_loss_coef: float = 0.0
    """Weight of the router z-loss of every layer (ST-MoE, Zoph et al. 2022, eq. 5: 0.001)."""
    router_bias_update_rate: float = 0.0
    """Step of the bias that balances without a loss (DeepSeek-V3: 0.001); 0: there is no bias."""
    first_k_dense_replace: int = 0
    """Leading layers with a dense feed-forward of intermediate_size."""
    expert_capacity_factor: float = 0.0
    """Tokens of a row that an expert takes, relative to an even share; 0: all of them (dropless)."""
    expert_kernel: ExpertKernel = "auto"
    """Kernel of the dropless experts; see `jtrain.ops.grouped_matmul`."""
    images: ImageConfig | None = None
    """How images stand in the rows of a model that sees (LLaVA); None: it reads text alone."""

    def __post_init__(self) -> None:
        # The rules stand in a file of their own; they read properties of this class only.
        from jtrain.models.config_rules import check_decoder

        check_decoder(self)

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads, filled in."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def head_size(self) -> int:
        """Size of a query head, filled in."""
        if self.latent:
            return (self.qk_nope_head_dim or 0) + (self.qk_rope_head_dim or 0)
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim

    @property
    def value_size(self) -> int:
        """Size of a head's value."""
        return (self.v_head_dim or 0) if self.latent else self.head_size

    @property
    def latent(self) -> bool:
        """Whether keys and values come from a latent (multi-head latent attention)."""
        return self.kv_lora_rank is not None

    @property
    def rotary_size(self) -> int:
        """Channels of a head that turn."""
        if self.position_embedding != "rope":
            return 0
        return (self.qk_rope_head_dim or 0) if self.latent else int(self.head_size * self.partial_rotary_factor)

    @property
    def out_bias(self) -> bool:
        """Whether the attention's output projection has a bias."""
        return self.attention_bias if self.attention_out_bias is None else self.attention_out_bias

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """What every layer's tokens see: a number of tokens, or None for all before them."""
        if self.layer_types is None:
            return (self.sliding_window,) * self.num_hidden_layers
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types)

    @cached_property
    def rope_kinds(self) -> tuple[str, ...]:
        """How every layer turns: `global`, `local` (`rope_local_base_freq`) or `none`."""
        if self.position_embedding != "rope":
            return ("none",) * self.num_hidden_layers
        turns = self.no_rope_layers or (1,) * self.num_hidden_layers
        local = self.rope_local_base_freq is not None
        return tuple(
            "none" if not turn else "local" if local and window is not None else "global"
            for turn, window in zip(turns, self.windows, strict=True)
        )

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a gate (three kernels) or not (two)."""
        return self.activation in ("swiglu", "geglu", "swiglu_clamped")

    @property
    def expert_size(self) -> int:
        """Width of an expert, filled in."""
        return self.intermediate_size if self.moe_intermediate_size is None else self.moe_intermediate_size

    @property
    def router_bias(self) -> bool:
        """Whether the choice of experts has a bias of its own, beside the parameters."""
        return self.score_correction_bias or self.router_bias_update_rate > 0

    @property
    def num_dense_layers(self) -> int:
        """Layers whose feed-forward is dense: all of them where there are no experts."""
        return self.first_k_dense_replace if self.num_experts else self.num_hidden_layers

    @property
    def num_expert_layers(self) -> int:
        """Layers with experts."""
        return self.num_hidden_layers - self.num_dense_layers

    def replace(self, **changes: Any) -> DecoderConfig:
        """A copy with some fields changed, checked anew."""
        return dataclasses.replace(self, **changes)
