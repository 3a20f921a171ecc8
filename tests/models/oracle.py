"""The decoder once more, in NumPy float64, written from the formulas and from nothing in the package."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Tree = dict[str, Any]


def rms_norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def layer_norm(x: np.ndarray, scale: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * scale + bias


def rotate(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """x [L, H, Dh]: channels i and i + Dh/2 are the two coordinates of a point that turns."""
    half = x.shape[-1] // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = positions * theta ** (-2.0 * i / x.shape[-1])
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        out[..., i] = x[..., i] * cos - x[..., i + half] * sin
        out[..., i + half] = x[..., i + half] * cos + x[..., i] * sin
    return out


def softmax_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    segments: np.ndarray,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> np.ndarray:
    """q [L, H, Dh], k and v [L, K, Dh]; one token and one head at a time."""
    length, heads, size = q.shape
    group = heads // k.shape[1]
    factor = size**-0.5 if scale is None else scale
    out = np.zeros_like(q)
    for h in range(heads):
        for t in range(length):
            seen = [
                s
                for s in range(length)
                if segments[s] == segments[t] and (not causal or s <= t) and (window is None or t - s < window)
            ]
            scores = np.array([q[t, h] @ k[s, h // group] * factor for s in seen])
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out[t, h] = sum(w * v[s, h // group] for w, s in zip(weights, seen, strict=True))
    return out


def activate(name: str, x: np.ndarray) -> np.ndarray:
    if name == "swiglu":
        return x / (1.0 + np.exp(-x))
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def decoder_logits(config: Any, params: Tree, ids: np.ndarray, positions: np.ndarray, segments: np.ndarray):
    """Logits [L, V] of one row: ids, positions and segments are [L]."""
    p = _wide(params)

    def norm(x: np.ndarray, tree: Tree) -> np.ndarray:
        if config.norm == "rmsnorm":
            return rms_norm(x, tree["scale"], config.norm_eps)
        return layer_norm(x, tree["scale"], tree["bias"], config.norm_eps)

    def project(x: np.ndarray, tree: Tree, rank: int = 1) -> np.ndarray:
        return np.tensordot(x, tree["kernel"], rank) + tree.get("bias", 0.0)

    x = p["embed_tokens"]["embedding"][ids]
    for n in range(config.num_hidden_layers):
        layer = _at(p["layers"], n)
        h = norm(x, layer["attention_norm"])
        tree = layer["attention"]
        q = rotate(project(h, tree["q_proj"]), positions, config.rope_theta)
        k = rotate(project(h, tree["k_proj"]), positions, config.rope_theta)
        v = project(h, tree["v_proj"])
        x = x + project(softmax_attention(q, k, v, segments), tree["o_proj"], 2)
        h = norm(x, layer["mlp_norm"])
        tree = layer["mlp"]
        if config.activation == "gelu":
            h = activate("gelu", project(h, tree["up_proj"]))
        else:
            h = activate(config.activation, project(h, tree["gate_proj"])) * project(h, tree["up_proj"])
        x = x + project(h, tree["down_proj"])
    x = norm(x, p["final_norm"])
    return x @ (p["embed_tokens"]["embedding"].T if config.tie_word_embeddings else p["lm_head"]["kernel"])


def _wide(tree: Tree) -> Tree:
    return {k: _wide(v) if isinstance(v, dict) else np.asarray(v, np.float64) for k, v in tree.items()}


def _at(tree: Tree, index: int) -> Tree:
    return {k: _at(v, index) if isinstance(v, dict) else v[index] for k, v in tree.items()}
