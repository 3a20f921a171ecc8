"""Optimizers: optax chains from the config, with patterns that say what decays and what is frozen.

The chain ends in the learning rate of update `count + 1`, so that a skipped step, which leaves the optimizer's state as
it was, also leaves the schedule. Clipping is the step's: it needs the norm of the global gradient anyway.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax
from optax import contrib

from jtrain.config.schema import OptimizerConfig
from jtrain.errors import ConfigError
from jtrain.train.schedules import Schedule


def path_of(key_path: tuple[Any, ...]) -> str:
    """`layers/attention/q_proj/kernel`: the path of a leaf, as patterns and messages write it."""
    return "/".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in key_path)


def parameter_paths(params: Any) -> list[str]:
    """The paths of all leaves, in the tree's order."""
    return [path_of(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]


def trainable_mask(params: Any, freeze: Sequence[str], frozen: Any = None) -> Any:
    """Tree of bools: False where a pattern of `optimizer.freeze` matches the whole path.

    Args:
      params: tree of parameters.
      freeze: the patterns.
      frozen: tree of bools: what the model freezes by itself (the base of adapters).

    Raises:
      ConfigError: a pattern that is no regular expression or matches nothing, or all parameters frozen.
    """
    patterns = [_compile(pattern, "optimizer.freeze") for pattern in freeze]
    paths = parameter_paths(params)
    for pattern in patterns:
        if not any(pattern.fullmatch(path) for path in paths):
            raise ConfigError(
                f"optimizer.freeze: {pattern.pattern!r} matches no parameter", f"parameters: {', '.join(paths)}"
            )
    fixed = [False] * len(paths) if frozen is None else jax.tree.leaves(frozen)
    mask = [
        not by_model and not any(pattern.fullmatch(path) for pattern in patterns)
        for path, by_model in zip(paths, fixed, strict=True)
    ]
    if not any(mask):
        raise ConfigError(f"optimizer.freeze={list(freeze)} freezes every parameter", "leave something to train")
    return jax.tree.unflatten(jax.tree.structure(params), mask)


def decay_multiples(params: Any, rules: Sequence[tuple[str, float]]) -> Any:
    """Tree of floats: the multiple of weight_decay of each parameter; the first matching pattern counts.

    Raises:
      ConfigError: a parameter that no pattern matches.
    """
    compiled = [(_compile(pattern, "optimizer.decay_rules"), multiple) for pattern, multiple in rules]

    def one(key_path: tuple[Any, ...], _: Any) -> float:
        path = path_of(key_path)
        for pattern, multiple in compiled:
            if pattern.fullmatch(path):
                return multiple
        raise ConfigError(
            f"optimizer.decay_rules: no pattern matches the parameter {path!r}",
            'end the rules with [".*", 1.0], which matches everything',
        )

    return jax.tree_util.tree_map_with_path(one, params)


def make_optimizer(
    config: OptimizerConfig, schedule: Schedule, params: Any, names: Mapping[str, Any] | None = None
) -> optax.GradientTransformation:
    """The optax chain that the config describes.

    Args:
      config: the optimizer section.
      schedule: learning rate of update k.
      params: tree of the trainable parameters (arrays or ShapeDtypeStructs), for patterns and muon's matrices.
      names: tree of logical axis names, of the structure of `params`; muon reads from it which axes are stacked layers.
    """

    def learning_rate(count: Any) -> Any:
        return schedule(count + 1)

    decay = _decay(config, params)
    if config.name == "adamw":
        rule = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    elif config.name == "lion":
        rule = optax.scale_by_lion(config.beta1, config.beta2)
    elif config.name == "sgd":
        rule = optax.trace(config.beta1) if config.beta1 else optax.identity()
    elif config.name == "adafactor":
        # The update rule of optax.adafactor; the learning rate and a decoupled decay follow below, as for the others.
        rule = optax.chain(
            optax.scale_by_factored_rms(),
            optax.clip_by_block_rms(1.0),
            optax.scale_by_param_block_rms(),
            optax.ema(config.beta1, debias=False) if config.beta1 else optax.identity(),
        )
    else:
        rule = _muon(config, params, names)
    return optax.chain(rule, decay, optax.scale_by_learning_rate(learning_rate))


def _decay(config: OptimizerConfig, params: Any) -> optax.GradientTransformation:
    multiples = decay_multiples(params, config.decay_rules)
    if not config.weight_decay:
        return optax.identity()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        decayed = jax.tree.map(lambda u, p, m: u + config.weight_decay * m * p if m else u, updates, params, multiples)
        return decayed, state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def _muon(config: OptimizerConfig, params: Any, names: Any) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) on the matrices inside the layers, Adam on embedding, head, norms and biases.

    The orthogonalised update is scaled by 0.2 sqrt(max(fan_in, fan_out)), so that its size is Adam's and one learning
    rate serves both (Liu et al. 2025, "Muon is scalable for LLM training").
    """
    dimensions = muon_dimensions(params, names)
    is_leaf = _is_dimension
    labels = jax.tree.map(lambda d: "adam" if d is None else "muon", dimensions, is_leaf=is_leaf)

    def matrices(masked: Any) -> Any:  # partition hands over a tree whose other leaves are masked nodes
        return jax.tree.map(
            lambda d, p: optax.MaskedNode() if isinstance(p, optax.MaskedNode) else d,
            dimensions,
            masked,
            is_leaf=lambda x: is_leaf(x) or isinstance(x, optax.MaskedNode),
        )

    rule = contrib.scale_by_muon(beta=config.beta1, weight_dimension_numbers=matrices)
    scale = optax.stateless(lambda updates, _: _scale_matrices(updates, matrices(updates)))
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    return optax.partition({"muon": optax.chain(rule, scale), "adam": adam}, labels)


def muon_dimensions(params: Any, names: Any) -> Any:
    """Tree of `MuonDimensionNumbers` (which axes are input, which output), None where Muon does not apply.

    With logical names: a matrix of a layer has `embed` on one side and everything else but `layers` and `expert` on the
    other (every expert is a matrix of its own); without `embed`, an adapter's has its rank on one side.
    Without: every two-dimensional parameter.
    """

    def one(param: Any, axes: Any) -> contrib.MuonDimensionNumbers | None:
        if axes is None:
            return contrib.MuonDimensionNumbers(0, 1) if param.ndim == 2 else None
        inner = [i for i, axis in enumerate(axes) if axis not in ("layers", "expert")]
        side = next((axis for axis in ("embed", "lora_rank") if axis in axes), None)
        if "vocab" in axes or side is None or len(inner) < 2:
            return None
        embed = axes.index(side)
        others = tuple(i for i in inner if i != embed)
        first = embed < others[0]
        return contrib.MuonDimensionNumbers((embed,) if first else others, others if first else (embed,))

    if names is None:
        return jax.tree.map(lambda p: one(p, None), params)
    return jax.tree.map(one, params, names)


def _scale_matrices(updates: Any, dimensions: Any) -> Any:
    def one(update: Any, d: Any) -> Any:
        if isinstance(d, optax.MaskedNode):
            return update
        sides = [d.reduction_axis, d.output_axis]
        fans = [_product(update.shape, (side,) if isinstance(side, int) else side) for side in sides]
        return update * (0.2 * max(fans) ** 0.5)

    return jax.tree.map(one, updates, dimensions, is_leaf=lambda x: isinstance(x, optax.MaskedNode))


def _product(shape: Sequence[int], axes: Sequence[int]) -> int:
    result = 1
    for axis in axes:
        result *= shape[axis]
    return result


def _is_dimension(x: Any) -> bool:
    return x is None or isinstance(x, contrib.MuonDimensionNumbers)


def _compile(pattern: str, field: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"{field}: {pattern!r} is not a regular expression ({error})", "quote special signs"
        ) from error
