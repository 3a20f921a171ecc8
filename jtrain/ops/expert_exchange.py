"""Tokens on their way to experts and back: sorted by expert, exchanged over a mesh axis, brought home.

Legend: T tokens, k experts a token, N = T·k assignments (t·k + j is token t's j-th expert), E experts, P ranks of the
axis, G = E / P experts of a rank, R rows of a buffer, D model.

All of it is copying rows by index, one to one: `take_rows` does it with gathers in both directions, so that the
backward pass adds nothing up by scatter (slow on a TPU, in no fixed order on a GPU). Index -1 is a row of zeros.

Three ways over the axis:

| way | where | rows that a rank receives | bytes that it sends |
|---|---|---|---|
| ragged | TPU and GPU (`jax.lax.ragged_all_to_all`) | P·N at worst: the buffer; what is computed is what came | N·D |
| dense | elsewhere | P·N, mostly empty: every rank may send all that it has | P·N·D |
| capacity | everywhere | capacity_factor·N | capacity_factor·N·D |

The first two lose no token, whatever the router chooses.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def take_rows(x_TD: jax.Array, source_R: jax.Array, target_N: jax.Array, k: int) -> jax.Array:
    """Row r of the result is row `source_R[r] // k` of x; zeros where the source is -1.

    Args:
      x_TD: rows [T, D].
      source_R: int32, index in 0..T·k-1, each at most once; or -1.
      target_N: int32 [T·k], the inverse: where an index went; or -1.
      k: copies of each row.
    """
    return _take(x_TD, source_R, k)


def _take(x_TD: jax.Array, index_R: jax.Array, k: int = 1) -> jax.Array:
    rows = x_TD.at[jnp.maximum(index_R, 0) // k].get(mode="promise_in_bounds")
    return jnp.where((index_R >= 0)[:, None], rows, 0)


def _take_forward(x_TD: jax.Array, source_R: jax.Array, target_N: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    return _take(x_TD, source_R, k), target_N


def _take_backward(k: int, target_N: jax.Array, ct_RD: jax.Array) -> tuple[jax.Array, None, None]:
    ct_ND = _take(ct_RD, target_N)
    wide = jnp.promote_types(ct_ND.dtype, jnp.float32)
    return ct_ND.reshape(-1, k, ct_ND.shape[-1]).sum(1, dtype=wide).astype(ct_ND.dtype), None, None


take_rows.defvjp(_take_forward, _take_backward)


def inverse(index_R: jax.Array, size: int) -> jax.Array:
    """The inverse [size] of a partial one-to-one index: where each number stands, -1 where it does not occur."""
    places = jnp.where(index_R >= 0, index_R, size)
    return jnp.full(size, -1, jnp.int32).at[places].set(jnp.arange(index_R.shape[0], dtype=jnp.int32), mode="drop")


def sort_by_expert(expert_N: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
    """Assignments in the order of their experts, and of their numbers within one.

    Args:
      expert_N: int32, the expert of every assignment; `experts` for one that goes nowhere.
      experts: E.

    Returns:
      source [N]: the assignment that stands at each place, -1 after the last that goes anywhere; sizes [E].
    """
    order_N = jnp.argsort(expert_N, stable=True).astype(jnp.int32)
    sizes_E = (expert_N[:, None] == jnp.arange(experts)).sum(0, dtype=jnp.int32)
    return jnp.where(jnp.arange(expert_N.shape[0]) < sizes_E.sum(), order_N, -1), sizes_E


Compute = Callable[[jax.Array, jax.Array], jax.Array]
"""`compute(x_RD, sizes_G)`: the rank's experts on rows that are sorted by expert; the same shape."""


