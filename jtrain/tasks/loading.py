"""`jtrain.load_model`: weights from a Hugging Face folder, a run, an import or an export, onto a mesh."""

from __future__ import annotations

import os
from typing import Any

import jax

from jtrain.checkpoint import arrays
from jtrain.errors import ConfigError
from jtrain.models.presets import PRESETS
from jtrain.parallel.sharding import Rules
from jtrain.tasks.decoder import check_experts, check_tensor
from jtrain.tasks.loaded import LoadedModel, as_mesh, decoder_model, drawn, make_precision, plan_of, rules_for
from jtrain.tasks.opened import Opened, open_model
from jtrain.train.state import INIT_STREAM, stream_key


def load_model(
    model: str | os.PathLike[str],
    dtype: str = "float32",
    mesh: Any = None,
    step: int | None = None,
    rules: Rules | None = None,
) -> LoadedModel:
    """A model with its weights and tokenizer, ready to be called.

    Args:
      model: a Hugging Face folder (also what `jtrain.export` wrote), a GGUF file, a run directory or one of its
        checkpoints, what `jtrain import` made, or a preset's name (random weights, no tokenizer).
      dtype: float32 (exact products), bfloat16 or float16: of the weights and of the computation.
      mesh: `"fsdp=2,tensor=2"` (on as many devices as it needs), a dict, or a mesh; by default the first device.
      step: of a run; by default its newest intact checkpoint.
      rules: logical axis -> mesh axes, in place of the usual table.

    Raises:
      ConfigError: there is no such model, a dtype or mesh that can't be, a family that is not known.
      CheckpointError: weights are missing, damaged, or those of another model.
    """
    text = os.fspath(model)
    if text in PRESETS and not os.path.isdir(text):
        if step is not None:
            raise ConfigError(f"step={step}: {text} is a preset: it has no steps", "leave step out")
        return drawn(text, dtype=dtype, mesh=mesh)
    make_precision(dtype)  # what is wrong with the arguments is said before files are read
    return load_opened(open_model(text, step), dtype=dtype, mesh=mesh, rules=rules)


def load_opened(opened: Opened, *, dtype: str = "float32", mesh: Any = None, rules: Rules | None = None) -> LoadedModel:
    """`load_model` for a model that has been looked at."""
    mesh, precision = as_mesh(mesh), make_precision(dtype)
    rules = rules_for(mesh) if rules is None else rules
    shape = opened.decoder
    check_tensor(shape, mesh.shape["tensor"])
    check_experts(shape, mesh.shape["expert"], mesh.shape["context"])
    tokenizer = opened.tokenizer()
    split = decoder_model(shape)
    plan = plan_of(split, mesh, rules, precision)
    wanted = arrays.flatten(plan.abstract.params)
    variables: Any = {}
    if jax.tree.leaves(split.variables):
        initial = jax.jit(lambda key: split.init(key)[1], out_shardings=plan.shardings.variables)
        variables = initial(stream_key(0, INIT_STREAM))
    loaded, kept = opened.load(wanted, arrays.flatten(variables))
    params = arrays.unflatten(plan.abstract.params, loaded)
    variables = arrays.unflatten(variables, kept)
    return LoadedModel(shape, split, params, variables, mesh, rules, precision, tokenizer, opened.companions)
