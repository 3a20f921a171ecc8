"""Handwritten digits as conversations: {"messages": [a picture and a question, the digit's name]}, one a line.

    python docs/examples/digits_chat.py FOLDER

writes FOLDER/train.jsonl (1,438 conversations) and FOLDER/eval.jsonl (359), the pictures in them as PNG in base64.
"""

import base64
import io
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
QUESTION = "Which digit is this?"
HELD_OUT = 359


def picture(pixels):
    """8 x 8 grey pixels as PNG in base64."""
    file = io.BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8).reshape(8, 8)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def question(pixels):
    """What the user says."""
    parts = [{"type": "image", "base64": picture(pixels)}, {"type": "text", "text": QUESTION}]
    return {"role": "user", "content": parts}


def conversations():
    """All of them, and the digit of each."""
    with np.load(Path(__file__).parents[2] / "configs" / "assets" / "digits8x8.npz") as data:
        images, labels = data["images"], data["labels"]
    answers = [{"role": "assistant", "content": NAMES[label]} for label in labels]
    return [{"messages": [question(x), answer]} for x, answer in zip(images, answers, strict=True)], labels


def write(folder):
    """Both files."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, _ = conversations()
    for name, part in (("train", rows[:-HELD_OUT]), ("eval", rows[-HELD_OUT:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
