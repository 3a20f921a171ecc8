"""That distillation learns: the recipe distill-tiny, beside the same student trained without its teacher."""

import pytest

from jtrain import DistillTrainer


@pytest.mark.learn
@pytest.mark.timeout(1500)
def test_half_of_the_gap_to_the_teacher_is_closed_and_more_than_without_it(tmp_path):
    """The gap is that of held-out losses: the student's before training minus the teacher's.

    Beside it the same student, from the same random numbers, on the cross-entropy of the same rows alone. Of its
    distance to the teacher (KL on held-out text) more than the distilled student's is left.
    """

    def run(name, **section):
        trainer = DistillTrainer(
            "distill-tiny",
            devices=1,
            run_dir=str(tmp_path / name),
            compile_cache=str(tmp_path / "xla"),
            distill=section,
            eval={"eval_steps": 0},
        )
        before = trainer.evaluate()
        return before, trainer.fit().eval[-1]

    before, after = run("distilled")
    _, alone = run("alone", ce_weight=1.0)  # the loss is the labels' cross-entropy
    teacher = before["eval_teacher_nll"]
    gap, left = before["eval_nll"] - teacher, after["eval_nll"] - teacher
    print(
        f"held-out loss: teacher {teacher:.4f}, student {before['eval_nll']:.4f} -> {after['eval_nll']:.4f} "
        f"({1 - left / gap:.0%} of the gap closed), without teacher {alone['eval_nll']:.4f}; "
        f"KL {before['eval_kl']:.4f} -> {after['eval_kl']:.4f}, without teacher {alone['eval_kl']:.4f}; "
        f"agreement {after['eval_agreement']:.1%}, without teacher {alone['eval_agreement']:.1%}"
    )
    assert gap > 1.0 and left <= 0.5 * gap
    assert after["eval_kl"] <= 0.75 * alone["eval_kl"]
