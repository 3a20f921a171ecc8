"""Images as a model reads them: decoded, resized, cropped and normalised as its preprocessor_config.json says.

The numbers are those of transformers' image processors with the `pil` backend. Pillow is needed for files and encoded
bytes, and wherever an image is resized; arrays of the right size go without.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import io
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.data.unicode import check_unicode
from jtrain.errors import CheckpointError, ConfigError, DataError

FILE = "preprocessor_config.json"

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Of OpenAI's CLIP."""

_RESAMPLING = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}
"""Pillow's numbers, which the file has."""


@dataclasses.dataclass(frozen=True)
class ImageTransform:
    """What is done to an image, in this order. Field names are those of preprocessor_config.json.

    Attributes:
      do_convert_rgb: to three channels; transparency is laid on white.
      do_resize: to `size`.
      size: height and width; or one number, which the shorter edge becomes.
      resample: Pillow's filter by name.
      do_center_crop: cuts the middle out, with black around images that are too small.
      crop_size: height and width of it.
      do_rescale: multiplies by `rescale_factor`.
      do_normalize: (x - mean) / std of every channel.
    """

    size: tuple[int, int] | int = 224
    crop_size: tuple[int, int] = (224, 224)
    do_convert_rgb: bool = True
    do_resize: bool = True
    resample: str = "bicubic"
    do_center_crop: bool = True
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    image_mean: tuple[float, ...] = CLIP_MEAN
    image_std: tuple[float, ...] = CLIP_STD

    def __call__(self, image: Any, *, folder: str | os.PathLike[str] | None = None) -> np.ndarray:
        """The image as float32 [height, width, channels].

        Args:
          image: what `read_image` takes.
          folder: what a path is relative to.

        Raises:
          DataError: it is no image, is damaged, or has another number of channels than the means.
          ConfigError: Pillow is needed and missing.
        """
        pixels = self.pixels(image, folder=folder)
        if not (self.do_rescale or self.do_normalize):
            return pixels.astype(np.float32)
        wide = pixels.astype(np.float64)
        x = (wide * self.rescale_factor if self.do_rescale else wide).astype(np.float32)
        if self.do_normalize:
            channels = x.shape[-1]
            for name, values in (("image_mean", self.image_mean), ("image_std", self.image_std)):
                if len(values) not in (1, channels):
                    raise DataError(
                        f"an image of {channels} channels, and {name} has {len(values)}",
                        "write do_convert_rgb: true, or a mean and std of every channel",
                    )
            mean, std = (np.asarray(v, dtype=np.float32) for v in (self.image_mean, self.image_std))
            x = (x - mean) / std
        return x

    def pixels(self, image: Any, *, folder: str | os.PathLike[str] | None = None) -> np.ndarray:
        """The image as uint8 [height, width, channels], before its numbers are scaled; see `__call__`."""
        found = read_image(image, folder=folder)
        pixels = _rgb(found) if self.do_convert_rgb else _array(_checked(np.asarray(found)))
        if self.do_resize:
            pixels = _resized(pixels, self._target(*pixels.shape[:2]), _RESAMPLING[self.resample])
        return _centre(pixels, *self.crop_size) if self.do_center_crop else pixels

    @property
    def output_size(self) -> tuple[int, int] | None:
        """Height and width of what comes out; None where it differs by image."""
        if self.do_center_crop:
            return self.crop_size
        return self.size if self.do_resize and isinstance(self.size, tuple) else None

    def _target(self, height: int, width: int) -> tuple[int, int]:
        if isinstance(self.size, tuple):
            return self.size
        short, long = sorted((height, width))
        other = max(int(self.size * long / short), 1)
        return (other, self.size) if width <= height else (self.size, other)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], *, path: str = FILE) -> ImageTransform:
        """What a preprocessor_config.json says. Where it is silent, the defaults of its processor hold.

        Raises:
          CheckpointError: it asks for something else than the steps above.
        """
        kind = str(content.get("image_processor_type") or content.get("feature_extractor_type") or "CLIP")
        base = SIGLIP if kind.startswith("Siglip") else cls()
        for name in ("do_pad", "do_reduce_labels", "do_flip_channel_order", "do_image_splitting"):
            if content.get(name):
                raise CheckpointError(f"{path}: {name} is {content[name]!r}, which is not known here", _REMEDY)
        if content.get("image_grid_pinpoints"):
            raise CheckpointError(f"{path}: image_grid_pinpoints cuts images into tiles", _REMEDY)
        found: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            value = content.get(field.name)
            if value is None:
                continue
            if field.name == "size" and isinstance(value, int) and isinstance(base.size, tuple):
                value = {"height": value, "width": value}
            try:
                found[field.name] = _read_field(field.name, value)
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"{path}: {field.name} is {value!r}", _REMEDY) from error
        transform = dataclasses.replace(base, **found)
        means, stds = len(transform.image_mean), len(transform.image_std)
        if 0 in (means, stds) or (means != stds and 1 not in (means, stds)):
            raise CheckpointError(
                f"{path}: image_mean has {means} values, and image_std {stds}", "write one of each a channel"
            )
        return transform

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> ImageTransform:
        """That of a model's folder.

        Raises:
          CheckpointError: there is none, or it can't be read.
        """
        content, path = read_section(folder)
        return cls.from_dict(content, path=path)

    def to_dict(self) -> dict[str, Any]:
        """As preprocessor_config.json has it, without the processor's name."""
        size = {"shortest_edge": self.size} if isinstance(self.size, int) else _edges(self.size)
        content = dataclasses.asdict(self) | {
            "size": size,
            "crop_size": _edges(self.crop_size),
            "resample": _RESAMPLING[self.resample],
            "image_mean": list(self.image_mean),
            "image_std": list(self.image_std),
        }
        return content if self.do_center_crop else {k: v for k, v in content.items() if k != "crop_size"}


