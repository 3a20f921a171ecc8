"""That SFT learns: the bundled tiny model on questions and answers, as `jtrain sft sft-tiny` trains it."""

import pytest

from jtrain import SFTTrainer


@pytest.mark.learn
@pytest.mark.timeout(1500)
def test_held_out_answers_lose_at_least_15_percent_of_their_loss(tmp_path):
    """Three passes over 1,357 conversations; the loss is that of the assistant's tokens in the last 71."""
    trainer = SFTTrainer("sft-tiny", devices=1, run_dir=str(tmp_path / "run"), compile_cache=str(tmp_path / "xla"))
    before = trainer.evaluate()["eval_loss"]
    after = trainer.fit().eval[-1]["eval_loss"]
    print(f"eval_loss {before:.4f} -> {after:.4f} ({1 - after / before:.1%} less)")
    assert after <= 0.85 * before
