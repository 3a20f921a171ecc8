"""Makes tests/data/fixtures/tokenizers/*.json.xz of llama.cpp's vocabulary files and their golden cases.

    python -m tests.peers.make_tokenizer_fixtures FOLDER

FOLDER holds ggml-vocab-{gpt-2,qwen2,phi-3}.gguf with .inp (texts) and .out (ids of the models' own tokenizers, without
special tokens), as in llama.cpp/models. Needs the package gguf.

Each fixture: tokens; types; scores (SentencePiece); cuts: of each merge the length of its left half, where merge n
makes the n-th token that is longer than a byte; pre; cases: [text, ids].
"""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path

OUT = Path(__file__).parents[1] / "data" / "fixtures" / "tokenizers"


def main(folder: str) -> None:
    import gguf

    OUT.mkdir(parents=True, exist_ok=True)
    for name in ("gpt-2", "qwen2", "phi-3"):
        path = Path(folder) / f"ggml-vocab-{name}.gguf"
        fields = gguf.GGUFReader(path).fields

        def field(key: str, fields=fields):
            found = fields.get(f"tokenizer.ggml.{key}")
            return None if found is None else found.contents()

        tokens = field("tokens")
        places = {token: number for number, token in enumerate(tokens)}
        pairs = [merge.split(" ") for merge in field("merges") or []]
        order = [places["".join(pair)] for pair in pairs]
        assert order == sorted(order)
        texts = path.with_suffix(".gguf.inp").read_text("utf-8").split("\n__ggml_vocab_test__\n")[:-1]
        ids = [[int(x) for x in line.split()] for line in path.with_suffix(".gguf.out").read_text().splitlines()]
        content = {
            "pre": field("pre"),
            "tokens": tokens,
            "types": field("token_type"),
            "scores": field("scores"),
            "first": order[0] if order else None,
            "cuts": [len(left) for left, _ in pairs],
            "cases": list(zip(texts, ids, strict=True)),
        }
        if order:
            assert order == list(range(order[0], order[0] + len(order)))
        data = lzma.compress(json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode(), preset=9)
        (OUT / f"{name}.json.xz").write_bytes(data)
        print(name, len(tokens), "tokens,", len(texts), "cases,", len(data), "bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
