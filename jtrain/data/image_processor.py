"""What lies beside the tokenizer of a model that sees: how images are transformed, and the tokens that stand for them.

The files are transformers' processor_config.json (LlavaProcessor) and preprocessor_config.json; what they leave out
stands in the model's config.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jtrain.data.files import exists, join, read_bytes
from jtrain.data.images import FILE, ImageTransform
from jtrain.errors import DataError

PROCESSOR = "processor_config.json"
IMAGE_TOKEN = "<image>"


@dataclass(frozen=True)
class ImageProcessor:
    """How images enter rows of tokens.

    Attributes:
      token: the text that a template writes for an image.
      token_id: its id.
      tokens: how many of them stand for one image.
      transform: from an image to pixels.
    """

    token: str
    token_id: int
    tokens: int
    transform: ImageTransform

    def expand(self, ids: list[int]) -> list[int]:
        """Ids with every image token as often as an image has tokens."""
        if self.token_id not in ids:
            return ids
        return [token for one in ids for token in [one] * (self.tokens if one == self.token_id else 1)]

    def expand_mask(self, ids: list[int], mask: list[int]) -> list[int]:
        """The mask of `ids` as one of `expand(ids)`; 0 at image tokens, which nobody writes."""
        found: list[int] = []
        for token, kept in zip(ids, mask, strict=True):
            found += [0] * self.tokens if token == self.token_id else [kept]
        return found


def read_image_processor(folder: str, token_to_id: Callable[[str], int | None]) -> ImageProcessor | None:
    """The processor of a model's folder; None: it does not see.

    Args:
      folder: of the tokenizer.
      token_to_id: of the tokenizer.

    Raises:
      DataError: a file is damaged, or lacks what is needed.
    """
    processor, model = _json(folder, PROCESSOR), _json(folder, "config.json")
    if processor.get("processor_class") != "LlavaProcessor" and model.get("model_type") != "llava":
        return None
    vision: Any = model.get("vision_config")
    vision = vision if isinstance(vision, dict) else {}
    of_images = processor.get("image_processor") or _json(folder, FILE)
    where = join(folder, PROCESSOR if processor.get("image_processor") else FILE)
    if not isinstance(of_images, dict) or not of_images:
        raise DataError(f"{join(folder, FILE)} is missing: it says how images are transformed", "Copy the model's own.")
    transform = ImageTransform.from_dict(of_images, path=where)
    size = transform.output_size
    patch = processor.get("patch_size") or vision.get("patch_size")
    strategy = processor.get("vision_feature_select_strategy") or model.get("vision_feature_select_strategy", "default")
    more = processor.get("num_additional_image_tokens")
    if more is None or (not more and not processor.get("patch_size")):
        more = int(vision.get("model_type", "clip_vision_model") == "clip_vision_model")
    if size is None or not isinstance(patch, int) or patch < 1 or not isinstance(more, int):
        raise DataError(
            f"{join(folder, PROCESSOR)}: patch_size {patch!r}, num_additional_image_tokens {more!r}, and images of "
            f"{size or 'any size'}: how many tokens an image has is not known",
            "Write patch_size and num_additional_image_tokens, and resize images to one height and width.",
        )
    tokens = (size[0] // patch) * (size[1] // patch) + more - (strategy == "default")
    token = processor.get("image_token") or IMAGE_TOKEN
    token_id = token_to_id(token)
    if token_id is None:
        raise DataError(
            f"{join(folder, PROCESSOR)}: the tokenizer beside it has no image token {token!r}",
            "Name one in image_token, or copy the model's own tokenizer.",
        )
    return ImageProcessor(token, token_id, tokens, transform)


def _json(folder: str, name: str) -> dict[str, Any]:
    path = join(folder, name)
    if not exists(path):
        return {}
    try:
        content = json.loads(read_bytes(path, field="data.tokenizer"))
    except ValueError as error:
        if name == "config.json":  # a common name: beside a tokenizer that stands alone it may be anyone's
            return {}
        raise DataError(f"{path} is not JSON: {error}", "Put the model's own in its place.") from error
    return content if isinstance(content, dict) else {}
