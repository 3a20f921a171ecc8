"""When a run that has ended is started again."""

import signal

import pytest

from jtrain.launch.restarts import End, Kind, Restarts, kind_of


def decide(restarts, code, reason="x", durable=None, **more):
    return restarts.decide(End(code, reason, durable, **more))


@pytest.mark.parametrize(
    "codes, kind",
    [
        ([0], Kind.DONE),
        ([10, 11], Kind.PREEMPTED),
        ([12, 13, 14, 255, -signal.SIGKILL, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGTERM], Kind.INFRA),
        ([15, 64, 65, 66, 130], Kind.FINAL),
        ([70, 1, 2, 127], Kind.OWN),
    ],
)
def test_exit_codes_mean_what_the_contract_says(codes, kind):
    assert {kind_of(code) for code in codes} == {kind}


@pytest.mark.parametrize("code", [0, 15, 64, 65, 66])
def test_what_a_restart_does_not_mend_ends_at_once_with_its_code(code):
    assert (decide(Restarts(9, 9), code).again, decide(Restarts(9, 9), code).code) == (False, code)


def test_errors_of_the_run_itself_have_a_budget_of_their_own():
    restarts = Restarts(2, 0)
    ends = [decide(restarts, 70, f"{'abc'[n]} failed", durable=n) for n in range(3)]
    assert [end.again for end in ends] == [True, True, False]
    assert ends[-1].code == 70 and "max_restarts: 2 is used up" in ends[-1].why


def test_lost_machines_have_a_budget_in_a_row():
    restarts = Restarts(0, 2)
    for durable in range(100):  # each brings a new durable step
        assert decide(restarts, -9, durable=durable).again
    ends = [decide(restarts, 12, word, durable=99) for word in ("gloo", "nccl")]
    assert [end.again for end in ends] == [True, False]
    assert ends[-1].code == 12 and "max_infra_restarts" in ends[-1].why


def test_preemptions_cost_nothing():
    restarts = Restarts(0, 0)
    assert all(decide(restarts, 10 + n % 2, "preempted", durable=5).again for n in range(50))


def test_the_same_error_at_the_same_step_three_times_is_a_crash_loop():
    restarts = Restarts(9, 9)
    ends = [decide(restarts, 70, f"KeyError: 'a' at 0x{n}f in /tmp/{n}", durable=8) for n in range(3)]
    assert [end.again for end in ends] == [True, True, False]
    assert ends[-1].code == 70 and "crash loop" in ends[-1].why and "step 8" in ends[-1].why
    killed = Restarts(9, 9)
    assert [decide(killed, -9, "killed").again for _ in range(3)] == [True, True, False]


def test_another_step_or_another_error_between_is_no_crash_loop():
    restarts = Restarts(9, 9)
    for n, word in enumerate(["a", "a", "b", "a", "a"]):
        assert decide(restarts, 70, word, durable=8).again, n
    for durable in (9, 10, 11):
        assert decide(restarts, -9, "a", durable=durable).again


def test_a_machine_that_cannot_be_reached_is_no_crash_loop_but_has_its_budget():
    restarts = Restarts(0, 5)
    ends = [decide(restarts, 255, "ssh", unreachable=True).again for _ in range(6)]
    assert ends == [True] * 5 + [False]


def test_delays_double_up_to_a_limit_vary_with_the_seed_and_begin_anew_with_progress():
    def delays(seed):
        restarts = Restarts(0, 99, seed=seed, first_delay=1.0, last_delay=60.0)
        return [decide(restarts, 12, f"{'abcdefghij'[n]}", durable=1).delay for n in range(10)] + [
            decide(restarts, 12, "a", durable=2).delay
        ]

    for n, delay in enumerate(delays(1)[:10]):
        assert 0.5 * min(60, 2**n) <= delay <= 1.5 * min(60, 2**n)
    assert delays(1)[10] <= 1.5
    assert delays(1) == delays(1) != delays(2)


@pytest.mark.parametrize("code", [-9, -6, 255])
def test_a_signal_is_no_exit_code_of_a_program(code):
    assert End(code, "").exit_code == 12
