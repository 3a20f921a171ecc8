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

QKV, ATTENTION, OUT, EXPERTS, PRODUCT = "qkv", RESULT, "out", "experts", "product"
"""Names that the layer gives to its intermediate values with `checkpoint_name`."""


def remat(body: Callable[..., Any], name: Remat) -> Callable[..., Any]:
    """Wraps the body of the scan over layers. Gradients are the same numbers under every name."""
    policies = jax.checkpoint_policies
    if name == "none":
        return body

    # Products with a weight have derivatives of their own (`projection`, experts), so that a policy sees no
    # `dot_general`: they are known by name.
    products = policies.save_only_these_names(PRODUCT, EXPERTS)

    def offload(*names: str) -> Callable[..., Any]:
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(names),
            offload_src="device",
            offload_dst="pinned_host",
        )

    policy = {
        "full": lambda: policies.nothing_saveable,
        "minimal": lambda: products,
        "save_dots": lambda: policies.save_from_both_policies(policies.dots_saveable, products),
        "save_qkv": lambda: policies.save_only_these_names(QKV),
        "save_attention": lambda: policies.save_only_these_names(ATTENTION),
        "save_out": lambda: policies.save_only_these_names(OUT),
        "offload": lambda: offload(QKV, ATTENTION),
        "offload_dots": lambda: offload(PRODUCT),
    }[name]()
    # Inside a scan nothing can be merged across iterations: the barrier against common subexpressions only costs.
    return jax.checkpoint(body, policy=policy, prevent_cse=False)
