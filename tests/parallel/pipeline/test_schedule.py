"""Schedules: each piece of work once, in an order that its data allows, with the slots and the bubble of the papers."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest

from jtrain.parallel.pipeline.schedule import Schedule, choose_schedule, make_schedule

NAMES = ("gpipe", "1f1b", "interleaved")
SIZES = [(s, m, v) for s in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 8, 9, 17) for v in (1, 2, 3)]


def events(schedule: Schedule, work: str) -> dict[tuple[int, int, int], tuple[int, int]]:
    """(stage, micro-batch, chunk) -> (tick, slot)."""
    table = getattr(schedule, work)
    found = {}
    for tick in range(schedule.ticks):
        for stage in range(schedule.stages):
            if table.on[tick, stage]:
                key = (stage, int(table.microbatch[tick, stage]), int(table.chunk[tick, stage]))
                assert key not in found, f"{work} of {key} twice"
                found[key] = (tick, int(table.slot[tick, stage]))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_piece_of_work_is_done_once_in_an_order_that_its_data_allows(name):
    for stages, microbatches, chunks in SIZES:
        check_order(name, stages, microbatches, chunks)


def check_order(name, stages, microbatches, chunks):
    schedule = make_schedule(name, stages, microbatches, chunks)
    forward, backward = events(schedule, "forward"), events(schedule, "backward")
    whole = {(s, m, v) for s in range(stages) for m in range(microbatches) for v in range(chunks)}
    assert set(forward) == set(backward) == whole
    for stage, m, chunk in whole:
        number = chunk * stages + stage
        if number:
            before = ((number - 1) % stages, m, (number - 1) // stages)
            # What a neighbour sends at a tick is there at the next, and is overwritten the tick after.
            assert forward[stage, m, chunk][0] == forward[before][0] + 1
            assert backward[before][0] == backward[stage, m, chunk][0] + 1
        assert forward[stage, m, chunk][0] <= backward[stage, m, chunk][0]


@pytest.mark.parametrize("name", NAMES)
def test_no_slot_holds_two_inputs_at_once_and_there_are_as_many_as_the_papers_say(name):
    for stages, microbatches, chunks in SIZES:
        check_slots(name, stages, microbatches, chunks)


def check_slots(name, stages, microbatches, chunks):
    schedule = make_schedule(name, stages, microbatches, chunks)
    forward, backward = events(schedule, "forward"), events(schedule, "backward")
    for stage in range(stages):
        lives: dict[int, list[tuple[int, int]]] = {}
        for (s, m, v), (start, slot) in forward.items():
            if s == stage:
                assert backward[s, m, v][1] == slot < schedule.slots
                lives.setdefault(slot, []).append((start, backward[s, m, v][0]))
        for spans in lives.values():
            spans.sort()
            assert all(a[1] < b[0] for a, b in itertools.pairwise(spans))
    if name == "gpipe":
        assert schedule.slots == microbatches * chunks
    elif chunks == 1:
        assert schedule.slots == min(microbatches, 2 * stages - 1)
    elif microbatches % stages == 0:
        assert schedule.slots == min(microbatches * chunks, stages * (chunks + 1) - 1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_bubble_is_that_of_the_formula(name, training):
    for stages, microbatches, chunks in SIZES:
        check_bubble(name, stages, microbatches, chunks, training)


def check_bubble(name, stages, microbatches, chunks, training):
    schedule = make_schedule(name, stages, microbatches, chunks, training=training)
    formula = Fraction(stages - 1, microbatches * chunks + stages - 1)
    if chunks == 1 or microbatches % stages == 0:
        assert schedule.bubble() == formula
    else:  # the last group of micro-batches is not full: it waits
        assert schedule.bubble() > formula
    assert len(schedule.phases) <= 3
    assert schedule.phases[0][0] == 0
    assert schedule.phases[-1][1] == schedule.ticks


def test_auto_takes_the_smaller_program_where_it_holds_as_little():
    assert choose_schedule(4, 4, 1) == "gpipe"
    assert choose_schedule(4, 5, 1) == "1f1b"
    assert choose_schedule(4, 16, 2) == "interleaved"


def test_the_picture():
    assert make_schedule("1f1b", 2, 3).picture().splitlines() == [
        "1f1b: 2 stages x 1 chunks, 3 micro-batches, bubble 25.0%, 3 slots",
        "stage 0 F |abc..|",
        "stage 0 B |..abc|",
        "stage 1 F |.abc.|",
        "stage 1 B |.abc.|",
    ]


def test_numbers_that_make_no_schedule():
    for arguments in (("zb-h1", 2, 2, 1), ("gpipe", 0, 2, 1), ("1f1b", 2, 0, 1), ("interleaved", 2, 2, 0)):
        with pytest.raises(ValueError, match="no schedule"):
            make_schedule(*arguments)
