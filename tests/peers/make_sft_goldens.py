"""Makes tests/tasks/fixtures/sft/goldens.json: what TRL's SFTTrainer makes of small rows, and transformers of chats.

    python -m tests.peers.make_sft_goldens

Needs trl (1.16 made the committed ones), transformers, datasets and torch. The model is the tiny Llama of
tests/models/families/fixtures, the tokenizer one word a token; every case is one update over all of its rows.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import shutil
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
HERE = TESTS / "tasks" / "fixtures" / "sft"
MODEL = TESTS / "models" / "families" / "fixtures" / "llama"
CHAT = TESTS / "data" / "fixtures" / "chat"
JARGON = TESTS.parent / "configs" / "assets" / "sft-jargon.jsonl.gz"
CONTROL = ["<pad>", "<bos>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>"]
WORDS = [f"w{n}" for n in range(80)]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ ' <|im_start|> ' ~ m.role ~ ' ' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content ~ ' <|im_end|>' }}{% endgeneration %}{% else %}{{ m.content ~ ' <|im_end|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ ' <|im_start|> assistant ' }}{% endif %}"
)
LENGTH = 24


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


def rows() -> dict[str, list[dict]]:
    """Rows of every form; some are longer than LENGTH."""
    draw = random.Random(0)

    def words(least: int, most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    def turns(count: int) -> list[dict]:
        return [{"role": ("user", "assistant")[n % 2], "content": words(1, 5)} for n in range(count)]

    chats = [{"messages": turns(2 * draw.randint(1, 3))} for _ in range(6)]
    chats[1]["messages"].insert(0, {"role": "system", "content": words(2, 4)})
    return {
        "text": [{"text": words(3, 30)} for _ in range(6)],
        "prompt_completion": [{"prompt": words(2, 12), "completion": " " + words(1, 14)} for _ in range(6)]
        + [{"prompt": words(40, 40), "completion": " " + words(2, 2)}],
        "messages": chats,
        "chat_completion": [{"prompt": turns(3), "completion": [turns(2)[1]]} for _ in range(5)],
    }


CASES: dict[str, tuple[str, dict]] = {
    "text": ("text", {}),
    "prompt_completion": ("prompt_completion", {}),
    "all_of_prompt_completion": ("prompt_completion", {"completion_only_loss": False}),
    "keep_end": ("prompt_completion", {"truncation_mode": "keep_end"}),
    "messages": ("messages", {}),
    "assistant_only": ("messages", {"assistant_only_loss": True}),
    "chat_completion": ("chat_completion", {}),
    "smoothed": ("messages", {"assistant_only_loss": True, "label_smoothing_factor": 0.1}),
    "bfd": ("prompt_completion", {"packing": True}),
    "bfd_split": ("text", {"packing": True, "packing_strategy": "bfd_split"}),
}


def run(folder: Path, records: list[dict], options: dict) -> dict:
    """One update by TRL over all rows."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    packed = options.get("packing", False)
    with tempfile.TemporaryDirectory() as out:
        arguments = SFTConfig(
            output_dir=out,
            max_steps=1,
            per_device_train_batch_size=64,
            max_length=LENGTH,
            logging_steps=1,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            model_init_kwargs={"dtype": "float32", "attn_implementation": "eager"},
            **options,
        )
        trainer = SFTTrainer(model=str(folder), args=arguments, train_dataset=Dataset.from_list(records))
        data = [{"ids": row["input_ids"], "labels": row["labels"]} for row in trainer.train_dataset]
        trainer.train()
        line = trainer.state.log_history[0]
    names = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")
    return {"rows": data, "packed": packed, **{name: float(line[name]) for name in names}}


def chat_digests() -> list[str]:
    """Digests of ids and assistant masks of 200 conversations."""
    import lzma

    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_bytes(lzma.decompress((CHAT / "tokenizer.json.xz").read_bytes()))
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path), bos_token="<bos>", eos_token="<eos>")
    found = []
    for name, messages in conversations():
        source = (CHAT / f"{name}.jinja").read_text()
        encoded = tokenizer.apply_chat_template(
            messages, chat_template=source, return_assistant_tokens_mask=True, return_dict=True, date_string=DATE
        )
        found.append(digest(encoded["input_ids"], encoded["assistant_masks"]))
    return found


CHAT_TEMPLATES = ("chatml", "llama3", "qwen3", "gemma", "mistral")
DATE = "26 Jul 2024"
"""Of llama3's system message; the other templates do not read it."""


def conversations() -> list[tuple[str, list[dict]]]:
    """(template, messages) of 200 conversations of the jargon file, each template in turn.

    One, two and three questions in turn; every fourth has a system message where the template takes one.
    """
    with gzip.open(JARGON, "rt", encoding="utf-8") as file:
        rows = iter([json.loads(line)["messages"] for line in file])
    found = []
    for number in range(200):
        name = CHAT_TEMPLATES[number % 5]
        messages = [message for _ in range(1 + number // 5 % 3) for message in next(rows)]
        if number // 5 % 4 == 3 and name not in ("gemma", "mistral"):
            messages.insert(0, {"role": "system", "content": f"Answer as entry {number} does."})
        found.append((name, messages))
    return found


def digest(ids: list[int], mask: list[int]) -> str:
    return hashlib.blake2b(json.dumps([list(ids), list(mask)]).encode(), digest_size=8).hexdigest()


def main() -> None:
    HERE.mkdir(parents=True, exist_ok=True)
    write_tokenizer(HERE)
    data = rows()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in (*HERE.glob("*.json"), *HERE.glob("*.jinja"), MODEL / "config.json", MODEL / "model.safetensors"):
            if file.name != "goldens.json":
                shutil.copy(file, folder)
        cases = {case: {"form": form, "options": options} | run(folder, data[form], options)
                 for case, (form, options) in CASES.items()}  # fmt: skip
    found = {"length": LENGTH, "data": data, "cases": cases, "chats": chat_digests()}
    (HERE / "goldens.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")
    for case, golden in cases.items():
        print(case, {name: golden[name] for name in ("loss", "grad_norm", "entropy", "mean_token_accuracy")})


if __name__ == "__main__":
    main()