SIGLIP = ImageTransform(size=(224, 224), do_center_crop=False, image_mean=(0.5, 0.5, 0.5), image_std=(0.5, 0.5, 0.5))
"""transformers' defaults for SigLIP; `ImageTransform()` has those for CLIP."""

_REMEDY = "use a model whose images are resized, cropped, rescaled and normalised only"


def read_section(folder: str | os.PathLike[str]) -> tuple[dict[str, Any], str]:
    """What a model's folder says of images, as preprocessor_config.json has it, and the path of the file that does.

    Raises:
      CheckpointError: as `ImageTransform.from_folder`.
    """
    path = Path(folder) / FILE
    if not path.exists() and (whole := path.with_name("processor_config.json")).exists():
        path = whole  # where transformers 5 writes it, for processors of images and texts
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing", "put the model's own beside its weights") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {error}", "put the model's own in its place") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object", "put the model's own in its place")
    if isinstance(content.get("image_processor"), dict):  # a processor_config.json's form
        content = content["image_processor"]
    return content, str(path)


def read_image(image: Any, *, folder: str | os.PathLike[str] | None = None) -> Any:
    """An image of any form as a `PIL.Image.Image` or as uint8 [height, width] or [height, width, channels].

    Args:
      image: a path, relative to `folder`; encoded bytes (PNG, JPEG...); base64 of them, with or without
        `data:image/png;base64,` before; a dict with `bytes` or `path`, as `datasets` has it; a PIL image; an array or
        nested lists of whole numbers from 0 to 255.
      folder: what a path is relative to; the working directory by default.

    Raises:
      DataError: it is none of these, there is no such file, or it is damaged.
      ConfigError: Pillow is needed and missing.
    """
    if isinstance(image, Mapping):
        if not (image.get("bytes") or image.get("path")):
            raise DataError(f"an image with the fields {', '.join(map(str, image)) or '(none)'}", "give bytes or path")
        image = image.get("bytes") or image["path"]
    if isinstance(image, str | os.PathLike):
        return _from_text(os.fspath(image), folder)
    if isinstance(image, bytes | bytearray | memoryview):
        return _decode(bytes(image), f"an image of {len(image)} bytes")
    if isinstance(image, np.ndarray | list):
        return _checked(image)
    if hasattr(image, "getbands"):  # a PIL image, without importing Pillow
        if 0 in image.size:
            raise DataError(f"an image is {image.size[0]} x {image.size[1]} pixels", "take the row out, or replace it")
        return image
    raise DataError(
        f"an image is {'missing' if image is None else f'a {type(image).__name__}'}",
        "give a path, encoded bytes, base64, a PIL image or an array of 0 to 255",
    )


