"""Makes tests/models/fixtures/{clip,siglip}: tiny models of transformers, and what it makes of images and texts.

    python -m tests.peers.make_vision_goldens

Needs transformers (5.24 made the committed ones), torch and Pillow. Weights are drawn strong, and norms and biases
perturbed: with a default draw a wrong activation or position would not show.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parents[1] / "models" / "fixtures"
WORDS = ["<pad>", "<s>", "<unk>", "</s>", "a", "photo", "of", "the", "digit", "zero", "one", "two", "red", "blue"]
TEXTS = ["a photo of the digit one", "the digit zero", "a red photo", "a photo of the digit two of blue red red photo"]
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SHAPES = [(20, 30, 3), (9, 9, 3), (31, 17, 3), (12, 12)]


def pictures() -> list[np.ndarray]:
    """Four pictures of different shapes, the last one grey."""
    rng = np.random.default_rng(7)
    return [rng.integers(0, 256, shape, np.uint8) for shape in SHAPES]


def write_tokenizer(folder: Path, kind: str) -> None:
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in WORDS[:4]])
    single = "<s> $A </s>" if kind == "clip" else "$A </s>"
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 3)])
    (folder / "tokenizer.json").write_text(backend.to_str())
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    settings |= {"pad_token": "<pad>"} | ({"bos_token": "<s>"} if kind == "clip" else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def make(kind: str) -> None:
    import torch
    from transformers import AutoTokenizer, CLIPConfig, CLIPModel, SiglipConfig, SiglipModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    folder = HERE / kind
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    text = SIZES | {"vocab_size": len(WORDS), "max_position_embeddings": 8, "pad_token_id": 0, "bos_token_id": 1}
    text["eos_token_id"] = 3
    vision = SIZES | {"num_attention_heads": 4, "image_size": 12, "patch_size": 4}
    if kind == "clip":
        config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=10)
        processor = CLIPImageProcessorPil(size={"shortest_edge": 13}, crop_size={"height": 12, "width": 12})
        model = CLIPModel(config)
    else:
        config = SiglipConfig(text_config=text | {"projection_size": 16}, vision_config=vision)
        processor = SiglipImageProcessorPil(size={"height": 12, "width": 12})
        model = SiglipModel(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * 1.5 / parameter[0].numel() ** 0.5)
            else:
                parameter.add_(0.2 * noise)
    model = model.float().eval()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    write_tokenizer(folder, kind)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXTS, padding="max_length", truncation=True, max_length=8, return_tensors="pt")["input_ids"]
    from PIL import Image

    pixels = processor([Image.fromarray(p) for p in pictures()], return_tensors="pt")["pixel_values"]
    out = model(input_ids=ids, pixel_values=pixels, return_loss=True)
    out.loss.backward()
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    hidden = model.vision_model(pixels, output_hidden_states=True).hidden_states
    arrays = {
        "input_ids": ids,
        "pixel_values": pixels,
        "image_embeds": out.image_embeds,
        "text_embeds": out.text_embeds,
        "logits_per_image": out.logits_per_image,
        "loss": out.loss,
        "grad_norm": torch.stack(squares).sum().sqrt(),
        **{f"hidden_states_{n}": states for n, states in enumerate(hidden)},
    }
    np.savez_compressed(folder / "goldens.npz", **{name: x.detach().numpy() for name, x in arrays.items()})


if __name__ == "__main__":
    for name in ("clip", "siglip"):
        make(name)
