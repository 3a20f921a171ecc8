"""A model with its weights on a mesh, ready to be called: what `jtrain.load_model` returns."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jtrain.checkpoint.hf.companions import Companions
from jtrain.data.tokenizers import Tokenizer
from jtrain.errors import ConfigError, DataError
from jtrain.models.config import DecoderConfig
from jtrain.models.decoder import Decoder
from jtrain.models.multimodal import Images, image_places
from jtrain.models.presets import preset
from jtrain.parallel.mesh import make_mesh
from jtrain.parallel.sharding import Rules, make_rules, pipeline_rules
from jtrain.train.model import FunctionalModel, functional_model
from jtrain.train.precision import Precision
from jtrain.train.state import StatePlan, init_state, plan_state
from jtrain.train.step import make_forward

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedModel:
    """A decoder and its weights.

    Attributes:
      decoder: its shape.
      model: structure and parameter shapes (`FunctionalModel.merge(params, variables)` is the module).
      params, variables: nested dicts of arrays, in their shards.
      mesh: the devices.
      rules: logical axis -> mesh axes.
      precision: the type that parameters are stored and computed in.
      tokenizer: that of the folder or run; None where there is none.
      source: what an export carries on.
    """

    decoder: DecoderConfig
    model: FunctionalModel
    params: Any
    variables: Any
    mesh: Mesh
    rules: Rules
    precision: Precision
    tokenizer: Tokenizer | None = None
    source: Companions = dataclasses.field(default_factory=Companions)

    @functools.cached_property
    def plan(self) -> StatePlan:
        """Shapes and places of the parameters; there is no optimizer."""
        return plan_of(self.model, self.mesh, self.rules, self.precision)

    def jit(self, function: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
        """Jits `function(module, *arguments)`, traced on this mesh, as `jitted(*arguments)`."""
        forward = make_forward(self.model, self.plan, function, name=name)
        return lambda *arguments: forward(self.params, self.variables, *arguments)

    def with_weights(self, params: Any, variables: Any) -> LoadedModel:
        """The same model with other weights in the same places; what is compiled for one serves the other."""
        other = dataclasses.replace(self, params=params, variables=variables)
        other.__dict__["_logits"] = self._logits
        return other

    def __call__(
        self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, pixel_values: Any = None
    ) -> jax.Array:
        """Logits of the next token; compiled once for every shape of the arguments.

        Args:
          input_ids: tokens [B, L].
          attention_mask: 1 for tokens, 0 for padding [B, L]; by default all are tokens.
          position_ids: positions [B, L]; by default 0, 1, 2... in every row, whatever the mask.
          pixel_values: for a model that sees, the images of each row in the order of their tokens, transformed
            [B, I, height, width, channels]; rows may have fewer, and zeros behind them.

        Returns:
          [B, L, V] float32 (float64 for dtype="float64"), V without padding.

        Raises:
          DataError: arguments of other shapes, or a token that the model has not.
        """
        arguments: dict[str, np.ndarray | None] = {
            "input_ids": _integers("input_ids", input_ids, None),
            "attention_mask": None,
            "position_ids": None,
        }
        ids = arguments["input_ids"]
        assert ids is not None
        for name, value in (("attention_mask", attention_mask), ("position_ids", position_ids)):
            if value is not None:
                arguments[name] = _integers(name, value, ids.shape)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.decoder.vocab_size:
            bad = int(ids.max()) if int(ids.max()) >= self.decoder.vocab_size else int(ids.min())
            raise DataError(
                f"input_ids holds the token {bad}, and the model has {self.decoder.vocab_size}",
                "encode the text with the model's own tokenizer",
            )
        self._check_positions(ids.shape[1], arguments["position_ids"])
        pixels = None if pixel_values is None else _pixels(pixel_values, ids, self.decoder)
        return self._logits(self.params, self.variables, *arguments.values(), pixels)

    def _check_positions(self, length: int, position_ids: np.ndarray | None) -> None:
        """A learned table ends; rotary positions do not."""
        least, most = 0, length - 1
        if position_ids is not None and position_ids.size:
            least, most = int(position_ids.min()), int(position_ids.max())
        limit = self.decoder.max_position_embeddings
        if self.decoder.position_embedding == "learned" and (least < 0 or most >= limit):
            raise DataError(
                f"position {least if least < 0 else most}, and the model has a table of {limit} positions",
                "cut the rows, or give position_ids within the table",
            )

    @functools.cached_property
    def _logits(self) -> Callable[..., jax.Array]:
        def logits(module: Decoder, ids: jax.Array, mask: Any, positions: Any, pixels: Any) -> jax.Array:
            images = None
            if pixels is not None:
                assert module.config.images is not None
                images = Images(pixels, image_places(ids, module.config.images.image_token_index))
            return module(ids, mask, positions, images)

        return make_forward(self.model, self.plan, logits)


def decoder_model(shape: DecoderConfig) -> FunctionalModel:
    """The decoder of this shape, split into structure and values."""
    return functional_model(lambda rngs: Decoder(shape, rngs))


def plan_of(model: FunctionalModel, mesh: Mesh, rules: Rules, precision: Precision) -> StatePlan:
    """Where a model's parameters lie that is not trained."""
    return plan_state(model, optax.identity(), mesh, rules, precision)


