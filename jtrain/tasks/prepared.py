"""What a loss of preferences reads of a whole global batch, computed before the step and put into the batch.

The reference's log-probabilities, KTO's estimate, AOT's sorting and the number of tokens of a cross-entropy are
functions of the global batch: computed here, micro-batch after micro-batch, they are the same with any accumulation and
on any mesh, and the step with its pipeline sees plain arrays [A, b]. Parameters of policy and reference are arguments.

Legend: A micro-batches, b rows of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jtrain.tasks.kto import single_sequences
from jtrain.tasks.preference import HALVES, PARTNERS, Batch, Preference, halves, pair_sequences, score_sequences
from jtrain.tasks.preference_losses import PairLogps, find_partners, kto_kl

Added = dict[str, jax.Array]


def added_names(preference: Preference) -> tuple[str, ...]:
    """What the reference adds to a batch: names of arrays [A, b]."""
    kind = preference.kinds[0]
    if preference.unpaired:
        return ("ref_logps", "ref_kl_logps") if kind == "kto" else ("ref_logps",)
    return tuple(f"ref_{half}_logps" for half in HALVES) if preference.needs_reference else ()


def sequence_logps(preference: Preference, *, singles_too: bool = True) -> Callable[[nnx.Module, Batch], Added]:
    """`function(model, batch) -> name -> log-probabilities [A, b]` of a batch, nothing random.

    Names are chosen and rejected for pairs; logps and kl_logps for single completions.

    Args:
      preference: what is computed.
      singles_too: False: for KTO the mismatched sequences alone.
    """
    kind = preference.kinds[0]

    def of(model: nnx.Module, sequences: Any) -> jax.Array:
        return score_sequences(model, sequences, chunk_size=preference.chunk_size, figures=False)[0].logps

    def one(model: nnx.Module, micro: Batch) -> Added:
        if not preference.unpaired:
            return dict(zip(HALVES, halves(of(model, pair_sequences(micro, preference))), strict=True))
        found = {"logps": of(model, single_sequences(micro))} if singles_too else {}
        return found | ({"kl_logps": of(model, single_sequences(micro, "kl_"))} if kind == "kto" else {})

    def over_micro_batches(model: nnx.Module, batch: Batch) -> Added:
        return jax.lax.map(lambda micro: one(model, micro), batch)

    return over_micro_batches


def of_reference(found: dict[str, Any]) -> dict[str, Any]:
    """What `sequence_logps` returns, by the names of `added_names`."""
    return {f"ref_{name}" + ("_logps" if name in HALVES else ""): x for name, x in found.items()}


class Preparation:
    """Adds to every batch what the loss reads of the whole.

    Args:
      preference: what is computed.
      forward: jits `function(module, batch)` as `forward(params, variables, batch)`, for the policy.
      sharding: of a batch's arrays.
      reference: (batch, params, variables) -> log-probabilities of the reference by the names of `sequence_logps`,
        given those of the policy; None: there is none, or the rows bring them.
    """

    def __init__(
        self,
        preference: Preference,
        forward: Callable[[Callable[..., Any]], Callable[..., Any]],
        sharding: NamedSharding,
        reference: Callable[[Batch, Any, Any], Added] | None,
    ):
        self._preference, self._reference = preference, reference
        self._kto = preference.kinds[0] == "kto"
        self._place = NamedSharding(sharding.mesh, PartitionSpec(*tuple(sharding.spec)[:2]))
        self._policy = forward(sequence_logps(preference, singles_too=False))
        self._whole = jax.jit(self._of_the_whole)

    def __call__(self, batch: Batch, params: Any, variables: Any) -> Batch:
        """The batch with what is added. `params` and `variables` are the policy's at this step."""
        preference, added = self._preference, {}
        names = added_names(preference)
        if self._reference is not None and any(name not in batch for name in names):
            added = of_reference(self._reference(batch, params, variables))
        if preference.sorts or self._kto or preference.nll_weight:
            policy = self._policy(params, variables, batch) if preference.sorts or self._kto else {}
            added |= self._whole(batch | added, policy)
        return batch | {name: jax.device_put(x, self._place) for name, x in added.items()}

    def _of_the_whole(self, batch: Batch, policy: Added) -> Added:
        """From the log-probabilities of all micro-batches."""
        preference = self._preference
        if self._kto:
            live = (batch["kl_labels"] >= 0).any(-1)
            kl = kto_kl(policy["kl_logps"] - batch["ref_kl_logps"], live)
            return {"kl": jnp.broadcast_to(kl, live.shape)}
        live = (batch["chosen_labels"] >= 0).any(-1) & (batch["rejected_labels"] >= 0).any(-1)
        added: Added = {}
        if preference.sorts:
            none = jnp.zeros(live.size)
            chosen, rejected = (policy[half].reshape(-1) for half in HALVES)
            ref_chosen, ref_rejected = (batch[f"ref_{half}_logps"].reshape(-1) for half in HALVES)
            pairs = PairLogps(chosen, rejected, ref_chosen, ref_rejected, none, none)
            for name, x in zip(PARTNERS, find_partners(pairs, live.reshape(-1)), strict=True):
                added[f"partner_{name}"] = x.reshape(live.shape)
        if preference.nll_weight:
            counted = batch["chosen_segment_ids"] > 0 if preference.nll_of_prompts else batch["chosen_labels"] >= 0
            # The first token of a row is nobody's target.
            tokens = jnp.where(live[..., None], counted, False)[..., 1:].sum()
            scale = live.sum() / jnp.maximum(tokens, 1).astype(jnp.float32)
            added["nll_scale"] = jnp.broadcast_to(scale, live.shape)
        return added
