"""Config translation by table: what most families need; each adds its own by `read` and `write`."""

from __future__ import annotations

from typing import Any, ClassVar

from jtrain.errors import ConfigError
from jtrain.models.config import DecoderConfig
from jtrain.models.families.family import Family
from jtrain.models.families.fields import Fields
from jtrain.models.families.rope_schema import plain_scaling, read_rope, write_rope

SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
    "initializer_range": "initializer_range",
}
"""What nearly all families say in the same words: key of config.json, our field."""
SILU = ("silu", "swish")
TANH_GELU = ("gelu_pytorch_tanh", "gelu_new")

TRAINING = (
    "attention", "dropout", "expert_capacity_factor", "expert_kernel", "remat", "router_bias_update_rate",
    "router_z_loss_coef",
)  # fmt: skip
"""Our fields that say how to train or run, and that no config.json holds."""


class Table(Family):
    """A family whose config is a table, and a few lines.

    Attributes:
      names: key of config.json -> our field, the same value.
      defaults: what transformers takes for a key that is not there.
      fixed: our fields that are the same in the whole family.
      only: keys with the values that we do; the first is what transformers takes if there is none, and is written.
      experts: whether its models have experts.
    """

    names: ClassVar[dict[str, str]] = SIZES
    defaults: ClassVar[dict[str, Any]]
    fixed: ClassVar[dict[str, Any]] = {}
    only: ClassVar[dict[str, tuple[Any, ...]]] = {"hidden_act": SILU}
    experts: ClassVar[bool] = False

    def decoder_config(self, hf: dict[str, Any]) -> DecoderConfig:
        fields = Fields(hf, self.defaults)
        values = {ours: _of_type(key, ours, fields.get(key)) for key, ours in self.names.items()}
        for key, allowed in self.only.items():
            fields.only(key, allowed)
        try:
            values |= self.fixed | self.read_positions(fields) | self.read(fields)
            self._check_experts(values.get("num_experts", 0))
            config = filled(DecoderConfig(**values, num_labels=_labels(hf)))
        except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"config.json of {self.model_type}: a value is of the wrong kind ({error})",
                "Compare it with the file of the published model.",
            ) from error
        fields.finish()
        return config

    def hf_config(self, config: DecoderConfig) -> dict[str, Any]:
        self._check_experts(config.num_experts)
        c = filled(config)
        out: dict[str, Any] = {"model_type": self.model_type, "architectures": list(self.architectures[:1])}
        out |= {key: getattr(c, ours) for key, ours in self.names.items()}
        out |= {key: allowed[0] for key, allowed in self.only.items()}
        if c.num_labels:
            out["architectures"] = [name.replace("ForCausalLM", _CLASSIFIER) for name in out["architectures"]]
            out["id2label"] = {str(n): f"LABEL_{n}" for n in range(c.num_labels)}
            out["label2id"] = {f"LABEL_{n}": n for n in range(c.num_labels)}
        return out | self.write_positions(c) | self.write(c)

    def _check_experts(self, count: int) -> None:
        if bool(count) != self.experts:
            has = "experts" if self.experts else "no experts"
            raise ConfigError(f"model.num_experts is {count}", f"A model of {self.model_type} has {has}.")

    def read_positions(self, fields: Fields) -> dict[str, Any]:
        """Our fields of the positions; rotary ones by default."""
        return read_rope(fields)

    def write_positions(self, config: DecoderConfig) -> dict[str, Any]:
        """The inverse of `read_positions`."""
        return write_rope(config)

    def read(self, fields: Fields) -> dict[str, Any]:
        """Further fields of ours."""
        return {}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        """Further keys; the inverse of `read`."""
        return {}


def _of_type(key: str, ours: str, value: Any) -> Any:
    """The value of a key, if it is of the type of our field."""
    wanted = str(DecoderConfig.__dataclass_fields__[ours].type)
    kind = wanted.removesuffix(" | None")
    fits: Any = {"int": int, "float": (int, float), "bool": bool}[kind]
    if value is None and kind != wanted:
        return None
    if not isinstance(value, fits) or isinstance(value, bool) != (kind == "bool"):
        raise ConfigError(f"config.json: {key} is {value!r}", f"Write a value of type {wanted}.")
    return value


_CLASSIFIER = "ForSequenceClassification"


def _labels(hf: dict[str, Any]) -> int:
    """Scores of a sequence classifier; transformers has two of them where nothing is said."""
    if not any(str(name).endswith(_CLASSIFIER) for name in hf.get("architectures") or ()):
        return 0
    return len(hf["id2label"]) if hf.get("id2label") else int(hf.get("num_labels") or 2)


def filled(config: DecoderConfig) -> DecoderConfig:
    """The same decoder with what None stands for written out, and what nothing reads at its default."""
    c = config
    changes: dict[str, Any] = {
        "num_key_value_heads": c.kv_heads,
        "head_dim": None if c.latent else c.head_size,
        "attention_out_bias": c.out_bias,
        "moe_intermediate_size": c.expert_size if c.num_experts else None,
        "score_correction_bias": c.router_bias,
        "rope_scaling": plain_scaling(c.rope_scaling),
    }
    if c.attention_scale == c.head_size**-0.5:
        changes["attention_scale"] = None
    windows = set(c.windows)
    if len(windows) == 1:
        changes |= {"sliding_window": windows.pop(), "layer_types": None}
    if c.no_rope_layers is not None and all(c.no_rope_layers):
        changes["no_rope_layers"] = None
    if c.position_embedding != "rope":
        plain = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "rope_interleave")
        changes |= {name: DecoderConfig.__dataclass_fields__[name].default for name in plain}
    if c.activation != "swiglu_clamped":
        changes |= {name: DecoderConfig.__dataclass_fields__[name].default for name in ("swiglu_limit", "swiglu_alpha")}
    return c.replace(**changes)


def of_function(config: DecoderConfig) -> DecoderConfig:
    """What a config.json can hold of a decoder: `TRAINING` fields at their defaults, and unused widths alike."""
    c = filled(config)
    defaults = {name: DecoderConfig.__dataclass_fields__[name].default for name in TRAINING}
    if c.num_dense_layers == 0:
        defaults["intermediate_size"] = c.expert_size
    return c.replace(**defaults)


def layer_kinds(config: DecoderConfig) -> list[str]:
    """`layer_types` of config.json."""
    return ["full_attention" if window is None else "sliding_attention" for window in config.windows]


def read_windows(fields: Fields, window: int | None, kinds: list[str]) -> dict[str, Any]:
    """`sliding_window` and `layer_types`: the file's own list of kinds, or `kinds` where it has none."""
    given = fields.get("layer_types") or kinds
    if len(given) != len(kinds):
        raise ConfigError(
            f"config.json: layer_types names {len(given)} layers of {len(kinds)}", "Write one entry a layer."
        )
    if not set(given) <= {"full_attention", "sliding_attention"}:
        raise ConfigError(
            f"config.json: layer_types has {sorted(set(given))}", "jtrain does full_attention and sliding_attention."
        )
    if "sliding_attention" not in given:
        return {"sliding_window": None, "layer_types": None}
    if window is None:
        raise ConfigError(
            "config.json: layer_types has sliding_attention, and there is no window",
            "Write sliding_window (and use_sliding_window: true, where the family has it).",
        )
    return {"sliding_window": window, "layer_types": tuple(given)}