def _from_text(text: str, folder: str | os.PathLike[str] | None) -> Any:
    if text.startswith("data:"):
        head, _, body = text.partition(",")
        if not head.endswith(";base64"):
            raise DataError(f"an image begins with {head[:40]!r}", "write data:image/png;base64, and the bytes")
        return _decode(_base64(body), "an image of base64")
    text = local_path(text)
    path = Path(os.path.expanduser(text)) if len(text) < _LONGEST_PATH else None
    if path is not None:
        path = path if path.is_absolute() or folder is None else Path(folder) / path
        if path.is_file():
            try:
                return _decode(path.read_bytes(), str(path))
            except OSError as error:
                raise DataError(f"{path} can't be read: {error}", "check its rights") from error
    if path is None or len(text) >= _SHORTEST_BASE64:
        try:
            return _decode(_base64(text), "an image of base64")
        except DataError:
            if path is None:
                raise
    raise DataError(f"the image {path} does not exist", "write paths relative to the file of the rows, or whole ones")


_LONGEST_PATH, _SHORTEST_BASE64 = 1024, 64


def local_path(text: str) -> str:
    """A path as it is, and that of a `file://` address.

    Raises:
      DataError: an address of the network, or half of a surrogate pair is in it.
    """
    scheme, mark, rest = text.partition("://")
    if mark and scheme != "file" and scheme.isalnum():
        raise DataError(f"the image {text} is an address", "Download it: images are read from local files.")
    check_unicode([text], "the path of an image")
    return rest if mark and scheme == "file" else text


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"an image of base64 can't be decoded: {error}", "write the bytes of a PNG or JPEG") from error


def _decode(data: bytes, name: str) -> Any:
    pillow = _pillow(f"{name} is to be decoded")
    from PIL import ImageOps, UnidentifiedImageError

    try:
        image = pillow.open(io.BytesIO(data))
        image.load()
        if 0 in image.size:
            raise ValueError(f"{image.size[0]} x {image.size[1]} pixels")
        return ImageOps.exif_transpose(image)  # as a camera meant it
    except Exception as error:  # Pillow raises nearly anything on damaged files: OSError, SyntaxError, struct.error...
        if isinstance(error, MemoryError):
            raise
        # Of what it does not know Pillow tells only the object that it read from.
        why = "" if isinstance(error, UnidentifiedImageError) else f": {error}"
        raise DataError(f"{name} is no image, or a damaged one{why}", "take the row out, or replace it") from error


def _pillow(why: str) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(f"{why}, and Pillow is not installed", "pip install 'jtrain[vision]'") from error
    return Image


def _checked(image: Any) -> np.ndarray:
    try:
        pixels = np.asarray(image)
    except ValueError as error:
        raise DataError("an image's rows differ in length", "give a rectangle of numbers") from error
    if pixels.ndim not in (2, 3) or 0 in pixels.shape or (pixels.ndim == 3 and pixels.shape[-1] > 4):
        raise DataError(
            f"an image is an array of shape {pixels.shape}",
            "give [height, width] or [height, width, channels (1 to 4)]",
        )
    if not np.issubdtype(pixels.dtype, np.integer):
        raise DataError(f"an image holds {pixels.dtype.name}", "give whole numbers from 0 to 255")
    if pixels.dtype != np.uint8 and (pixels.min() < 0 or pixels.max() > 255):
        raise DataError(f"an image holds numbers from {pixels.min()} to {pixels.max()}", "give 0 to 255")
    return pixels.astype(np.uint8)