def dropless(
    x_TD: jax.Array, expert_N: jax.Array, experts: int, compute: Compute, axis: str | None, ranks: int, *, ragged: bool
) -> jax.Array:
    """Brings every token to its experts and the results back, over a manual mesh axis where there is one.

    Args:
      x_TD: tokens of this rank.
      expert_N: int32, expert of every assignment; `experts` for one that goes nowhere.
      experts: E, over all ranks.
      compute: the rank's experts.
      axis: manual mesh axis that divides the experts; None: all are here.
      ranks: P, its size.
      ragged: whether the backend has `ragged_all_to_all`.

    Returns:
      [N, D]: the result of every assignment, zeros for one that goes nowhere.
    """
    assignments = expert_N.shape[0]
    k = assignments // x_TD.shape[0]
    source_N, sizes_E = sort_by_expert(expert_N, experts)
    target_N = inverse(source_N, assignments)
    if axis is None:
        y_ND = compute(take_rows(x_TD, source_N, target_N, k), sizes_E)
        return take_rows(y_ND, target_N, source_N, 1)
    mine = experts // ranks
    all_PE = jax.lax.all_gather(sizes_E, axis)
    here = jax.lax.axis_index(axis)
    received_PG = jax.lax.dynamic_slice_in_dim(all_PE, here * mine, mine, axis=1)
    if ragged:
        plan = _RaggedPlan.make(all_PE, here, axis, ranks, assignments)
        sent = take_rows(x_TD, source_N, target_N, k)
        arrived = plan.there(sent)
        flat = jnp.searchsorted(jnp.cumsum(received_PG.reshape(-1)), jnp.arange(ranks * assignments), side="right")
        group_R = jnp.where(flat < ranks * mine, flat % mine, mine)
    else:
        slot_N = _slots(expert_N, sizes_E, target_N, mine, assignments)
        source_R = inverse(slot_N, ranks * assignments)
        arrived = _all_to_all(take_rows(x_TD, source_R, slot_N, k), axis, ranks)
        ends_PG = jnp.cumsum(received_PG, axis=1)
        group_R = jax.vmap(lambda ends: jnp.searchsorted(ends, jnp.arange(assignments), side="right"))(ends_PG)
        group_R = group_R.reshape(-1)
    order_R, sizes_G = sort_by_expert(group_R.astype(jnp.int32), mine)
    place_R = inverse(order_R, ranks * assignments)
    y_RD = compute(take_rows(arrived, order_R, place_R, 1), sizes_G)
    y_RD = take_rows(y_RD, place_R, order_R, 1)
    if ragged:
        return take_rows(plan.back(y_RD), target_N, source_N, 1)
    return take_rows(_all_to_all(y_RD, axis, ranks), slot_N, source_R, 1)


def _all_to_all(x_RD: jax.Array, axis: str, ranks: int) -> jax.Array:
    """Slot p of the rows goes to rank p, whose slots are then those of its senders."""
    return jax.lax.all_to_all(x_RD, axis, 0, 0, tiled=True) if ranks > 1 else x_RD


