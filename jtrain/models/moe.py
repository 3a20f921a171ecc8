"""Mixture of experts in place of the feed-forward: router, routed experts, shared experts.

Legend: B rows, L tokens, D model, E experts, k experts a token, F width of an expert, G experts of one rank, T tokens
and N = T·k assignments of one device, R rows of a buffer. Lower-case b and l: this device's share.

The layer is one manual region (`jax.shard_map`) over every mesh axis that is not manual already: sorting tokens is a
device's own business, and what is exchanged is said here and not guessed by a partitioner.

| axis | in the region |
|---|---|
| data, fsdp | rows are divided; kernels come whole (fsdp gathers them before, as for every kernel) |
| context | tokens of a row are divided; sums over a row are taken over the axis |
| tensor | F is divided: tokens are gathered over the axis, results added up and cut again by one reduce-scatter |
| expert | experts are divided, and rows as well: tokens travel to the ranks of their experts and back |

An axis that divides nothing here (rows that it does not divide, an odd F) repeats the work; nothing is lost.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jtrain.models import remat
from jtrain.models.config import DecoderConfig
from jtrain.models.feed_forward import activate
from jtrain.models.parameters import constant, normal
from jtrain.models.router import RouterFigures, route
from jtrain.ops.expert_exchange import capacity_of, capacity_slots, dropless, with_capacity
from jtrain.ops.grouped_matmul import grouped_matmul
from jtrain.ops.logical import logical_spec, manual_axes
from jtrain.ops.region import Region, axes_of, free_region

Kernels = dict[str, jax.Array]


class ExpertKernels(nnx.Module):
    """The kernels (and biases) of a gated or plain feed-forward, stacked over `lead` (nothing, or the experts)."""

    def __init__(
        self,
        config: DecoderConfig,
        keys: jax.Array,
        width: int,
        lead: tuple,
        dtype: jnp.dtype,
        *,
        bias: bool = False,
    ):
        sizes, names = tuple(size for _, size in lead), tuple(name for name, _ in lead)
        std, d = config.initializer_range, config.hidden_size
        if config.gated:
            self.gate_proj = normal(keys[0], std, (*sizes, d, width), (*names, "embed", "mlp"), dtype)
        self.up_proj = normal(keys[1], std, (*sizes, d, width), (*names, "embed", "mlp"), dtype)
        self.down_proj = normal(keys[2], std, (*sizes, width, d), (*names, "mlp", "embed"), dtype)
        if bias:
            if config.gated:
                self.gate_bias = constant(0.0, (*sizes, width), (*names, "mlp"), dtype)
            self.up_bias = constant(0.0, (*sizes, width), (*names, "mlp"), dtype)
            self.down_bias = constant(0.0, (*sizes, d), (*names, "embed"), dtype)

    def kernels(self, dtype: jnp.dtype) -> Kernels:
        """Name -> kernel or bias, in the type of the activations."""
        return {name: getattr(self, name)[...].astype(dtype) for name in _NAMES if hasattr(self, name)}


_NAMES = ("gate_proj", "up_proj", "down_proj", "gate_bias", "up_bias", "down_bias")


class MixtureOfExperts(nnx.Module):
    """y = sum over a token's experts of weight · expert(x), plus the shared experts.

    Args:
      config: the decoder; `num_experts` is above 0.
      keys: seven keys, for the router, the three kernels of the experts and those of the shared experts.
      dtype: type of the parameters.
    """

    def __init__(self, config: DecoderConfig, keys: jax.Array, dtype: jnp.dtype):
        self.config = config
        shape = (config.hidden_size, config.num_experts)
        self.router = normal(keys[0], config.initializer_range, shape, ("embed", "router"), dtype)
        experts = (("expert", config.num_experts),)
        if config.router_offset:
            self.router_offset = constant(0.0, (config.num_experts,), ("router",), dtype)
        self.experts = ExpertKernels(config, keys[1:4], config.expert_size, experts, dtype, bias=config.expert_bias)
        if config.n_shared_experts:
            width = config.n_shared_experts * config.expert_size
            self.shared_experts = ExpertKernels(config, keys[4:7], width, (), dtype)

    def __call__(
        self, x_BLD: jax.Array, segment_ids_BL: jax.Array | None, bias_E: jax.Array | None = None
    ) -> tuple[jax.Array, RouterFigures]:
        """Routes every token.

        Args:
          x_BLD: activations.
          segment_ids_BL: 0 for padding: it goes to no expert and counts in no figure; None: there is none.
          bias_E: what is added to the scores for the choice, float32; None: nothing.

        Returns:
          [B, L, D] in the type of x, and the figures of the rows (`load` is [B, E] here).

        Raises:
          ValueError: a capacity where the mesh divides the rows' tokens (`context`): the group would be cut.
        """
        config = self.config
        live_BL = jnp.ones(x_BLD.shape[:2], bool) if segment_ids_BL is None else segment_ids_BL > 0
        weights: dict[str, Any] = {"router": self.router[...], "experts": self.experts.kernels(x_BLD.dtype)}
        if config.n_shared_experts:
            weights["shared"] = self.shared_experts.kernels(x_BLD.dtype)
        if config.router_offset:
            weights["offset"] = self.router_offset[...]
        if bias_E is not None:
            weights["bias"] = bias_E
        region = free_region()
        if region is None:
            return _Local(config, over_tokens=_cut_outside(config)).layer(x_BLD, live_BL, weights)
        return _on_mesh(config, region, x_BLD, live_BL, weights)


def _on_mesh(
    config: DecoderConfig, region: Region, x_BLD: jax.Array, live_BL: jax.Array, weights: dict[str, Any]
) -> tuple[jax.Array, RouterFigures]:
    widths = [config.expert_size] + [config.n_shared_experts * config.expert_size] * bool(config.n_shared_experts)
    tensor = region.axis("mlp", "tensor", *widths)
    expert = region.axis("expert", "expert", config.num_experts)
    # Where F is not divided, tokens are: but a capacity is shared by a whole row.
    whole = config.expert_capacity_factor > 0 and tensor is None
    sequence = "sequence" if whole else "residual_sequence"
    x_spec = logical_spec(x_BLD.shape, "batch", sequence, None)
    over_L = axes_of(x_spec[1])
    if config.expert_capacity_factor and set(over_L) - {tensor}:
        raise ValueError(_CUT.format(", ".join(over_L)))
    local = _Local(
        config,
        tensor=tensor,
        gathered=tensor is not None and tensor in over_L,
        expert=expert,
        ranks=region.size(expert),
        over_tokens=tuple(axis for axis in over_L if axis != tensor) + _cut_outside(config),
        ragged=region.platform in ("tpu", "gpu"),
    )
    into, out = PartitionSpec(None, tensor), PartitionSpec(tensor, None)
    wide, narrow = PartitionSpec(tensor), PartitionSpec()
    place = {"gate_proj": into, "up_proj": into, "down_proj": out}
    place |= {"gate_bias": wide, "up_bias": wide, "down_bias": narrow}
    specs: dict[str, Any] = {
        "router": PartitionSpec(),
        "experts": {name: PartitionSpec(expert, *place[name]) for name in weights["experts"]},
        "offset": PartitionSpec(),
        "bias": PartitionSpec(),
        "shared": {name: place[name] for name in weights.get("shared", ())},
    }
    row_spec = PartitionSpec(x_spec[0])
    figures = RouterFigures(row_spec, row_spec, PartitionSpec(x_spec[0], None), row_spec)
    return region.shard_map(
        local.layer,
        in_specs=(x_spec, PartitionSpec(*x_spec[:2]), {name: specs[name] for name in weights}),
        out_specs=(x_spec, figures),
    )(x_BLD, live_BL, weights)


class _Local:
    """The layer on one device: what it holds, and the manual axes that it talks over.

    Args:
      config: the decoder.
      tensor: axis that divides F.
      gathered: whether it also divides the tokens outside.
      expert: axis that divides the experts.
      ranks: its size.
      over_tokens: further axes that divide a row's tokens.
      ragged: whether the backend has a ragged all-to-all.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        tensor: str | None = None,
        gathered: bool = False,
        expert: str | None = None,
        ranks: int = 1,
        over_tokens: tuple[str, ...] = (),
        ragged: bool = False,
    ):
        self.config = config
        self.tensor, self.gathered, self.over_tokens = tensor, gathered, over_tokens
        self.expert, self.ranks, self.ragged = expert, ranks, ragged

    def layer(self, x_blD: jax.Array, live_bl: jax.Array, weights: dict[str, Any]) -> tuple[jax.Array, RouterFigures]:
        if self.gathered:
            assert self.tensor is not None
            x_blD, live_bl = (jax.lax.all_gather(a, self.tensor, axis=1, tiled=True) for a in (x_blD, live_bl))
        wide = jnp.promote_types(x_blD.dtype, jnp.float32)
        logits_blE = jnp.einsum(
            "bld,de->ble",
            x_blD.astype(wide),
            weights["router"].astype(wide),
            precision=jax.lax.Precision.HIGHEST,  # a choice hangs on it, and it is a thousandth of the work
        )
        if "offset" in weights:
            logits_blE = logits_blE + weights["offset"].astype(wide)
        routing = route(self.config, logits_blE, weights.get("bias"))
        expert_blk = jnp.where(live_bl[..., None], routing.expert, self.config.num_experts)
        y_Nd, dropped_b = self._routed(x_blD, expert_blk, weights["experts"])
        weight_blk = jnp.where(live_bl[..., None], routing.weight, 0)
        y_blkD = y_Nd.reshape(*weight_blk.shape, -1)
        y_blD = jnp.einsum("blkd,blk->bld", y_blkD, weight_blk, preferred_element_type=wide).astype(x_blD.dtype)
        if "shared" in weights:
            y_blD = y_blD + self._feed_forward(x_blD, weights["shared"], "bl")
        if self.gathered:
            y_blD = jax.lax.psum_scatter(y_blD, self.tensor, scatter_dimension=1, tiled=True)
        elif self.tensor is not None:
            y_blD = jax.lax.psum(y_blD, self.tensor)
        figures = self._figures(logits_blE, routing.share, expert_blk, live_bl, dropped_b)
        return checkpoint_name(y_blD, remat.OUT), figures

    def _routed(self, x_blD: jax.Array, expert_blk: jax.Array, kernels: Kernels) -> tuple[jax.Array, jax.Array]:
        """Every assignment's result [N, D], and how many of each row's were dropped [b]."""
        config = self.config
        rows, length, k = expert_blk.shape
        x_TD = x_blD.reshape(rows * length, -1)
        if not config.expert_capacity_factor:
            y_ND = dropless(
                x_TD, expert_blk.reshape(-1), config.num_experts, functools.partial(self._grouped, kernels),
                self.expert, self.ranks, ragged=self.ragged,
            )  # fmt: skip
            return y_ND, jnp.zeros(rows, jnp.int32)
        capacity = capacity_of(length, k, config.num_experts, config.expert_capacity_factor)
        slot_blk = capacity_slots(expert_blk, config.num_experts, capacity)
        y_ND = with_capacity(
            x_TD, expert_blk, slot_blk, config.num_experts, capacity,
            lambda x_GRD: self._feed_forward(x_GRD, kernels, "g", stacked=True), self.expert, self.ranks,
        )  # fmt: skip
        return y_ND, ((slot_blk < 0) & (expert_blk < config.num_experts)).sum((1, 2))

    def _grouped(self, kernels: Kernels, x_RD: jax.Array, sizes_G: jax.Array) -> jax.Array:
        """Experts on rows sorted by expert."""
        bias_of = None
        if "up_bias" in kernels:
            groups = jnp.arange(sizes_G.shape[0])
            bias_of = jnp.repeat(groups, sizes_G, total_repeat_length=x_RD.shape[0])

        def product(x: jax.Array, name: str) -> jax.Array:
            y = grouped_matmul(x, kernels[f"{name}_proj"], sizes_G, kernel=self.config.expert_kernel)
            if bias_of is not None:
                y = y + self._bias(kernels, name)[bias_of]
            return checkpoint_name(y, remat.EXPERTS)

        return self._apply(product, x_RD, kernels)

    def _feed_forward(self, x: jax.Array, kernels: Kernels, lead: str, *, stacked: bool = False) -> jax.Array:
        """Feed-forward on [*lead, D], or of stacked kernels on [G, R, D]."""
        equation = "grk,gkm->grm" if stacked else f"{lead}k,km->{lead}m"

        def product(x: jax.Array, name: str) -> jax.Array:
            y = jnp.einsum(equation, x, kernels[f"{name}_proj"])
            if f"{name}_bias" in kernels:
                y = y + self._bias(kernels, name)[:, None]
            return checkpoint_name(y, remat.EXPERTS) if stacked else y

        return self._apply(product, x, kernels)

    def _apply(self, product: Any, x: jax.Array, kernels: Kernels) -> jax.Array:
        gate = product(x, "gate") if "gate_proj" in kernels else None
        return product(activate(self.config, product(x, "up"), gate), "down")

    def _bias(self, kernels: Kernels, name: str) -> jax.Array:
        """[G, width]. Results of `tensor` are added up, so only one of its devices brings the last bias."""
        bias = kernels[f"{name}_bias"]
        if name == "down" and self.tensor is not None:
            bias = bias * (jax.lax.axis_index(self.tensor) == 0).astype(bias.dtype)
        return bias

    def _figures(
        self, logits_blE: jax.Array, share_blE: jax.Array, expert_blk: jax.Array, live_bl: jax.Array, dropped_b: Any
    ) -> RouterFigures:
        """Means over the live tokens of every row; see `jtrain.models.router`."""
        config, dtype = self.config, logits_blE.dtype

        def total(x: jax.Array) -> jax.Array:
            return jax.lax.psum(x, self.over_tokens) if self.over_tokens else x

        mask_bl1 = live_bl[..., None]
        load_bE = (expert_blk[..., None] == jnp.arange(config.num_experts)).sum((1, 2)).astype(dtype)
        z_bl = jnp.where(live_bl, jax.nn.logsumexp(logits_blE, axis=-1) ** 2, 0)
        sums = (live_bl.sum(1).astype(dtype), jnp.where(mask_bl1, share_blE, 0).sum(1), load_bE, z_bl.sum(1))
        tokens_b, share_bE, load_bE, z_b = total(sums)
        tokens_b = jnp.maximum(tokens_b, 1)  # of an empty row every sum is 0
        even = config.num_experts / config.num_experts_per_tok
        balance_b = even * (jax.lax.stop_gradient(load_bE) * share_bE).sum(1) / tokens_b**2
        return RouterFigures(balance_b, z_b / tokens_b, load_bE, dropped_b.astype(dtype))


def _cut_outside(config: DecoderConfig) -> tuple[str, ...]:
    """Axes of an enclosing manual region that divide the tokens of a row."""
    axes = manual_axes("sequence")
    if config.expert_capacity_factor and axes:
        raise ValueError(_CUT.format(", ".join(axes)))
    return axes


_CUT = "expert_capacity_factor where {} divides the tokens of a row: they share a capacity"
