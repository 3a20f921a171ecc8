"""The first error over all processes."""

import signal

from jtrain.launch.first_error import FirstError, Report

GLOO = "E1130 12:00 gloo.cc:12] Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:5"
BARRIER = "Shutdown barrier has failed."
LOST = "error: [process 1] process 0 has ended: KeyError: 'a'"


def first(*seen):
    errors = FirstError()
    for rank, what in seen:
        if isinstance(what, int):
            errors.ended(rank, f"host{rank}", what)
        else:
            errors.line(rank, f"host{rank}", what)
    return errors.first()


def test_nothing_went_wrong():
    assert first((0, "step 1/3 | loss 2"), (0, "WARNING: slow"), (0, 0), (1, 10), (1, 11)) is None


def test_a_killed_process_comes_before_what_its_peers_say_of_it():
    found = first((0, GLOO), (0, "error: another process was lost: Gloo"), (1, -signal.SIGKILL), (0, 12))
    assert found == Report(1, "host1", "killed by SIGKILL (out of memory, or by somebody)")
    assert str(found).startswith("rank 1 (host1): killed by SIGKILL")


def test_the_line_of_the_process_that_failed_is_quoted_whoever_comes_first():
    failed = (0, "error: this is a bug in jtrain, please report it: KeyError: 'a'")
    for order in ([(1, LOST), failed], [failed, (1, LOST)]):
        found = first(*order, (0, 70), (1, 12))
        assert (found.rank, found.text) == (0, failed[1].removeprefix("error: "))


def test_of_a_traceback_the_last_line_counts():
    lines = ["Traceback (most recent call last):", '  File "a.py", line 1, in <module>', "    import jaxx",
             "ModuleNotFoundError: No module named 'jaxx'", "later: ValueError: not of the traceback"]  # fmt: skip
    assert first(*((2, line) for line in lines), (2, 1)).text == "ModuleNotFoundError: No module named 'jaxx'"


def test_an_abort_is_a_consequence_after_other_words_and_a_cause_alone():
    assert first((0, -signal.SIGABRT)).cause
    assert first((1, BARRIER), (1, GLOO), (1, -signal.SIGABRT), (0, -signal.SIGSEGV)).rank == 0


def test_a_killed_coordinator_comes_before_the_abort_of_its_peer_which_is_heard_of_first():
    fatal = "F1201 00:49:12 client.h:86] Terminating process because the JAX distributed service detected fatal errors."
    found = first((1, fatal), (1, "Fatal Python error: Aborted"), (1, -signal.SIGABRT), (0, -signal.SIGKILL))
    assert (found.rank, found.cause) == (0, True)


def test_a_consequence_is_told_when_nothing_else_was_said():
    found = first((1, LOST), (1, 12))
    assert not found.cause and "process 0 has ended" in found.text


def test_an_end_without_a_word_is_told_by_its_code():
    assert first((3, 70)).text == "ended with exit code 70"
