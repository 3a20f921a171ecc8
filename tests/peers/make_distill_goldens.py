"""Numbers of TRL's distillation, for tests/tasks/test_distill.py.

Needs trl 1.16 with torch and transformers 5 (in an environment of their own); this package is not imported:

    python tests/peers/make_distill_goldens.py [tests/tasks/goldens]

distillation.json: rows of tokens, and of several losses on them the value, the norm of its gradient by the student's
parameters, and the student's entropy: GKDTrainer.generalized_jsd_loss on the logits of two tiny models of
tests/models/families/fixtures, and, of the teacher's k likeliest tokens, the sparse divergence of
ServerDistillationTrainer, with its bucket for the others and without.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from trl.experimental.gkd import GKDTrainer
from trl.experimental.server_distillation.server_distillation_trainer import _add_tail_bucket, _jsd_divergence

FIXTURES = Path(__file__).parents[1] / "models/families/fixtures"
EOS = 2
ROWS = [
    {"prompt": "w5 w17 w30", "completion": " w9 w3 w44 w8"},
    {"prompt": "w6 w6", "completion": " w13 w14 w15 w16 w17 w18"},
    {"prompt": "w80 w81 w82 w83", "completion": " w20 w21 w22"},
    {"prompt": "w33", "completion": " w50 w40 w30"},
]
CASES: list[dict[str, Any]] = [
    {"loss": "forward_kl"},
    {"loss": "reverse_kl", "temperature": 2.0},
    {"loss": "jsd", "beta": 0.3, "temperature": 1.5},
    {"loss": "jsd", "beta": 0.0},
    {"loss": "jsd", "beta": 1.0},
    {"loss": "forward_kl", "top_k": 5},
    {"loss": "jsd", "beta": 0.5, "top_k": 5, "tail": "renormalise"},
]


def load(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(FIXTURES / name, attn_implementation="eager", dtype=torch.float32)


def tokens(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, mask and labels, padded on the right; completions and their end are learned."""
    rows = [(tokens(row["prompt"]), [*tokens(row["completion"]), EOS]) for row in ROWS]
    longest = max(len(a) + len(b) for a, b in rows)
    ids, mask, labels = (torch.full((len(rows), longest), value) for value in (0, 0, -100))
    for n, (prompt, completion) in enumerate(rows):
        size = len(prompt) + len(completion)
        ids[n, :size], mask[n, :size] = torch.tensor(prompt + completion), 1
        labels[n, len(prompt) : size] = torch.tensor(completion)
    return ids, mask, labels


def sparse(
    student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, case: dict[str, Any], beta: float
) -> Any:
    temperature = case.get("temperature", 1.0)
    log_q, log_p = ((z / temperature).log_softmax(-1) for z in (student, teacher))
    log_p, ids = log_p.topk(case["top_k"], -1)
    log_q = log_q.gather(-1, ids)
    if case.get("tail") == "renormalise":
        log_p, log_q = log_p.log_softmax(-1), log_q.log_softmax(-1)
        terms = _jsd_divergence(log_q, log_p, beta)
    else:
        known = torch.ones_like(ids, dtype=torch.bool)
        log_q, mask = _add_tail_bucket(log_q, known)
        log_p, _ = _add_tail_bucket(log_p, known)
        terms = _jsd_divergence(log_q, log_p, beta, mask)
    live = labels != -100
    return terms.sum(-1)[live].sum() / live.sum()


def golden(case: dict[str, Any]) -> dict[str, Any]:
    student, teacher = load("llama"), load("qwen2")
    ids, mask, labels = batch()
    with torch.no_grad():
        theirs = teacher(input_ids=ids, attention_mask=mask).logits[:, :-1]
    ours, labels = student(input_ids=ids, attention_mask=mask).logits[:, :-1], labels[:, 1:]
    beta = {"forward_kl": 0.0, "reverse_kl": 1.0}.get(case["loss"], case.get("beta"))
    if "top_k" in case:
        loss = sparse(ours, theirs, labels, case, beta)
    else:
        options = {"beta": beta, "temperature": case.get("temperature", 1.0)}
        loss = GKDTrainer.generalized_jsd_loss(ours, theirs, labels=labels, **options)
    loss.backward()
    norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in student.parameters() if p.grad is not None))
    log_q, live = ours.detach().double().log_softmax(-1), labels != -100
    entropy = -(log_q.exp() * log_q).sum(-1)[live].mean()
    return {"options": case, "loss": float(loss), "grad_norm": float(norm), "entropy": float(entropy)}


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "tasks/goldens")
    found = {"rows": ROWS, "cases": [golden(case) for case in CASES]}
    (out / "distillation.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
