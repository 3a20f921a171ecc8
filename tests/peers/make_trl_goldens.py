"""Numbers of TRL's trainers, for tests/tasks: losses of preferences, KTO, ORPO, CPO, reward models.

Needs trl 1.16 with torch and transformers 5 (in an environment of their own); this package is not imported:

    python tests/peers/make_trl_goldens.py [tests/tasks/goldens]

preference_losses.json: TRL's own `_compute_loss` (or loss function) on given log-probabilities, with gradients.
preference_runs.json: whole trainers on fixed rows with two tiny models of tests/models/families/fixtures: the loss,
the norm of its gradient and the metrics of the first step.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

FIXTURES = Path(__file__).parents[1] / "models/families/fixtures"
POLICY, REFERENCE = FIXTURES / "llama", FIXTURES / "llama31-ropescaled"
QUIET = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "disable_tqdm": True,
    "per_device_train_batch_size": 4,
    "max_length": 32,
    "remove_unused_columns": False,
}

PAIRS = [
    {"prompt": "w5 w17 w30", "chosen": " w9 w3 w44 w8", "rejected": " w71 w12"},
    {"prompt": "w6 w6", "chosen": " w90", "rejected": " w13 w14 w15 w16 w17 w18"},
    {"prompt": "w80 w81 w82 w83 w84 w85", "chosen": " w20 w21 w22", "rejected": " w20 w23 w22"},
    {"prompt": "w33", "chosen": " w50 w40 w30 w60 w70 w80 w90 w11", "rejected": " w7"},
]
SINGLES = [
    {"prompt": "w5 w17 w30", "completion": " w9 w3 w44 w8", "label": True},
    {"prompt": "w6 w6", "completion": " w13 w14 w15 w16 w17 w18", "label": False},
    {"prompt": "w80 w81 w82 w83", "completion": " w20 w21 w22", "label": True},
    {"prompt": "w33", "completion": " w50 w40 w30", "label": True},
]
MARGINS = [0.0, 0.5, 1.25, 0.25]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word: w3 is token 3."""
    names = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{n}": n for n in range(3, 96)}
    backend = Tokenizer(models.WordLevel(names, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


def grad_norm(model: Any) -> float:
    return float(torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters() if p.grad is not None)))


def last_metrics(trainer: Any) -> dict[str, float]:
    found = getattr(trainer, "_metrics", None) or trainer._stored_metrics
    return {name: float(values[-1]) for name, values in found["train"].items()}


def first_batch(trainer: Any) -> Any:
    return next(iter(trainer.get_train_dataloader()))


# -- losses of given log-probabilities ---------------------------------------------------------------------------------


class Scores(torch.nn.Module):
    """In place of a model: the log-probabilities of its tokens are given."""

    training, is_gradient_checkpointing = True, False

    def __init__(self, logps: torch.Tensor, log_sum_sq: torch.Tensor):
        super().__init__()
        self.logps, self.log_sum_sq = logps, log_sum_sq

    def forward(self, **_: Any) -> Any:
        still = self.logps.detach()
        return SimpleNamespace(
            log_probs=self.logps,
            entropy=-still,
            mean_logits=still,
            is_top1=still > -1,
            log_sum_sq_probs=self.log_sum_sq,
        )


