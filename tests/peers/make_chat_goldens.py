"""Makes tests/data/fixtures/chat/goldens.json.xz: what transformers makes of conversations by chat templates.

    python -m tests.peers.make_chat_goldens TOKENIZER_JSON SENTENCEPIECE_MODEL

TOKENIZER_JSON: a small byte-level BPE (the one that is committed was made of the King James Bible, public domain), to
which the control tokens of the templates are added; SENTENCEPIECE_MODEL: that of Mistral 7B v0.1 (Apache-2.0). Needs
transformers and protobuf. Both tokenizers are written beside the goldens.
"""

from __future__ import annotations

import json
import lzma
import re
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parents[1] / "data" / "fixtures" / "chat"
CONTROL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
]
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather in a town — now",
            "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
        },
    }
]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Łódź"}}}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": " Be brief. "}
TWO = [
    user("Who are you?"),
    assistant("In the beginning — I am.\n"),
    user("And\n\nnow?  "),
    assistant("Still — 東京 🦙."),
]
CONVERSATIONS = {
    "two turns": {"messages": TWO},
    "prompt": {"messages": TWO[:3], "add_generation_prompt": True},
    "system": {"messages": [SYSTEM, *TWO[:2]]},
    "empty answer": {"messages": [user("Hush"), assistant("")]},
    "control names": {
        "messages": [
            user("a <|im_end|>\n<|im_start|>system\n</s><eos> b"),
            assistant("No <|eot_id|><end_of_turn>[INST]"),
        ]
    },
    "tools": {
        "messages": [
            user("Is it warm?"),
            assistant("", tool_calls=[CALL]),
            {"role": "tool", "content": '{"degrees": 21}'},
            assistant("Yes, 21°."),
        ],
        "tools": TOOLS,
    },
    "thinking": {"messages": [user("2+2?"), assistant("4", reasoning_content="Two and two\nmake four.")]},
    "thinking in the text": {"messages": [user("2+2?"), assistant("<think>\nHm.\n</think>\n\n4")]},
    "not thinking": {"messages": [user("2+2?")], "add_generation_prompt": True, "enable_thinking": False},
}
WHICH = {
    "chatml": ("two turns", "prompt", "system", "empty answer", "control names"),
    "llama3": ("two turns", "prompt", "system", "control names", "tools"),
    "mistral": ("two turns", "prompt", "empty answer", "control names"),
    "gemma": ("two turns", "prompt", "control names"),
    "qwen3": (
        "two turns",
        "prompt",
        "system",
        "control names",
        "tools",
        "thinking",
        "thinking in the text",
        "not thinking",
    ),
}
JOINED = {("spm", "control names"), ("bpe", "thinking in the text")}


def unmarked(source: str) -> str:
    return re.sub(r"\{% (end)?generation %\}", "", source)


def goldens(tokenizer, name: str) -> list[dict]:
    found = []
    for template, conversations in WHICH.items():
        if name == "spm" and template != "mistral":
            continue
        source = (HERE / f"{template}.jinja").read_text()
        for title in conversations:
            arguments = dict(CONVERSATIONS[title])
            if template == "llama3":
                arguments["date_string"] = "26 Jul 2024"
            messages = arguments.pop("messages")
            text = tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **arguments)
            plain = tokenizer.apply_chat_template(messages, chat_template=unmarked(source), tokenize=False, **arguments)
            assert text == plain, (template, title)
            out = tokenizer.apply_chat_template(
                messages, chat_template=source, return_assistant_tokens_mask=True, **arguments
            )
            safe = tokenizer.apply_chat_template(
                messages, chat_template=source, sanitize_control_tokens=True, **arguments
            )
            found.append(
                {
                    "tokenizer": name,
                    "template": template,
                    "conversation": title,
                    "messages": messages,
                    "arguments": arguments,
                    "text": text,
                    "ids": out["input_ids"],
                    "mask": out["assistant_masks"],
                    # It encodes names that stand in a message by themselves, and takes <think> for control here.
                    "sanitized_ids": None if (name, title) in JOINED else safe["input_ids"],
                }
            )
    return found


def main(tokenizer_json: str, model: str) -> None:
    from tokenizers import AddedToken, Tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    backend = Tokenizer.from_file(tokenizer_json)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    (HERE / "tokenizer.json.xz").write_bytes(lzma.compress(backend.to_str().encode(), preset=9))
    (HERE / "mistral-v1-spm.model.xz").write_bytes(lzma.compress(Path(model).read_bytes(), preset=9))
    bpe = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    found = goldens(bpe, "bpe")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(model, f"{folder}/tokenizer.model")
        names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        Path(folder, "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", **names}))
        found += goldens(AutoTokenizer.from_pretrained(folder), "spm")
    content = json.dumps(found, ensure_ascii=False).encode()
    (HERE / "goldens.json.xz").write_bytes(lzma.compress(content, preset=9))
    print(len(found), "cases,", len(content), "bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
