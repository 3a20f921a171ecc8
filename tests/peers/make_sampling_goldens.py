"""Makes tests/ops/goldens/sampling.json: what transformers' logits processors leave of some scores.

    python -m tests.peers.make_sampling_goldens

The order is that of `GenerationMixin._get_logits_processor`. Needs torch and transformers (5.24).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers.generation import logits_process as processors

OUT = Path(__file__).parents[1] / "ops" / "goldens" / "sampling.json"
CASES = [
    {"repetition_penalty": 1.3},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"repetition_penalty": 1.5, "temperature": 1.4, "top_k": 12, "top_p": 0.7, "min_p": 0.05},
    {"temperature": 0.5, "top_p": 0.05},
]


def main() -> None:
    torch.manual_seed(0)
    logits = (torch.randn(3, 40) * 3).double().round(decimals=4)
    seen = torch.randint(0, 40, (3, 9))
    cases = []
    for case in CASES:
        scores = logits.float()
        if "repetition_penalty" in case:
            scores = processors.RepetitionPenaltyLogitsProcessor(case["repetition_penalty"])(seen, scores)
        if "temperature" in case:
            scores = processors.TemperatureLogitsWarper(case["temperature"])(seen, scores)
        for name, kind in (("top_k", "TopK"), ("top_p", "TopP"), ("min_p", "MinP")):
            if name in case:
                scores = getattr(processors, f"{kind}LogitsWarper")(case[name])(seen, scores)
        kept = [[None if value == -float("inf") else value for value in row] for row in scores.tolist()]
        cases.append({"options": case, "scores": kept})
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({"logits": logits.tolist(), "seen": seen.tolist(), "cases": cases}))


if __name__ == "__main__":
    main()
