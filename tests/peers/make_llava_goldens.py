"""Makes tests/tasks/fixtures/llava: two tiny LLaVA models, rows with images, and what transformers makes of them.

    python -m tests.peers.make_llava_goldens

Needs transformers (5.24 made the committed ones), torch and Pillow. `clip-llama` is stored as transformers
5.24 writes it, `siglip-qwen2` as transformers 4.52 did. One word is a token; an image is 16 x 16 pixels, so that no
transform but the arithmetic of its numbers takes place.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parents[1] / "tasks" / "fixtures" / "llava"
CONTROL = ["<pad>", "<bos>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>", "<image>"]
WORDS = [f"w{n}" for n in range(60)]
VOCABULARY = 80
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ ' <|im_start|> ' ~ m.role ~ ' ' }}"
    "{% if m.content is string %}{% set parts = [{'type': 'text', 'text': m.content}] %}"
    "{% else %}{% set parts = m.content %}{% endif %}"
    "{% if m.role == 'assistant' %}{% generation %}{% for p in parts %}{{ p.text }}{% endfor %}{{ ' <|im_end|>' }}"
    "{% endgeneration %}{% else %}{% for p in parts %}"
    "{% if p.type == 'image' %}{{ '<image>' }}{% else %}{{ p.text }}{% endif %}{% endfor %}{{ ' <|im_end|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ ' <|im_start|> assistant ' }}{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    names = [*CONTROL, "user", "assistant", "system", *WORDS]
    backend = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in CONTROL])
    (folder / "tokenizer.json").write_text(backend.to_str())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    settings |= {"pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def image(number: int) -> str:
    """A picture of 16 x 16 pixels, PNG in base64."""
    from PIL import Image

    pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def rows() -> list[dict[str, Any]]:
    """Rows with no, one and two images, of one and of several turns."""

    def user(*parts: Any) -> dict[str, Any]:
        named = [
            {"type": "image", "base64": image(part)} if isinstance(part, int) else {"type": "text", "text": part}
            for part in parts
        ]
        return {"role": "user", "content": named}

    def assistant(text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": [{"type": "text", "text": text}]}

    chats = [
        [user(0, "w1 w2"), assistant("w3 w4 w5")],
        [user("w6 ", 1, " w7"), assistant("w8"), user("w9"), assistant("w10 w11")],
        [user(2, 3, "w12 w13 w14"), assistant("w15 w16")],
        [{"role": "system", "content": "w17 w18"}, user("w19"), assistant("w20 w21 w22")],
        [user(4, "w23"), assistant("w24"), user("w25", 5), assistant("w26 w27")],
    ]
    return [{"messages": messages} for messages in chats]


def config(kind: str) -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, Qwen2Config, SiglipVisionConfig

    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    shared = {"image_token_index": CONTROL.index("<image>"), "image_seq_length": 4, "initializer_range": 0.2}
    if kind == "clip-llama":
        return LlavaConfig(
            vision_config=CLIPVisionConfig(**vision, initializer_range=0.2),
            text_config=LlamaConfig(**text, initializer_range=0.2),
            **shared,
        )
    return LlavaConfig(
        vision_config=SiglipVisionConfig(**vision, initializer_range=0.2),
        text_config=Qwen2Config(**text, initializer_range=0.2, tie_word_embeddings=True),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        **shared,
    )


def draw(model: Any) -> None:
    """Every parameter is random: norms and biases begin as ones and zeros, and would hide what is mixed up."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_scale = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.2 * noise if is_scale else 0.2 * noise)


def name_of_452(name: str) -> str:
    """The key of transformers 4.52, of a key that 5.24 writes."""
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    name = name.replace("language_model.model.", "language_model.").replace(
        "vision_tower.", "vision_tower.vision_model."
    )
    return f"model.{name}"


