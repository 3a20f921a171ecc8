"""The other side of the figure `sft`: TRL's SFTTrainer, run by an interpreter that has it.

    python sft_peer.py REQUEST.json

REQUEST: {"folder", "records", "steps", "rows", "length", "out"}. It says its version, trains, and after every `steps`
updates answers `{"seconds": ..., "tokens": ...}` and waits for a line on standard input. This file imports nothing of
jtrain, and jtrain does not import it.
"""

import json
import os
import sys
import time


def main(path: str) -> None:
    """Trains until standard input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints stays out of the answers
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    with open(path, encoding="utf-8") as file:
        request = json.load(file)

    def answer(value: dict) -> None:
        print(json.dumps(value), file=answers, flush=True)

    class Turns(TrainerCallback):
        def __init__(self) -> None:
            self.started, self.tokens = 0.0, 0

        def on_step_begin(self, args, state, control, **_):
            if not self.started:
                self.started, self.tokens = time.perf_counter(), trainer._total_train_tokens

        def on_step_end(self, args, state, control, **_):
            if state.global_step % request["steps"] == 0:
                seconds = time.perf_counter() - self.started
                answer({"seconds": seconds, "tokens": trainer._total_train_tokens - self.tokens})
                control.should_training_stop = not sys.stdin.readline()
                self.started = 0.0

    arguments = trl.SFTConfig(
        output_dir=request["out"],
        max_steps=10_000,
        per_device_train_batch_size=request["rows"],
        max_length=request["length"],
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        logging_steps=10_000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    records = Dataset.from_list(request["records"])
    trainer = trl.SFTTrainer(model=request["folder"], args=arguments, train_dataset=records, callbacks=[Turns()])
    answer({"version": trl.__version__})
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])