def _slots(expert_N: jax.Array, sizes_E: jax.Array, target_N: jax.Array, mine: int, slot: int) -> jax.Array:
    """Row of the send buffer of each assignment, -1 for one that goes nowhere: a slot of `slot` rows a rank."""
    starts_P = (jnp.cumsum(sizes_E) - sizes_E)[::mine]
    rank_N = jnp.minimum(expert_N // mine, starts_P.shape[0] - 1)
    return jnp.where(target_N >= 0, rank_N * slot + target_N - starts_P[rank_N], -1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class _RaggedPlan:
    """Offsets and sizes of a ragged exchange, and of its way back."""

    axis: str
    rows: int
    arrived: int
    send_starts_P: jax.Array
    send_sizes_P: jax.Array
    remote_starts_P: jax.Array
    receive_sizes_P: jax.Array
    receive_starts_P: jax.Array
    remote_send_starts_P: jax.Array

    @staticmethod
    def make(all_PE: jax.Array, here: jax.Array, axis: str, ranks: int, rows: int) -> _RaggedPlan:
        """From the sizes [source rank, expert], which every rank knows."""
        from_to_PP = all_PE.reshape(ranks, ranks, -1).sum(-1)
        send_starts_PP = jnp.cumsum(from_to_PP, axis=1) - from_to_PP  # in the buffer of the sender
        receive_starts_PP = jnp.cumsum(from_to_PP, axis=0) - from_to_PP  # in the buffer of the receiver
        return _RaggedPlan(
            axis=axis,
            rows=rows,
            arrived=ranks * rows,
            send_starts_P=send_starts_PP[here],
            send_sizes_P=from_to_PP[here],
            remote_starts_P=receive_starts_PP[here],
            receive_sizes_P=from_to_PP[:, here],
            receive_starts_P=receive_starts_PP[:, here],
            remote_send_starts_P=send_starts_PP[:, here],
        )

    def there(self, x_ND: jax.Array) -> jax.Array:
        return jax.lax.ragged_all_to_all(
            x_ND, jnp.zeros((self.arrived, x_ND.shape[1]), x_ND.dtype), self.send_starts_P, self.send_sizes_P,
            self.remote_starts_P, self.receive_sizes_P, axis_name=self.axis,
        )  # fmt: skip

    def back(self, y_RD: jax.Array) -> jax.Array:
        return jax.lax.ragged_all_to_all(
            y_RD, jnp.zeros((self.rows, y_RD.shape[1]), y_RD.dtype), self.receive_starts_P, self.receive_sizes_P,
            self.remote_send_starts_P, self.send_sizes_P, axis_name=self.axis,
        )  # fmt: skip


def capacity_of(length: int, k: int, experts: int, factor: float) -> int:
    """Tokens of one row of `length` that an expert takes: ceil(factor · length · k / experts), at most all of them."""
    return min(-int(-factor * length * k // experts), length)


def capacity_slots(expert_BLk: jax.Array, experts: int, capacity: int) -> jax.Array:
    """Place of every assignment within its expert and row; -1 for one that is dropped or goes nowhere.

    The group that shares a capacity is the row (GShard, Lepikhin et al. 2021, section 2.2: groups), so that neither
    accumulation nor the mesh changes what is dropped. First choices go before second ones, then earlier tokens before
    later ones.

    Args:
      expert_BLk: int32; `experts` for an assignment that goes nowhere.
      experts: E.
      capacity: tokens of a row that an expert takes.

    Returns:
      int32 [B, L, k], below `capacity`.
    """
    _, length, k = expert_BLk.shape

    def one(expert_Lk: jax.Array) -> jax.Array:
        expert_M = expert_Lk.T.reshape(-1)  # choices first
        order_M = jnp.argsort(expert_M, stable=True)
        sorted_M = expert_M[order_M]
        place_M = jnp.arange(length * k) - jnp.searchsorted(sorted_M, sorted_M)  # less where its expert begins
        keep_M = (place_M < capacity) & (sorted_M < experts)
        slot_M = jnp.zeros(length * k, jnp.int32).at[order_M].set(jnp.where(keep_M, place_M, -1).astype(jnp.int32))
        return slot_M.reshape(k, length).T

    return jax.vmap(one)(expert_BLk)


def with_capacity(
    x_TD: jax.Array, expert_BLk: jax.Array, slot_BLk: jax.Array, experts: int, capacity: int,
    compute: Callable[[jax.Array], jax.Array], axis: str | None, ranks: int,
) -> jax.Array:  # fmt: skip
    """Brings the tokens that have a slot to their experts and the results back.

    Args:
      x_TD: tokens of this rank, T = B·L.
      expert_BLk: expert of every assignment.
      slot_BLk: what `capacity_slots` says.
      experts: E, over all ranks.
      capacity: tokens of a row that an expert takes.
      compute: the rank's experts, [G, R, D] -> [G, R, D].
      axis: manual mesh axis that divides the experts; None: all are here.
      ranks: P, its size.

    Returns:
      [N, D]: the result of every assignment, zeros for one that has no slot.
    """
    rows, _, k = expert_BLk.shape
    row_B11 = jnp.arange(rows)[:, None, None]
    places = (expert_BLk * rows + row_B11) * capacity + slot_BLk
    target_N = jnp.where(slot_BLk >= 0, places, -1).astype(jnp.int32).reshape(-1)
    source_R = inverse(target_N, experts * rows * capacity)
    x_ERD = take_rows(x_TD, source_R, target_N, k).reshape(experts, rows * capacity, -1)
    if axis is None:
        y_ERD = compute(x_ERD)
    else:
        y = compute(jax.lax.all_to_all(x_ERD, axis, 0, 1, tiled=True))
        y_ERD = jax.lax.all_to_all(y, axis, 1, 0, tiled=True)
    return take_rows(y_ERD.reshape(experts * rows * capacity, -1), target_N, source_R, 1)
