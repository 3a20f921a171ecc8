"""Remat policies by name: what the backward pass finds saved, what it fetches back from the host, what it recomputes.

| name | saved a layer, beside its input |
|---|---|
| none | everything |
| full | nothing |
| minimal | results of all matrix products with a weight, those of experts included |
| save_dots | results of all matrix products, also attention scores where the kernel makes them |
| save_qkv | query, key and value, after the rotation |
| save_attention | the attention kernel's result |
| save_out | results of the output and down projections |
| offload | query, key, value and the attention kernel's result, in host memory |
| offload_dots | as minimal, in host memory; those of experts are recomputed |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jtrain.models.config import Remat
from jtrain.ops.context import RESULT

QKV, ATTENTION, OUT, EXPERTS = "qkv", RESULT, "out", "experts"
"""Names that the layer gives to its intermediate values with `checkpoint_name`."""


def remat(body: Callable[..., Any], name: Remat) -> Callable[..., Any]:
    """Wraps the body of the scan over layers. Gradients are the same numbers under every name."""
    policies = jax.checkpoint_policies
    if name == "none":
        return body

    def with_experts(policy: Callable[..., Any]) -> Callable[..., Any]:  # their products are not one `dot_general`
        return policies.save_from_both_policies(policy, policies.save_only_these_names(EXPERTS))

    policy = {
        "full": lambda: policies.nothing_saveable,
        "minimal": lambda: with_experts(policies.dots_with_no_batch_dims_saveable),
        "save_dots": lambda: with_experts(policies.dots_saveable),
        "save_qkv": lambda: policies.save_only_these_names(QKV),
        "save_attention": lambda: policies.save_only_these_names(ATTENTION),
        "save_out": lambda: policies.save_only_these_names(OUT),
        "offload": lambda: policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[QKV, ATTENTION],
            offload_src="device",
            offload_dst="pinned_host",
        ),
        "offload_dots": lambda: policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    }[name]()
    # Inside a scan nothing can be merged across iterations: the barrier against common subexpressions only costs.
    return jax.checkpoint(body, policy=policy, prevent_cse=False)