def tokens_of_pairs(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Six pairs of completions of 1 to 7 tokens behind prompts of 2."""
    lengths = torch.randint(1, 8, (12,), generator=generator)
    lengths[0], lengths[6] = 7, 1
    places = torch.arange(10)[None]
    mask = ((places >= 2) & (places < 2 + lengths[:, None])).long()
    return {
        "input_ids": torch.ones(12, 10, dtype=torch.long),
        "attention_mask": (places < 2 + lengths[:, None]).long(),
        "completion_mask": mask,
    }


def drawn(mask: torch.Tensor, generator: torch.Generator, scale: float) -> torch.Tensor:
    logps = -scale * torch.rand(mask.shape[0], mask.shape[1] - 1, generator=generator, dtype=torch.float64)
    return ((logps * 1000).round() / 1000 * mask[:, 1:]).float()


DPO_CASES: list[tuple[dict[str, Any], float]] = [
    *(({"loss_type": [kind]}, scale) for scale in (3.0,) for kind in (
        "sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down",
        "discopop", "sft", "sigmoid_norm",
    )),
    ({"loss_type": ["exo_pair"], "label_smoothing": 1e-3}, 1.0),
    ({"loss_type": ["exo_pair"], "label_smoothing": 0.2, "beta": 0.7}, 1.0),
    ({"loss_type": ["robust"], "label_smoothing": 0.1}, 1.0),
    ({"loss_type": ["aot"], "label_smoothing": 0.1}, 1.0),
    ({"loss_type": ["aot_unpaired"], "label_smoothing": 0.1, "beta": 0.5}, 1.0),
    ({"loss_type": ["discopop"], "discopop_tau": 0.5}, 1.0),
    ({"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}, 1.0),
    ({"loss_type": ["ipo"], "beta": 0.5}, 1.0),
    ({"loss_type": ["sigmoid"], "ld_alpha": 0.3}, 1.0),
    ({"loss_type": ["ipo"], "ld_alpha": 0.0}, 1.0),
    ({"loss_type": ["sigmoid"], "use_weighting": True}, 1.0),
    *(({"loss_type": [kind], "f_divergence_type": divergence, "beta": 0.4}, 1.0)
      for kind in ("sigmoid", "ipo", "sigmoid_norm") for divergence in ("forward_kl", "js_divergence")),
    ({"loss_type": ["hinge"], "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3}, 1.0),
    ({"loss_type": ["discopop"], "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0}, 1.0),
]  # fmt: skip


DPO_DEFAULTS = {
    "beta": 0.1,
    "label_smoothing": 0.0,
    "ld_alpha": None,
    "use_weighting": False,
    "f_divergence_type": "reverse_kl",
    "f_alpha_divergence_coef": 0.5,
}
KTO_DEFAULTS = {"beta": 0.1, "loss_type": "kto", "desirable_weight": 1.0, "undesirable_weight": 1.0}


def dpo_losses(trainer: DPOTrainer) -> list[dict[str, Any]]:
    found = []
    for number, (options, scale) in enumerate(DPO_CASES):
        generator = torch.Generator().manual_seed(number)
        inputs = tokens_of_pairs(generator)
        mask = inputs["completion_mask"]
        logps, ref = drawn(mask, generator, scale).requires_grad_(), drawn(mask, generator, scale)
        squares = (drawn(mask, generator, scale) - 1.0) * mask[:, 1:]
        for name, value in (DPO_DEFAULTS | options).items():
            setattr(trainer, "loss_types" if name == "loss_type" else name, value)
        trainer.loss_weights = options.get("loss_weights", [1.0] * len(trainer.loss_types))
        trainer.args.discopop_tau = options.get("discopop_tau", 0.05)
        policy, trainer.ref_model = Scores(logps, squares), Scores(ref, squares)
        trainer.model = policy
        trainer._metrics["train"].clear()
        loss = trainer._compute_loss(policy, inputs, False)
        loss.backward()
        found.append(
            {
                "options": options,
                "completion_mask": mask.tolist(),
                "logps": logps.tolist(),
                "ref_logps": ref.tolist(),
                "log_sum_sq_probs": squares.tolist(),
                "loss": loss.item(),
                "gradient": logps.grad.tolist(),
                "metrics": last_metrics(trainer),
            }
        )
    return found


KTO_CASES: list[dict[str, Any]] = [
    {},
    {"beta": 0.5, "desirable_weight": 1.33, "undesirable_weight": 0.7},
    {"loss_type": "apo_zero_unpaired", "beta": 0.5},
]


def kto_losses(trainer: KTOTrainer) -> list[dict[str, Any]]:
    found = []
    for number, options in enumerate(KTO_CASES):
        for shift in (0.0, 2.0):  # of the mismatched log-ratios: an estimate above 0, and one below
            generator = torch.Generator().manual_seed(100 + number)
            inputs = tokens_of_pairs(generator)
            mask = inputs["completion_mask"]
            logps, ref = drawn(mask, generator, 1.0).requires_grad_(), drawn(mask, generator, 1.0)
            kl, ref_kl = drawn(mask, generator, 1.0), drawn(mask, generator, 1.0 + shift)
            label = torch.rand(12, generator=generator) < 0.6
            for name, value in (KTO_DEFAULTS | options).items():
                setattr(trainer, name, value)
            trainer.calculate_KL = trainer.loss_type == "kto"
            batch = inputs | {f"KL_{name}": x for name, x in inputs.items()} | {"label": label}
            policy, trainer.ref_model = Scores(logps, logps.detach()), Scores(ref, ref)
            trainer.model = policy
            kls = iter([kl.sum(-1), ref_kl.sum(-1)])
            trainer._compute_kl_logps = lambda model, batch, kls=kls: next(kls)
            trainer._metrics["train"].clear()
            loss = trainer._compute_loss(policy, batch, False)
            loss.backward()
            found.append(
                {
                    "options": options,
                    "logps": logps.sum(-1).tolist(),
                    "ref_logps": ref.sum(-1).tolist(),
                    "kl_logps": kl.sum(-1).tolist(),
                    "ref_kl_logps": ref_kl.sum(-1).tolist(),
                    "label": label.tolist(),
                    "loss": loss.item(),
                    "gradient": [row[mask[i, 1:].bool()][0].item() for i, row in enumerate(logps.grad)],
                    "metrics": last_metrics(trainer),
                }
            )
    return found


CPO_CASES: list[dict[str, Any]] = [
    {"loss_type": "sigmoid"},
    {"loss_type": "sigmoid", "label_smoothing": 0.1, "beta": 0.5},
    {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0},
    {"loss_type": "simpo", "beta": 2.5, "alpha": 0.25},
    {"loss_type": "sigmoid", "alpha": 0.1},
]


def reference_free_losses(kind: str, trainer: Any, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """ORPO's and CPO's functions of log-probabilities (means a token for ORPO and SimPO)."""
    found = []
    for number, options in enumerate(cases):
        generator = torch.Generator().manual_seed(200 + number)
        means = options.get("loss_type") == "simpo" or kind == "orpo"
        scale = 2.0 if means else 6.0
        chosen, rejected = ((-scale * torch.rand(8, generator=generator) - 0.01).requires_grad_() for _ in range(2))
        for name, value in ({"beta": 0.1, "label_smoothing": 0.0, "alpha": 0.0, "simpo_gamma": 0.5} | options).items():
            setattr(trainer, name, value)
        if kind == "orpo":
            parts = trainer.odds_ratio_loss(chosen, rejected)
            loss = -parts[0].mean()
        else:
            parts = trainer.cpo_loss(chosen, rejected)
            loss = parts[0].mean()
        loss.backward()
        found.append(
            {
                "kind": kind,
                "options": options,
                "chosen": chosen.tolist(),
                "rejected": rejected.tolist(),
                "loss": loss.item(),
                "gradient": [chosen.grad.tolist(), rejected.grad.tolist()],
            }
        )
    return found


# -- whole trainers ----------------------------------------------------------------------------------------------------


def run(trainer: Any) -> dict[str, Any]:
    """The first step's loss, norm of gradient and metrics."""
    model = trainer.model
    model.train()
    batch = trainer._prepare_inputs(first_batch(trainer))
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    ids = {name: x.tolist() for name, x in batch.items() if "input_ids" in name and hasattr(x, "tolist")}
    return {"loss": loss.item(), "grad_norm": grad_norm(model), "metrics": last_metrics(trainer), "ids": ids}


def dpo_trainer(folder: str, **options: Any) -> DPOTrainer:
    return DPOTrainer(
        model=load(POLICY),
        ref_model=load(REFERENCE),
        args=DPOConfig(output_dir=folder, **QUIET, train_sampling_strategy="sequential", **options),
        train_dataset=Dataset.from_list(PAIRS),
        processing_class=word_tokenizer(),
    )


def kto_trainer(folder: str, **options: Any) -> KTOTrainer:
    return KTOTrainer(
        model=load(POLICY),
        ref_model=load(REFERENCE),
        args=KTOConfig(output_dir=folder, **QUIET, **options),
        train_dataset=Dataset.from_list(SINGLES),
        processing_class=word_tokenizer(),
    )


def plain_trainer(kind: str, folder: str, **options: Any) -> Any:
    config, trainer = {"orpo": (ORPOConfig, ORPOTrainer), "cpo": (CPOConfig, CPOTrainer)}[kind]
    return trainer(
        model=load(POLICY),
        args=config(output_dir=folder, **QUIET, train_sampling_strategy="sequential", **options),
        train_dataset=Dataset.from_list(PAIRS),
        processing_class=word_tokenizer(),
    )


def reward_model() -> Any:
    """The policy's body under a head that is written out here."""
    model = AutoModelForSequenceClassification.from_pretrained(
        POLICY, num_labels=1, attn_implementation="eager", dtype=torch.float32
    )
    size = model.score.weight.shape[1]
    with torch.no_grad():
        model.score.weight[0] = torch.sin(torch.arange(size, dtype=torch.float64)).float() / 4
    return model


def reward_trainer(folder: str, *, margins: bool = False, **options: Any) -> RewardTrainer:
    rows = [dict(row) for row in PAIRS]
    if margins:
        rows = [row | {"margin": margin} for row, margin in zip(rows, MARGINS, strict=True)]
    return RewardTrainer(
        model=reward_model(),
        args=RewardConfig(output_dir=folder, **QUIET, train_sampling_strategy="sequential", **options),
        train_dataset=Dataset.from_list(rows),
        processing_class=word_tokenizer(),
    )


DPO_RUNS: list[dict[str, Any]] = [
    {},
    {"loss_type": ["ipo"], "beta": 0.5},
    {"loss_type": ["aot_unpaired"]},
    {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    {"ld_alpha": 0.3},
    {"use_weighting": True},
    *(
        {"loss_type": [kind]}
        for kind in (
            "hinge", "nca_pair", "bco_pair", "sppo_hard", "aot", "apo_zero", "apo_down", "discopop", "sft",
            "sigmoid_norm",
        )
    ),
    {"loss_type": ["exo_pair"], "label_smoothing": 1e-3},
    {"loss_type": ["robust"], "label_smoothing": 0.1},
]  # fmt: skip
CPO_RUNS: list[dict[str, Any]] = [{}, {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.0}]
KTO_RUNS: list[dict[str, Any]] = [{}, {"loss_type": "apo_zero_unpaired"}]
REWARD_RUNS: list[dict[str, Any]] = [{}, {"margins": True, "center_rewards_coefficient": 0.01}]


def rounded(content: Any) -> Any:
    """Numbers with the digits of float32."""
    if isinstance(content, dict):
        return {name: rounded(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [rounded(value) for value in content]
    return float(f"{content:.8g}") if isinstance(content, float) else content


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "tasks/goldens")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        losses = {
            "dpo": dpo_losses(dpo_trainer(folder)),
            "kto": kto_losses(kto_trainer(folder)),
            "plain": [
                *reference_free_losses("orpo", plain_trainer("orpo", folder), [{}, {"beta": 0.7}]),
                *reference_free_losses("cpo", plain_trainer("cpo", folder), CPO_CASES),
            ],
        }
        runs = {
            "pairs": PAIRS,
            "singles": SINGLES,
            "margins": MARGINS,
            "dpo": [{"options": options} | run(dpo_trainer(folder, **options)) for options in DPO_RUNS],
            "kto": [{"options": options} | run(kto_trainer(folder, **options)) for options in KTO_RUNS],
            "orpo": [{"options": {}} | run(plain_trainer("orpo", folder))],
            "cpo": [{"options": options} | run(plain_trainer("cpo", folder, **options)) for options in CPO_RUNS],
            "reward": [{"options": options} | run(reward_trainer(folder, **options)) for options in REWARD_RUNS],
        }
    for name, content in (("preference_losses", losses), ("preference_runs", runs)):
        (out / f"{name}.json").write_text(json.dumps(rounded(content)) + "\n")
        print(f"{out / name}.json")


if __name__ == "__main__":
    main()
