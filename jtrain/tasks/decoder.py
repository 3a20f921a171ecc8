"""From a config to a decoder that fits its tokenizer, rows and mesh; every rule fails before a device is used."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jtrain.config.names import nearest
from jtrain.config.rules import check_context_length
from jtrain.config.schema import Config
from jtrain.data.rows import Rows
from jtrain.data.tokenizers import Tokenizer
from jtrain.errors import ConfigError, DataError
from jtrain.models.attention import kv_repeats
from jtrain.models.config import DecoderConfig
from jtrain.ops.attention import chosen_kernel
from jtrain.ops.context import Method, context_method
from jtrain.ops.grouped_matmul import chosen_expert_kernel
from jtrain.parallel.pipeline.layout import check_layers
from jtrain.parallel.sharding import RULES
from jtrain.tasks.shape import preset_shape, shape_beside

_CHECKED_ROWS = 16


def decoder_config(config: Config, tokenizer: Tokenizer, base: DecoderConfig | None = None) -> DecoderConfig:
    """The decoder's shape: the preset, the fields that replace its own, the tokenizer's vocabulary.

    Args:
      config: the run's.
      tokenizer: of its texts.
      base: the shape of the model that `model.path` names, in place of a preset; its vocabulary stays.

    Raises:
      ConfigError: an unknown preset, a row longer than the model takes, a sharding rule for no dimension of it, heads
        that `mesh.tensor` or `mesh.context` does not divide, experts that `mesh.expert` does not divide.
      DataError: a tokenizer with more tokens than the model's vocabulary.
    """
    shape = preset_shape(config, tokenizer) if base is None else shape_beside(config, tokenizer, base)
    if config.max_length < 2:
        raise ConfigError(f"max_length={config.max_length} leaves no token to predict", "write max_length: 2 (or more)")
    if config.max_length > shape.max_position_embeddings:
        raise ConfigError(
            f"max_length={config.max_length} is over model.max_position_embeddings={shape.max_position_embeddings}",
            f"write max_length: {shape.max_position_embeddings} (or less), or raise model.max_position_embeddings",
        )
    for name in config.sharding.rules:
        if name not in RULES:
            meant = nearest(name, RULES)
            raise ConfigError(
                f"sharding.rules.{name}: a decoder has no such dimension",
                f"did you mean {meant}?" if meant else f"its dimensions: {', '.join(RULES)}",
            )
    if config.mesh.tensor > 1:
        check_tensor(shape, config.mesh.tensor)
    if config.mesh.context > 1:
        check_context(config, shape, context=config.mesh.context, tensor=max(config.mesh.tensor, 1))
    check_experts(shape, config.mesh.expert, config.mesh.context)
    check_pipeline(shape, config.mesh.pipeline, config.pipeline.virtual_stages)
    return shape


def check_language_model(shape: DecoderConfig, named: str) -> None:
    """Sees that a model has a head over its vocabulary.

    Args:
      shape: of the model.
      named: the field that names it, with its value.

    Raises:
      ConfigError: it is a classifier or a reward model.
    """
    if shape.num_labels:
        raise ConfigError(
            f"{named} is a classifier or reward model (num_labels: {shape.num_labels}): it gives scores, and no "
            "distributions of tokens",
            "Name a language model; of this kind task: reward trains those with one label.",
        )


def check_rows(rows: Rows, length: int, vocab_size: int) -> None:
    """Looks into the first rows that a caller brings: on a device a token too large would be another one silently.

    Raises:
      DataError: an array is missing, has another length, or holds a token that the model has not.
    """
    batch = rows.rows(np.arange(min(_CHECKED_ROWS, len(rows))))
    pairs = "chosen_input_ids" in batch
    halves = [f"{half}_" for half in ("chosen", "rejected")] if pairs else [""]
    for name in (f"{half}{name}" for half in halves for name in ("input_ids", "labels", "segment_ids", "position_ids")):
        if name not in batch:
            raise DataError(f"the rows have no {name!r}, only {', '.join(batch)}", "give it as int32 [max_length]")
        if batch[name].shape[1:] != (length,):
            raise DataError(
                f"{name!r} of a row has the shape {batch[name].shape[1:]}, and max_length is {length}",
                "cut or pad the rows, or change max_length",
            )
        if name.endswith(("input_ids", "labels")) and batch[name].max() >= vocab_size:
            raise DataError(
                f"{name!r} holds the token {batch[name].max()}, and the model has {vocab_size}",
                "raise model.vocab_size, or give the tokenizer of these rows",
            )


def check_tensor(shape: DecoderConfig, tensor: int) -> None:
    """Sees that `mesh.tensor` divides what it has to (vocabulary and key-value heads are padded or repeated).

    Raises:
      ConfigError: it does not; the message names the nearest values that would.
    """
    sizes = {"num_attention_heads": shape.num_attention_heads}
    if shape.num_dense_layers:
        sizes["intermediate_size"] = shape.intermediate_size
    if shape.num_experts:
        sizes["moe_intermediate_size"] = shape.expert_size
    for field, size in sizes.items():
        if size % tensor:
            common = math.gcd(*sizes.values())
            legal = [n for n in range(1, common + 1) if common % n == 0]
            nearest = min(legal, key=lambda n: (abs(n - tensor), n))
            raise ConfigError(
                f"model.{field}={size} is not divisible by mesh.tensor={tensor}",
                f"write mesh.tensor: {nearest} (it may be {', '.join(map(str, legal[:8]))}), "
                f"or model.{field}: {-(-size // tensor) * tensor}",
            )


def check_pipeline(shape: DecoderConfig, stages: int, chunks: int) -> None:
    """Sees that every stage has layers; leading dense layers run before the stack and do not count.

    Raises:
      ConfigError: more chunks than layers.
    """
    if stages > 1:
        check_layers(
            shape.num_hidden_layers - (shape.first_k_dense_replace if shape.num_experts else 0), stages, chunks
        )


def check_experts(shape: DecoderConfig, expert: int, context: int) -> None:
    """Sees that `mesh.expert` has experts to divide, and that a row's tokens are together where they share a capacity.

    Args:
      shape: the decoder.
      expert: size of that mesh axis; -1 where it is not known yet.
      context: the same.

    Raises:
      ConfigError: it is not so; the message names the nearest values that would.
    """
    experts = shape.num_experts
    if expert > 1 and not experts:
        raise ConfigError(
            f"mesh.expert={expert}, and the model has no experts: every device of the axis would hold all of it",
            "write mesh.data or mesh.fsdp in place of mesh.expert, or give the model experts (model.num_experts)",
        )
    if expert > 1 and experts % expert:
        legal = [n for n in range(1, experts + 1) if experts % n == 0]
        near = min(legal, key=lambda n: (abs(n - expert), n))
        raise ConfigError(
            f"model.num_experts={experts} is not divisible by mesh.expert={expert}: "
            f"{experts} / {expert} = {experts / expert:.4g} experts a device",
            f"write mesh.expert: {near} (it may be {', '.join(map(str, legal[:8]))}), "
            f"or model.num_experts: {-(-experts // expert) * expert}",
        )
    if context > 1 and shape.expert_capacity_factor:
        raise ConfigError(
            f"model.expert_capacity_factor={shape.expert_capacity_factor:g} with mesh.context={context}: the tokens of "
            "a row share a capacity, and they lie on several devices",
            "write model.expert_capacity_factor: 0 (no token is dropped), or mesh.context: 1",
        )


def experts_name(shape: DecoderConfig, mesh: Mesh, dtype: jnp.dtype) -> str | None:
    """How the experts run on this mesh, for the log; None where there are none.

    Raises:
      ConfigError: a kernel that can't run here.
    """
    if not shape.num_experts:
        return None
    platform = mesh.devices.flat[0].platform
    sizes = shape.hidden_size, shape.expert_size // mesh.shape["tensor"]
    kernel = chosen_expert_kernel(shape.expert_kernel, platform=platform, sizes=sizes, dtype=dtype)
    ways, factor = mesh.shape["expert"], shape.expert_capacity_factor
    if factor:
        text = f"batched products, capacity {factor:g}"
        exchange = "all-to-all"
    else:
        text = f"{kernel}, dropless"
        exchange = "ragged all-to-all" if platform in ("tpu", "gpu") else "all-to-all of worst-case buffers"
    return text if ways == 1 else f"{text}, {exchange} over expert={ways}"


def check_context(config: Config, shape: DecoderConfig, *, context: int, tensor: int) -> Method | None:
    """How the tokens of a row on `context` devices meet; None on one device.

    Raises:
      ConfigError: a length, heads or a kernel that can't be so; the message names the nearest choice that can.
    """
    check_context_length(config, context)
    if context == 1:
        return None
    return context_method(
        config.context.method,
        shape.attention,
        length=config.max_length,
        heads=shape.num_attention_heads,
        kv_heads=shape.kv_heads * kv_repeats(shape, tensor),
        context=context,
        tensor=tensor,
    )


def attention_name(config: Config, shape: DecoderConfig, mesh: Mesh, dtype: jnp.dtype) -> str:
    """What attention runs on this mesh, for the log: a kernel, and how the tokens of a row meet.

    Raises:
      ConfigError: see `check_context`; a kernel that can't run here.
    """
    context = mesh.shape["context"]
    method = check_context(config, shape, context=context, tensor=mesh.shape["tensor"])
    if method == "ring":
        return f"ring over context={context}, {config.context.layout}"
    kernel = chosen_kernel(
        shape.attention,
        platform=mesh.devices.flat[0].platform,
        length=config.max_length,
        head_dim=shape.head_size,
        value_dim=shape.value_size,
        dtype=dtype,
        softcap=shape.attn_logit_softcapping,
        sinks=shape.attention_sinks,
    )
    return kernel if method is None else f"ulysses over context={context}, {kernel}"
