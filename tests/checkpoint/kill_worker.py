"""Saves step after step into a run directory until it is killed, going on from the newest durable step.

usage: kill_worker.py RUN [POINT]. POINT kills the process itself, at a place that a random moment seldom meets.
"""

import os
import signal
import sys

import numpy as np

from jtrain.checkpoint import Checkpoints, files, finish
from jtrain.checkpoint import checkpoints as module

ARRAYS, SIDE = 6, 128


def state_of(step):
    return {f"w{i}": np.full((SIDE, SIDE), step * 100 + i, np.float32) for i in range(ARRAYS)}


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point):
    if point == "before_sync":
        finish.files.sync_tree = die
    elif point == "before_manifest":
        finish.write_manifest = die
    elif point == "before_the_manifest_is_renamed":
        os.replace = die
    elif point == "before_the_step_is_renamed":
        finish.files.move = die
    elif point == "after_manifest":
        module.surplus_steps = die
    elif point == "in_the_deletion":
        original = files.remove_tree

        def half(path):
            if "_trash" in os.fspath(path) and os.path.isdir(path):
                original(path / "state")
                die()

        files.remove_tree = half


def main():
    run, point = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    with Checkpoints(run, save_total_limit=2) as checkpoints:
        step = 0
        if checkpoints.steps():
            import jax

            abstract = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in state_of(0).items()}
            state, meta, step = checkpoints.restore(abstract)
            for name, wanted in state_of(step).items():
                np.testing.assert_array_equal(state[name], wanted)
            assert meta == {"step": step}
        print("START", step, flush=True)
        for number in range(step + 1, step + 1000):
            if number == step + 4:
                checkpoints.wait()  # it is this save that dies, not the one before
                arm(point)
            checkpoints.save(number, state_of(number), {"step": number})
            print("SAVED", number, flush=True)


if __name__ == "__main__":
    main()
