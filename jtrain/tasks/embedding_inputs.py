"""What a caller gives to be embedded: several images or texts, or one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jtrain.data.images import ImageTransform
from jtrain.errors import DataError


def transformed(images: Any, transform: ImageTransform, shape: tuple[int, int, int]) -> np.ndarray:
    """Images as float32 [images, *shape].

    Args:
      images: several of what `transform` takes, or one.
      transform: of the model.
      shape: height, width and channels that the model takes.

    Raises:
      DataError: there is none, one can't be read (its number is named), or becomes of another size.
    """
    pixels = []
    for number, image in enumerate(_listed([images] if _is_image(images) else images, "images")):
        try:
            found = transform(image)
        except DataError as error:
            raise DataError(f"images[{number}]: {error.message}", error.remedy) from error
        if found.shape != shape:
            raise DataError(
                f"images[{number}] becomes {list(found.shape)}, and the model takes {list(shape)}",
                "mend size and crop_size in preprocessor_config.json",
            )
        pixels.append(found)
    return np.stack(pixels)


def texts_of(texts: Any) -> list[str]:
    """Texts, one by one.

    Raises:
      DataError: there is none, or one is something else.
    """
    listed = _listed([texts] if isinstance(texts, str) else texts, "texts")
    for number, text in enumerate(listed):
        if not isinstance(text, str):
            raise DataError(f"texts[{number}] is a {type(text).__name__}", "give texts")
    return listed


def _is_image(given: Any) -> bool:
    if isinstance(given, np.ndarray):  # [height, width] or [height, width, channels]; else of several
        return given.ndim == 2 or (given.ndim == 3 and given.shape[-1] <= 4)
    return isinstance(given, str | bytes | os.PathLike | Mapping) or hasattr(given, "getbands")


def _listed(given: Any, name: str) -> list[Any]:
    if not isinstance(given, Iterable):
        raise DataError(f"{name} is a {type(given).__name__}", "give a list")
    listed = list(given)
    if not listed:
        raise DataError(f"{name} is empty: there is nothing to embed", "give one or more")
    return listed