def make_precision(dtype: str) -> Precision:
    """Everything in one type; float32 and float64 with exact products.

    Raises:
      ConfigError: a type that is none of `DTYPES`.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r}", f"choose one of {', '.join(DTYPES)}")
    if dtype == "float64" and not jax.config.jax_enable_x64:
        raise ConfigError("dtype='float64': jax computes in 32 bits here", "set JAX_ENABLE_X64=1 before the start")
    matmul = "highest" if dtype in ("float32", "float64") else None
    return Precision(dtype, jnp.dtype(dtype), jnp.dtype(dtype), matmul=matmul)


def rules_for(mesh: Mesh) -> Rules:
    """The usual table; with stages, layers and vocabulary are divided over them."""
    return pipeline_rules(make_rules(), 1) if mesh.shape["pipeline"] > 1 else make_rules()


def drawn(
    shape: DecoderConfig | str, *, dtype: str = "float32", mesh: Any = None, seed: int = 0, tokenizer: Any = None
) -> LoadedModel:
    """A model with random parameters.

    Args:
      shape: the decoder, or a preset's name.
      dtype: of the parameters and the computation.
      mesh: a mesh, or what `make_mesh` takes; by default the first device.
      seed: of the draw.
      tokenizer: is kept beside it.
    """
    shape = preset(shape) if isinstance(shape, str) else shape
    precision, mesh = make_precision(dtype), as_mesh(mesh)
    model, rules = decoder_model(shape), rules_for(mesh)
    state = init_state(model, optax.identity(), plan_of(model, mesh, rules, precision), seed=seed)
    return LoadedModel(shape, model, state.params, state.variables, mesh, rules, precision, tokenizer)


def as_mesh(mesh: Any) -> Mesh:
    """A mesh from a mesh, from what `make_mesh` takes, or (None) over the first device.

    A short form without `data` takes the first devices that it needs, so that `fsdp=2,tensor=2` works on eight.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if mesh is None:
        return make_mesh(devices=jax.devices()[:1])
    from jtrain.config.load import load_config
    from jtrain.config.mesh_rules import AXES

    section = load_config({"mesh": mesh}, env={}).mesh
    sizes = [getattr(section, axis) for axis in AXES]
    named = {axis for axis in AXES if axis in section.model_fields_set}
    if "data" in named or -1 in [size for axis, size in zip(AXES, sizes, strict=True) if axis != "data"]:
        return make_mesh(section)
    count = int(np.prod([size for axis, size in zip(AXES, sizes, strict=True) if axis != "data"]))
    if count > len(jax.devices()):
        raise ConfigError(
            f"mesh={mesh!r} needs {count} devices, and there are {len(jax.devices())}",
            "give a smaller mesh, or leave it out",
        )
    return make_mesh(section, devices=jax.devices()[:count])


def _pixels(value: Any, ids: np.ndarray, decoder: DecoderConfig) -> np.ndarray:
    """Images [B, I, height, width, channels] float32, one at least for every image in the rows of tokens."""
    pixels, images = np.asarray(value, np.float32), decoder.images
    if images is None:
        raise DataError("pixel_values, and the model reads text alone", "leave them out")
    if pixels.ndim != 5 or pixels.shape[0] != len(ids) or pixels.shape[2:] != images.shape():
        raise DataError(
            f"pixel_values has the shape {list(pixels.shape)}", f"give [{len(ids)}, images, *{list(images.shape())}]"
        )
    held = (ids == images.image_token_index).sum(1)
    if held.size and (int(held.max()) > pixels.shape[1] * images.tokens or (held % images.tokens).any()):
        raise DataError(
            f"a row has {int(held.max())} image tokens, and {pixels.shape[1]} images of {images.tokens} tokens each",
            "give every image its tokens (jtrain.data.image_conversations does)",
        )
    return pixels


def _integers(name: str, value: Any, shape: tuple[int, ...] | None) -> np.ndarray:
    """An int32 array [B, L]."""
    array = np.asarray(value)
    if array.ndim != 2 or not (np.issubdtype(array.dtype, np.integer) or array.dtype == bool):
        raise DataError(f"{name} is {array.dtype}{list(array.shape)}", "give integers [B, L]")
    if shape is not None and array.shape != shape:
        raise DataError(f"{name} has the shape {list(array.shape)}, input_ids {list(shape)}", "give them one shape")
    return array.astype(np.int32)
