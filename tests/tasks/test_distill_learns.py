"""That distillation learns where data is scarce: the student of the recipe distill-tiny on eight chapters."""

import gzip
import json

import pytest

from jtrain import DistillTrainer
from jtrain.config.paths import recipe_folder


@pytest.mark.learn
@pytest.mark.timeout(1500)
def test_half_of_the_gap_to_the_teacher_is_closed(tmp_path):
    """The gap is that of held-out losses (cross-entropy of six other chapters) of the teacher and of the same student,
    from the same random numbers, trained as long on the same rows without its teacher: on their cross-entropy.

    Printed besides: the gap to the student before training, and to the best evaluation of the one without a teacher.
    """
    with gzip.open(recipe_folder() / "assets/kjv-gospels.jsonl.gz", "rt") as file:
        chapters = [json.loads(line) for line in file]

    def run(name, **section):
        trainer = DistillTrainer(
            "distill-tiny",
            train_dataset=chapters[:8],
            eval_dataset=chapters[-6:],
            devices=1,
            run_dir=str(tmp_path / name),
            compile_cache=str(tmp_path / "xla"),
            distill=section,
        )
        before = trainer.evaluate()
        return [before, *trainer.fit().eval]

    distilled, alone = run("distilled"), run("alone", ce_weight=1.0)  # there the loss is the labels' cross-entropy
    teacher, after = distilled[0]["eval_teacher_nll"], distilled[-1]["eval_nll"]
    gaps = {
        "without a teacher": alone[-1]["eval_nll"] - teacher,
        "without a teacher, at its best": min(line["eval_nll"] for line in alone) - teacher,
        "before training": distilled[0]["eval_nll"] - teacher,
    }
    closed = {name: 1 - (after - teacher) / gap for name, gap in gaps.items()}
    print(f"held-out loss: teacher {teacher:.4f}, distilled {after:.4f}")
    for name, gap in gaps.items():
        print(f"gap to the student {name}: {gap:.4f}, {closed[name]:.0%} of it closed")
    print(f"KL on held-out text: {distilled[-1]['eval_kl']:.4f}, without a teacher {alone[-1]['eval_kl']:.4f}")
    assert gaps["without a teacher"] > 0.5 and closed["without a teacher"] >= 0.5
    assert distilled[-1]["eval_kl"] <= 0.5 * alone[-1]["eval_kl"]
