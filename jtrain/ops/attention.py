"""Attention: one entry, three kernels, and the rule that chooses among them; two ways across devices.

Legend: B rows, L tokens, H query heads, K key-value heads, G = H / K query heads a group, Dh head size.

| kernel | where | how it keeps documents apart |
|---|---|---|
| xla | everywhere | a mask; queries in blocks, so that no [L, L] scores exist in long rows |
| splash | TPU (Pallas) | segment ids, in the kernel |
| cudnn | NVIDIA, bf16 or f16 | a mask [B, 1, L, L], shared by the heads |

Where the tokens of a row are cut over devices (`sequence`), `jtrain.ops.context` says how they meet: by ring attention,
which computes in blocks of its own, or by ulysses, which runs one of these kernels on whole rows.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jtrain.errors import ConfigError
from jtrain.ops.context import RESULT, context_method, context_ways, current_options
from jtrain.ops.logical import current_mesh, mesh_axis_size
from jtrain.ops.region import by_device
from jtrain.ops.ring_attention import ring_attention
from jtrain.ops.splash import splash_attention
from jtrain.ops.ulysses import ulysses_attention
from jtrain.ops.xla_attention import xla_attention
from jtrain.ops.zigzag import zigzag_ways

Kernel = Literal["xla", "splash", "cudnn"]


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    kernel: Literal["auto", "xla", "splash", "cudnn"] = "auto",
) -> jax.Array:
    """Softmax attention of grouped heads: query head h reads key-value head h // G.

    Args:
      q: queries [B, L, H, Dh].
      k: keys [B, L, K, Dh]; K divides H.
      v: values [B, L, K, Dh].
      segment_ids: document of each token [B, L]; a token sees tokens of its own segment only.
      causal: whether a token sees only itself and what comes before.
      window: with `causal`, how many tokens it sees, itself included.
      scale: factor on the scores; 1 / sqrt(Dh) by default.
      kernel: which kernel; auto chooses by the platform of the mesh in force and by shape.

    Returns:
      [B, L, H, Dh] in the type of q. It bears the name `RESULT` for remat policies, and so does, under the ring, what
      else its backward pass needs.

    Raises:
      ConfigError: the kernel can't run here, or not with this shape or type.
      ValueError: a window without `causal`.
    """
    if window is not None and not causal:
        raise ValueError("window needs causal=True")
    mask = _Mask(causal, window, q.shape[-1] ** -0.5 if scale is None else scale)
    ways = context_ways(q.shape[1])
    if ways > 1:
        return _across_devices(q, k, v, segment_ids, mask, kernel, ways)
    name = chosen_kernel(kernel, platform=platform(), length=q.shape[1], head_dim=q.shape[-1], dtype=q.dtype)
    return checkpoint_name(_plain(name, q, k, v, segment_ids, mask), RESULT)


class _Mask(NamedTuple):
    causal: bool
    window: int | None
    scale: float


def _plain(
    name: Kernel, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, mask: _Mask
) -> jax.Array:
    """A kernel over whole rows. Splash and cuDNN run on every device's own rows and heads."""
    if name == "splash":
        return splash_attention(q, k, v, segment_ids=segment_ids, **mask._asdict())
    if name == "cudnn":

        def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None = None) -> jax.Array:
            same = None if segments is None else (segments[:, None, :, None] == segments[:, None, None, :])
            local = None if mask.window is None else (mask.window - 1, 0)
            return jax.nn.dot_product_attention(
                q, k, v, mask=same, scale=mask.scale, is_causal=mask.causal, local_window_size=local,
                implementation="cudnn",
            )  # fmt: skip

        return by_device(cudnn, q, k, v, segment_ids)
    return xla_attention(q, k, v, segment_ids=segment_ids, **mask._asdict())


def _across_devices(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    mask: _Mask,
    kernel: Literal["auto", "xla", "splash", "cudnn"],
    ways: int,
) -> jax.Array:
    """Attention over rows whose tokens are cut over `ways` devices."""
    _, length, heads, head_dim = q.shape
    method = context_method(
        current_options().method,
        kernel,
        length=length,
        heads=heads,
        kv_heads=k.shape[2],
        context=ways,
        tensor=mesh_axis_size("heads"),
    )
    if method == "ring":
        return ring_attention(q, k, v, segment_ids=segment_ids, **mask._asdict())
    if zigzag_ways() > 1:
        raise ValueError("ulysses takes rows in natural order")
    name = chosen_kernel(kernel, platform=platform(), length=length, head_dim=head_dim, dtype=q.dtype)

    def local(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
        return _plain(name, q, k, v, segments, mask)

    return checkpoint_name(ulysses_attention(q, k, v, segment_ids=segment_ids, local=local), RESULT)


def platform() -> str:
    """cpu, gpu or tpu: that of the mesh in force, which may be one of devices that are not here."""
    mesh = current_mesh()
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform


def chosen_kernel(
    kernel: Literal["auto", "xla", "splash", "cudnn"], *, platform: str, length: int, head_dim: int, dtype: jnp.dtype
) -> Kernel:
    """The kernel that `attention` runs.

    Args:
      kernel: what the config says.
      platform: cpu, gpu or tpu.
      length: tokens of a row.
      head_dim: size of a head.
      dtype: compute type.

    Raises:
      ConfigError: a kernel that was asked for by name can't run so; the message says why.
    """
    platform = "gpu" if platform in ("cuda", "rocm") else platform
    if kernel == "xla":
        return "xla"
    if kernel == "auto":
        for candidate in ("splash", "cudnn"):
            if _objection(candidate, platform, length, head_dim, dtype) is None:
                return candidate
        return "xla"
    objection = _objection(kernel, platform, length, head_dim, dtype)
    if objection is not None:
        raise ConfigError(
            f"model.attention is {kernel!r}, but {objection}", "Write auto, or xla, which runs everywhere."
        )
    return kernel


def _objection(kernel: str, platform: str, length: int, head_dim: int, dtype: jnp.dtype) -> str | None:
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
    return None