def make(kind: str) -> None:
    import torch
    from PIL import Image
    from safetensors.torch import load_file, save_file
    from transformers import (
        AutoTokenizer,
        CLIPImageProcessor,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        SiglipImageProcessor,
    )

    folder = HERE / kind
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_tokenizer(folder)
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config(kind)).float().eval()
    draw(model)
    model.save_pretrained(folder)
    weights = folder / "model.safetensors"
    if kind == "siglip-qwen2":
        tensors = {name_of_452(name): tensor for name, tensor in load_file(weights).items()}
        save_file(tensors, weights, metadata={"format": "pt"})
        assert all(
            torch.equal(a, b)
            for a, b in zip(
                model.state_dict().values(),
                LlavaForConditionalGeneration.from_pretrained(folder).state_dict().values(),
                strict=True,
            )
        ), "transformers reads the other layout otherwise"
    clip = kind == "clip-llama"
    size = {"shortest_edge": 16} if clip else {"height": 16, "width": 16}
    images = CLIPImageProcessor(size=size, crop_size=16) if clip else SiglipImageProcessor(size=size)
    processor = LlavaProcessor(
        images,
        AutoTokenizer.from_pretrained(folder),
        patch_size=8,
        vision_feature_select_strategy="default" if clip else "full",
        num_additional_image_tokens=int(clip),
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(folder)
    write_tokenizer(folder)  # its config names a class that transformers 4 has as well

    def loaded(messages: list[dict]) -> list[dict]:
        def part(found: dict) -> dict:
            if found["type"] != "image":
                return found
            return {"type": "image", "image": Image.open(io.BytesIO(base64.b64decode(found["base64"])))}

        return [
            message if isinstance(message["content"], str) else {**message, "content": [*map(part, message["content"])]}
            for message in messages
        ]

    golden: dict[str, Any] = {"rows": []}
    logits: dict[str, np.ndarray] = {}
    total, count = torch.zeros(()), 0
    for number, row in enumerate(rows()):
        encoded = processor.apply_chat_template(
            loaded(row["messages"]),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            return_tensors="pt",
        )
        ids, mask = encoded["input_ids"], encoded["assistant_masks"]
        labels = torch.where((torch.as_tensor(mask) == 1) & (ids != model.config.image_token_index), ids, -100)
        out = model(input_ids=ids, pixel_values=encoded.get("pixel_values"))
        nll = torch.nn.functional.cross_entropy(out.logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum")
        total, count = total + nll, count + int((labels[0, 1:] != -100).sum())
        golden["rows"].append({"ids": ids[0].tolist(), "mask": np.asarray(mask).reshape(-1).tolist()})
        if number in (2, 3):
            logits[f"logits{number}"] = out.logits[0].detach().numpy()
        if number == 2:
            logits["pixels"] = encoded["pixel_values"].numpy().astype(np.float32)
    loss = total / count
    loss.backward()

    def norm(keep: Any) -> float:
        parts = [p.grad.square().sum() for name, p in model.named_parameters() if p.grad is not None and keep(name)]
        return float(torch.stack(parts).sum().sqrt())

    golden |= {
        "loss": float(loss.detach()),
        "count": count,
        "grad_norm": norm(lambda name: True),
        "grad_norm_tower_frozen": norm(lambda name: "vision_tower" not in name),
        "grad_norm_projector": norm(lambda name: "multi_modal_projector" in name),
    }
    prompt = processor.apply_chat_template(
        loaded(rows()[2]["messages"][:1]),
        tokenize=True,
        return_dict=True,
        add_generation_prompt=True,
        return_tensors="pt",
    )
    written = model.generate(**prompt, do_sample=False, max_new_tokens=8, eos_token_id=79)
    golden["greedy"] = written[0, prompt["input_ids"].shape[1] :].tolist()
    (folder / "goldens.json").write_text(json.dumps(golden) + "\n")
    np.savez_compressed(folder / "goldens.npz", **logits)
    print(
        kind,
        {name: value for name, value in golden.items() if name != "rows"},
        sorted(p.name for p in folder.iterdir()),
    )


def main() -> None:
    make("clip-llama")
    make("siglip-qwen2")
    (HERE / "rows.json").write_text(json.dumps(rows()) + "\n")


if __name__ == "__main__":
    main()
