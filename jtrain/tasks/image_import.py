"""A new model that sees, of a vision encoder and a text model: the projector between them is drawn.

That is where LLaVA begins: its first stage trains the projector alone, its second all but the encoder.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jtrain.checkpoint import arrays
from jtrain.checkpoint.hf import placement
from jtrain.checkpoint.hf.companions import Companions
from jtrain.checkpoint.hf.folder import CONFIG, HfFolder
from jtrain.checkpoint.hf.weights import match
from jtrain.checkpoint.staging import staged
from jtrain.data.image_processor import IMAGE_TOKEN, PROCESSOR
from jtrain.data.images import FILE, ImageTransform, read_section
from jtrain.data.tokenizers import Tokenizer
from jtrain.errors import CheckpointError, ConfigError
from jtrain.models.families.vision_tower import CLIP, SIGLIP, read_tower, tower_tensors
from jtrain.models.multimodal_config import ImageConfig, SelectStrategy
from jtrain.models.vision.config import VisionConfig
from jtrain.tasks.companion_files import config_json
from jtrain.tasks.image_models import PROJECTOR, TOWER
from jtrain.tasks.importing import Imported, save
from jtrain.tasks.loaded import LoadedModel, decoder_model, plan_of
from jtrain.tasks.loading import load_model
from jtrain.train.state import init_state

FEATURE_LAYER = -2
"""LLaVA 1.5's: the last layer of CLIP has lost what only the contrastive loss does not need."""
_VOCABULARY = "tokenizer.json"
_PREFIX = "vision_model."


def import_with_vision(
    model: str | os.PathLike[str],
    vision: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    mesh: Any = None,
    seed: int = 0,
    image_token: str = IMAGE_TOKEN,
) -> Imported:
    """Writes a model of two as a checkpoint that `model.path`, `load_model` and `export` take.

    The image token is the tokenizer's own where it has one of that name. Else it is added behind its last one: it takes
    a row of the embedding that no token has, or the vocabulary grows by this row (the mean of the others). No text
    gives this token, and it is never learned.

    Args:
      model: of texts: whatever `load_model` takes, with a tokenizer.json.
      vision: a folder of CLIP or SigLIP, or of their vision model alone, with preprocessor_config.json.
      out: a folder that does not exist, or is empty.
      dtype: type of the parameters.
      mesh: devices that hold the weights on their way.
      seed: of the projector.
      image_token: its text.

    Raises:
      ConfigError, CheckpointError: as `load_model`; a model that sees already; an encoder of another kind.
      StorageError: the disk is full or can't be written.
    """
    folder = HfFolder(vision)
    tower = _tower(folder)
    transform = ImageTransform.from_folder(folder.folder)
    size = (tower.image_size, tower.image_size)
    if transform.output_size != size:
        raise CheckpointError(
            f"{folder.path}: its images become {transform.output_size or 'of any size'}, and the encoder reads {size}",
            "take config.json and preprocessor_config.json of one model",
        )
    text = load_model(model, dtype=dtype, mesh=mesh)
    if text.decoder.images is not None:
        raise ConfigError(f"{os.fspath(model)} sees already", "import it without --vision")
    if text.decoder.embedding_multiplier != 1.0:
        raise ConfigError(
            f"{os.fspath(model)} scales its embeddings: images would be scaled, too", "take another model"
        )
    token, vocabulary = _image_token(text, image_token)
    rows = max(text.decoder.vocab_size, token + 1)
    strategy: SelectStrategy = "default" if tower.class_token else "full"
    layer = max(FEATURE_LAYER, -tower.num_hidden_layers - 1)
    images = ImageConfig(tower, token, vision_feature_layer=layer, vision_feature_select_strategy=strategy)
    decoder = text.decoder.replace(images=images, vocab_size=rows)
    split = decoder_model(decoder)
    plan = plan_of(split, text.mesh, text.rules, text.precision)
    wanted = arrays.flatten(plan.abstract.params)
    new = arrays.unflatten(plan.abstract.params, {path: path.startswith(PROJECTOR) for path in wanted})
    params = arrays.flatten(init_state(split, optax.identity(), plan, seed=seed, drawn=new).params)
    for path, leaf in arrays.flatten(text.params).items():
        params[path] = _grown(leaf, wanted[path])
    tensors = tower_tensors(tower, _PREFIX, TOWER)
    pairs = match(folder, tensors, rename=_rename, ignores=lambda key: not key.startswith(_PREFIX) or _buffer(key))
    leaves = {slot.path: wanted[slot.path] for tensor in tensors for slot in tensor.slots}
    params |= placement.load(folder, pairs, leaves)
    files = {name: data for name, data in text.source.files.items() if name not in (FILE, PROCESSOR)}
    files |= vocabulary | _processor(folder, images, image_token)
    companions = Companions({}, files)
    companions = dataclasses.replace(companions, config=config_json(decoder, companions, text.tokenizer))
    made = dataclasses.replace(
        text,
        decoder=decoder,
        model=split,
        params=arrays.unflatten(plan.abstract.params, params),
        source=companions,
    )
    state = {"params": made.params, "variables": made.variables}
    total = arrays.size_bytes(arrays.flatten(state).values())
    with staged(out, total) as target:
        save(made, target, {"imported": os.fspath(model), "vision": os.fspath(vision)})
    count = sum(leaf.size for leaf in jax.tree.leaves(made.params))
    return Imported(os.fspath(out), count, total, dtype, "llava")


