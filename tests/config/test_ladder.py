"""Limits of the phases of a run."""

import pytest

from jtrain.config import ladder, load_config
from jtrain.errors import ConfigError
from jtrain.progress import PULSE_SECONDS


def test_on_every_rung_the_nearer_speaks_first():
    faults = load_config(None, (), {}).faults
    inner, outer = ladder.limits(faults), ladder.outer_limits(faults)
    assert PULSE_SECONDS < ladder.HEARTBEAT_SECONDS < ladder.SILENCE_SECONDS
    for phase in ladder.PHASES:
        assert max(phase.library_seconds, ladder.SILENCE_SECONDS) < inner[phase.name] < outer[phase.name]


def test_the_watchdog_sets_the_limits_of_a_step():
    faults = load_config(None, ["--faults.watchdog_minutes", "30"], {}).faults
    assert {name for name, seconds in ladder.limits(faults).items() if seconds == 1800} >= {"step", "data_wait", "eval"}
    assert ladder.outer_limits(faults)["step"] == 1860


def test_a_watchdog_below_the_heartbeat_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"watchdog_minutes: 1 is 60 s.*100 to 150 s"):
        load_config(None, ["--faults.watchdog_minutes", "1"], {})
