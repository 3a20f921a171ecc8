"""Attention: one entry, three kernels, and the rule that chooses among them; two ways across devices.

Legend: B rows, L tokens, H query heads, K key-value heads, G = H / K query heads a group, Dh size of queries and keys,
Dv size of values.

| kernel | where | how it keeps documents apart | soft cap and sinks | windows that differ by layer |
|---|---|---|---|---|
| xla | everywhere | a mask; queries in blocks, so that no [L, L] scores exist in long rows | yes | a traced number |
| splash | TPU (Pallas) | segment ids, in the kernel | yes | one kernel a size |
| cudnn | NVIDIA, bf16 or f16 | a mask [B, 1, L, L], shared by the heads | no | one kernel a size |

Where the tokens of a row are cut over devices (`sequence`), `jtrain.ops.context` says how they meet: by ring attention,
which computes in blocks of its own, or by ulysses, which runs one of these kernels on whole rows.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jtrain.errors import ConfigError
from jtrain.ops.context import RESULT, context_method, context_ways, current_options
from jtrain.ops.cudnn import cudnn_attention
from jtrain.ops.logical import current_mesh, mesh_axis_size
from jtrain.ops.ring_attention import ring_attention
from jtrain.ops.splash import splash_attention
from jtrain.ops.ulysses import ulysses_attention
from jtrain.ops.window import Window, WindowChoice, simplified
from jtrain.ops.xla_attention import xla_attention
from jtrain.ops.zigzag import zigzag_ways

__all__ = ["Kernel", "WindowChoice", "attention", "chosen_kernel", "platform"]

Kernel = Literal["xla", "splash", "cudnn"]


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    causal: bool = True,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    kernel: Literal["auto", "xla", "splash", "cudnn"] = "auto",
) -> jax.Array:
    """Softmax attention of grouped heads: query head h reads key-value head h // G.

    Args:
      q: queries [B, L, H, Dh].
      k: keys [B, L, K, Dh]; K divides H.
      v: values [B, L, K, Dv].
      segment_ids: document of each token [B, L]; a token sees tokens of its own segment only.
      causal: whether a token sees only itself and what comes before.
      window: with `causal`, how many tokens it sees, itself included; a `WindowChoice` may differ by layer of a scan.
      scale: factor on the scores; 1 / sqrt(Dh) by default.
      softcap: bounds the scaled scores before the mask: softcap * tanh(score / softcap) (Gemma 2, arXiv:2408.00118,
        section 2).
      sinks: a logit of every query head [H] that joins the sum of each of its softmaxes and has no value, so that the
        weights may sum to less than one (gpt-oss; Xiao et al. 2023, arXiv:2309.17453).
      kernel: which kernel; auto chooses by the platform of the mesh in force and by shape.

    Returns:
      [B, L, H, Dv] in the type of q. It bears the name `RESULT` for remat policies, and so does, under the ring, what
      else its backward pass needs.

    Raises:
      ConfigError: the kernel can't run here, or not with this shape, type or form of the softmax.
      ValueError: a window without `causal` or of no tokens, a soft cap that is not positive, sinks of another shape.
    """
    length, heads = q.shape[1], q.shape[2]
    window = simplified(window, length)
    if window is not None and not causal:
        raise ValueError("window needs causal=True")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap is {softcap}; write a positive number, or None")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks of shape {sinks.shape} for {heads} query heads")
    mask = _Mask(causal, window, q.shape[-1] ** -0.5 if scale is None else scale, softcap)
    ways = context_ways(length)
    if ways > 1:
        return _across_devices(q, k, v, segment_ids, sinks, mask, kernel, ways)
    return checkpoint_name(_plain(_chosen(kernel, q, v, sinks, mask), q, k, v, segment_ids, sinks, mask), RESULT)


class _Mask(NamedTuple):
    causal: bool
    window: Window
    scale: float
    softcap: float | None


def _chosen(
    kernel: Literal["auto", "xla", "splash", "cudnn"], q: jax.Array, v: jax.Array, sinks: jax.Array | None, mask: _Mask
) -> Kernel:
    return chosen_kernel(
        kernel,
        platform=platform(),
        length=q.shape[1],
        head_dim=q.shape[-1],
        value_dim=v.shape[-1],
        dtype=q.dtype,
        softcap=mask.softcap,
        sinks=sinks is not None,
    )


def _plain(
    name: Kernel,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    sinks: jax.Array | None,
    mask: _Mask,
) -> jax.Array:
    """A kernel over whole rows. Splash and cuDNN run on every device's own rows and heads."""
    if name == "cudnn":
        return cudnn_attention(
            q, k, v, segment_ids=segment_ids, causal=mask.causal, window=mask.window, scale=mask.scale
        )
    function = splash_attention if name == "splash" else xla_attention
    return function(q, k, v, segment_ids=segment_ids, sinks=sinks, **mask._asdict())