def _array(image: Any) -> np.ndarray:
    pixels = np.asarray(image)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def _rgb(image: Any) -> np.ndarray:
    """Three channels; what is transparent is laid on white."""
    if isinstance(image, np.ndarray):
        pixels = _array(image)
        if pixels.shape[-1] in (1, 3):
            return np.repeat(pixels, 3, -1) if pixels.shape[-1] == 1 else pixels
        if pixels.shape[-1] == 2:
            raise DataError("an image has two channels", "give 1, 3 or 4")
        alpha = pixels[..., 3:] / 255
        return np.round(alpha * pixels[..., :3] + (1 - alpha) * 255).astype(np.uint8)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = converted(image, "RGBA")
        white = _pillow("an image is transparent").new("RGBA", image.size, (255, 255, 255, 255))
        image = _pillow("").alpha_composite(white, image)
    return np.asarray(converted(image, "RGB"))


def converted(image: Any, mode: str) -> Any:
    """A PIL image in another mode.

    Raises:
      DataError: Pillow can't.
    """
    try:
        return image.convert(mode)
    except (ValueError, OSError, ImportError) as error:  # of LAB it needs a library for colours
        raise DataError(f"an image of the mode {image.mode}: {error}", "convert it to RGB") from error


def _resized(pixels: np.ndarray, size: tuple[int, int], resample: int) -> np.ndarray:
    if pixels.shape[:2] == size:
        return pixels
    height, width = size
    image = _pillow(f"an image of {pixels.shape[0]} x {pixels.shape[1]} pixels is to become {height} x {width}")
    resized = image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).resize((width, height), resample)
    return _array(resized)


def _centre(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """The middle [height, width], with zeros around what is too small; halves are rounded as transformers does."""
    rows, columns = pixels.shape[:2]
    top, left = (rows - height) // 2, (columns - width) // 2
    if top >= 0 and left >= 0:
        return pixels[top : top + height, left : left + width]
    tall, wide = max(height, rows), max(width, columns)
    above, before = math.ceil((tall - rows) / 2), math.ceil((wide - columns) / 2)
    padded = np.zeros((tall, wide, pixels.shape[-1]), pixels.dtype)
    padded[above : above + rows, before : before + columns] = pixels
    top, left = top + above, left + before
    return padded[max(0, top) : min(tall, top + height), max(0, left) : min(wide, left + width)]


def _edges(size: tuple[int, int]) -> dict[str, int]:
    return {"height": size[0], "width": size[1]}


def _read_field(name: str, value: Any) -> Any:
    """A value of the file as the field's.

    Raises:
      KeyError, TypeError, ValueError: it can't be one.
    """
    if name.startswith("do_"):
        if not isinstance(value, bool):
            raise TypeError(value)
        return value
    if name in ("size", "crop_size"):
        if isinstance(value, int):
            return _positive(value) if name == "size" else (_positive(value), _positive(value))
        if set(value) == {"shortest_edge"} and name == "size":
            return _positive(value["shortest_edge"])
        if set(value) != {"height", "width"}:
            raise KeyError(value)
        return _positive(value["height"]), _positive(value["width"])
    if name == "resample":
        return {number: word for word, number in _RESAMPLING.items()}[value]
    if name == "rescale_factor":
        return float(value)
    values = (value,) if isinstance(value, int | float) else tuple(map(float, value))
    if name == "image_std" and 0.0 in values:
        raise ValueError(value)
    return values


def _positive(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(value)
    return value