def _tower(folder: HfFolder) -> VisionConfig:
    """The encoder of a folder of CLIP or SigLIP, or of their vision model."""
    config = folder.companions.config
    kind = config.get("model_type")
    section = config.get("vision_config") if kind in ("clip", "siglip") else config
    if kind not in ("clip", "siglip", CLIP, SIGLIP) or not isinstance(section, dict | type(config)):
        raise ConfigError(
            f"{folder.path}: {CONFIG}: model_type is {kind!r}", f"give a folder of clip, siglip, {CLIP} or {SIGLIP}"
        )
    own = kind if kind in (CLIP, SIGLIP) else f"{kind}_vision_model"
    return read_tower({"model_type": own, **dict(section)})


def _rename(key: str) -> str:
    """transformers 5 writes a vision model alone without its prefix."""
    alone = ("embeddings.", "encoder.", "pre_layrnorm.", "post_layernorm.", "head.")
    return _PREFIX + key if key.startswith(alone) else key


def _buffer(key: str) -> bool:
    return key.endswith(".position_ids")


def _image_token(text: LoadedModel, name: str) -> tuple[int, dict[str, bytes]]:
    """The id of the image token, and the file of the vocabulary with it where it had to be added.

    Raises:
      ConfigError: there is no tokenizer.json to add it to; or texts have this token, too.
    """
    tokenizer: Tokenizer | None = text.tokenizer
    found = None if tokenizer is None else tokenizer.token_to_id(name)
    if not name.strip():
        raise ConfigError("the name of the image token is empty", "leave --image-token out: it is <image>")
    if found is not None and tokenizer is not None:
        content = json.loads(text.source.files.get(_VOCABULARY, b"{}"))
        added = {token.get("id") for token in content.get("added_tokens") or []}
        if found not in added | tokenizer.special_ids():
            raise ConfigError(
                f"the image token {name!r} is an ordinary token of the model: its texts would hold it",
                "leave --image-token out, or name an added token",
            )
        return found, {}
    if tokenizer is None or _VOCABULARY not in text.source.files:
        raise ConfigError(
            f"the model has no tokenizer.json, and no image token {name!r}",
            "take a model with a tokenizer.json, or name a token that its tokenizer has (--image-token)",
        )
    content = json.loads(text.source.files[_VOCABULARY])
    token = tokenizer.vocab_size
    entry = {"id": token, "content": name, "single_word": False, "lstrip": False, "rstrip": False}
    entry |= {"normalized": False, "special": True}
    content["added_tokens"] = [*(content.get("added_tokens") or []), entry]
    return token, {_VOCABULARY: (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode()}


def _grown(leaf: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    """A parameter of the text model in the shape of the new one: tables get the mean of their rows as a further one."""
    axes = [n for n, (a, b) in enumerate(zip(leaf.shape, wanted.shape, strict=True)) if a != b]
    for axis in axes:
        mean = leaf.astype(jnp.float32).mean(axis, keepdims=True).astype(leaf.dtype)
        leaf = jnp.concatenate([leaf, *[mean] * (wanted.shape[axis] - leaf.shape[axis])], axis)
    return jax.device_put(leaf, wanted.sharding)


def _processor(folder: HfFolder, images: ImageConfig, token: str) -> dict[str, bytes]:
    """preprocessor_config.json of the encoder, and the processor_config.json of LlavaProcessor."""
    content = {**read_section(folder.folder)[0], "processor_class": "LlavaProcessor"}
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": token,
        "patch_size": images.encoder.patch_size,
        "num_additional_image_tokens": int(images.encoder.class_token),
        "vision_feature_select_strategy": images.vision_feature_select_strategy,
    }
    return {FILE: _json(content), PROCESSOR: _json(processor)}


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