def _across_devices(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    sinks: jax.Array | None,
    mask: _Mask,
    kernel: Literal["auto", "xla", "splash", "cudnn"],
    ways: int,
) -> jax.Array:
    """Attention over rows whose tokens are cut over `ways` devices."""
    method = context_method(
        current_options().method,
        kernel,
        length=q.shape[1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        context=ways,
        tensor=mesh_axis_size("heads"),
    )
    if method == "ring":
        return ring_attention(q, k, v, segment_ids=segment_ids, sinks=sinks, **mask._asdict())
    if zigzag_ways() > 1:
        raise ValueError("ulysses takes rows in natural order")
    name = _chosen(kernel, q, v, sinks, mask)
    sizes, index = mask.window if isinstance(mask.window, WindowChoice) else (None, None)

    def local(q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, sinks: Any, index: Any) -> jax.Array:
        here = mask if sizes is None else mask._replace(window=WindowChoice(sizes, index))
        return _plain(name, q, k, v, segments, sinks, here)

    out = ulysses_attention(q, k, v, segment_ids=segment_ids, sinks=sinks, index=index, local=local)
    return checkpoint_name(out, RESULT)


def platform() -> str:
    """cpu, gpu or tpu: that of the mesh in force, which may be one of devices that are not here."""
    mesh = current_mesh()
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform


def chosen_kernel(
    kernel: Literal["auto", "xla", "splash", "cudnn"],
    *,
    platform: str,
    length: int,
    head_dim: int,
    dtype: jnp.dtype,
    value_dim: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> Kernel:
    """The kernel that `attention` runs.

    Args:
      kernel: what the config says.
      platform: cpu, gpu or tpu.
      length: tokens of a row.
      head_dim: size of the queries and keys of a head.
      dtype: compute type.
      value_dim: size of the values of a head, where it is another.
      softcap: bound of the scores.
      sinks: whether the softmaxes have sinks.

    Raises:
      ConfigError: a kernel that was asked for by name can't run so; the message says why.
    """
    platform = "gpu" if platform in ("cuda", "rocm") else platform
    largest = max(head_dim, value_dim or 0)
    if kernel == "xla":
        return "xla"

    def objection(kernel: str) -> str | None:
        return _objection(kernel, platform, length, largest, dtype, softcap, sinks)

    if kernel == "auto":
        for candidate in ("splash", "cudnn"):
            if objection(candidate) is None:
                return candidate
        return "xla"
    reason = objection(kernel)
    if reason is not None:
        raise ConfigError(f"model.attention is {kernel!r}, but {reason}", "Write auto, or xla, which runs everywhere.")
    return kernel


def _objection(
    kernel: str, platform: str, length: int, head_dim: int, dtype: jnp.dtype, softcap: float | None, sinks: bool
) -> str | None:
    half = jnp.dtype(dtype) in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
    if kernel == "splash":
        if platform != "tpu":
            return f"splash runs on TPU and this is {platform}"
        if length % 128:
            return f"splash needs rows of a multiple of 128 tokens and these have {length}"
        if jnp.dtype(dtype) == jnp.dtype(jnp.float64):
            return "splash does not compute in float64"
    else:
        if platform != "gpu":
            return f"cudnn runs on NVIDIA GPUs and this is {platform}"
        if not half:
            return f"cudnn computes in bfloat16 or float16 and the precision here is {jnp.dtype(dtype).name}"
        if head_dim % 8 or head_dim > 128:
            return f"cudnn needs heads of a multiple of 8 and at most 128, and these have {head_dim}"
        if length % 2:
            return f"cudnn needs rows of an even number of tokens and these have {length}"
        if softcap is not None:
            return f"cudnn has no soft cap of scores, and model.attn_logit_softcapping is {softcap}"
        if sinks:
            return "cudnn has no attention sinks, and model.attention_sinks is true"
    return None
