"""The section of `task: contrastive`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jtrain.config.section import Section, Strings


class ContrastiveConfig(Section):
    loss: Literal["auto", "clip", "siglip"] = "auto"
    """clip: softmax over all texts of an image and all images of a text (Radford et al. 2021); siglip: every pair by
    itself (Zhai et al. 2023); auto: that of the model. Negatives are always those of the whole global batch."""
    equal_texts: Literal["negatives", "positives"] = "negatives"
    """What the images of equal texts are to each other's texts. negatives: as in both papers; positives: partners
    (Yang et al. 2022), for captions from few templates."""
    image_field: str = "image"
    """Field of a record that holds the image: a path relative to the file, bytes, or base64."""
    label_field: str = "label"
    """Field of a record that holds its class: a number or a name of `classes`."""
    classes: Strings = ()
    """Names of the classes. With them labels stand for texts where there is none, and evaluation is zero-shot, too."""
    templates: Annotated[Strings, Field(min_length=1)] = ("a photo of a {}",)
    """Texts of a class, its name in place of {}; a training row has one of them, zero-shot evaluation averages all."""
