"""Models that see, in a run: what is frozen by default, and whether tokenizer and model say the same of images."""

from __future__ import annotations

from jtrain.config.schema import Config
from jtrain.data.tokenizers import Tokenizer
from jtrain.errors import ConfigError, DataError
from jtrain.models.config import DecoderConfig

TOWER, PROJECTOR = "vision_tower/", "multi_modal_projector/"
FROZEN = f"{TOWER}.*"
"""What `optimizer.freeze` is where nobody says it: the vision encoder, as in LLaVA's second stage."""


def settle_images(config: Config, decoder: DecoderConfig, tokenizer: Tokenizer, *, task: str, reads: bool) -> Config:
    """The config of a run with this model; as it is, where the model reads text alone.

    Args:
      config: the run's.
      decoder: its model.
      tokenizer: of its texts.
      task: its name.
      reads: whether the task reads images.

    Raises:
      ConfigError: a task that does not.
      DataError: a tokenizer that says something else of images than the model.
    """
    if decoder.images is None:
        tokenizer.images = None  # that of a model that sees (data.tokenizer), beside one that does not
        return config
    if not reads:
        raise ConfigError(
            f"task: {task} with a model that sees (model.path: {config.model.path}): it reads text alone",
            "write task: sft, or take the text model by itself",
        )
    check_images(decoder, tokenizer)
    if "freeze" in config.optimizer.model_fields_set:
        return config
    optimizer = config.optimizer.model_copy(update={"freeze": (FROZEN,)})
    return config.model_copy(update={"optimizer": optimizer})


def check_images(decoder: DecoderConfig, tokenizer: Tokenizer) -> None:
    """Sees that images have the tokens and the size that the model reads.

    Raises:
      DataError: it is not so.
    """
    images, processor = decoder.images, tokenizer.images
    assert images is not None
    if processor is None:
        raise DataError(
            f"the tokenizer {tokenizer.spec} has no processor_config.json beside it, and the model sees",
            "use the tokenizer of the model's own folder (leave data.tokenizer out)",
        )
    size = (images.encoder.image_size, images.encoder.image_size)
    for name, theirs, ours in (
        ("the image token", processor.token_id, images.image_token_index),
        ("tokens of an image", processor.tokens, images.tokens),
        ("pixels of an image", processor.transform.output_size, size),
    ):
        if theirs != ours:
            raise DataError(
                f"{name}: processor_config.json beside {tokenizer.spec} says {theirs}, and the model {ours}",
                "use the files of one model; image_token, patch_size, num_additional_image_tokens, size and crop_size "
                "follow from its config.json",
            )


def describe_images(decoder: DecoderConfig, frozen: tuple[str, ...]) -> str:
    """How the model reads images and what of it is trained, for the log.

    Args:
      decoder: of a model that sees.
      frozen: `optimizer.freeze`.
    """
    images = decoder.images
    assert images is not None
    kind = "CLIP" if images.encoder.class_token else "SigLIP"
    kept = ", ".join(frozen) or "nothing"
    return (
        f"{kind} encoder ({images.encoder.num_hidden_layers} layers, {images.encoder.image_size} pixels), "
        f"{images.tokens} tokens an image; frozen: {kept}"
    )
