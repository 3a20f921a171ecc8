"""What a run says of itself."""

import os
import subprocess
import sys
import threading

import pytest

from jtrain.config.ladder import PHASES
from jtrain.progress import MARK, Progress, Reporter, take


@pytest.fixture
def pipe():
    """A reporter, and a function that reads the lines so far."""
    reads, writes = os.pipe()
    yield Reporter(writes), lambda: os.read(reads, 1 << 16).decode().split("\n")[:-1]  # splitlines knows the mark
    os.close(reads)
    os.close(writes)


def test_a_line_says_where_the_run_is_and_leaves_other_text_alone():
    progress = Progress("step", 12, 8, 0.5)
    assert take("loss 2.3" + progress.line()) == ("loss 2.3", progress)
    assert take("step 3 | loss 2.3\n") == ("step 3 | loss 2.3\n", None)
    assert take("kept" + MARK + '{"phase": "st') == ("kept", None)


def test_what_is_not_said_stays_as_it_was(pipe):
    reporter, lines = pipe
    reporter.report("restore")
    reporter.report("step", step=7, durable=5)
    reporter.report(durable=7)
    assert [take(line)[1].phase for line in lines()] == ["restore", "step", "step"]
    now = reporter.current()
    assert (now.phase, now.step, now.durable) == ("step", 7, 7)


def test_fast_updates_share_a_line_and_a_slow_phase_has_its_own(pipe):
    reporter, lines = pipe
    for step in range(1000):
        reporter.report("data_wait")
        reporter.report("step", step=step)
    reporter.report("eval")
    said = [take(line)[1] for line in lines()]
    assert len(said) < 20 and (said[-1].phase, said[-1].step) == ("eval", 999)


def test_lines_of_several_threads_stay_whole(pipe):
    reporter, lines = pipe
    threads = [threading.Thread(target=lambda n=n: reporter.report(PHASES[n].name, durable=n)) for n in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(take(line)[1].durable for line in lines()) == list(range(9))


def test_without_a_supervisor_nothing_is_written_and_nobody_to_read_is_no_error(pipe):
    script = "from jtrain.progress import report, current; report('eval', step=3); print(current().step)"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout == "3\n" and MARK not in said.stderr
    reads, writes = os.pipe()
    os.close(reads)
    reporter = Reporter(writes)
    reporter.report("eval")
    reporter.report("step", step=1)
    os.close(writes)
    assert reporter.current().step == 1
