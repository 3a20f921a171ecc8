"""How long a run may stay in a phase without getting on: one ladder of limits for all that watch it.

Whoever stands nearer to the fault has to speak first, since it knows more: jax and Orbax name the peer or the file, the
watchdog within the run has the stacks, and the supervisor outside, which can only kill, comes last. So on every rung

    pulse < jax's heartbeat < silence < limit of the phase < limit of the supervisor,

and what a library waits in a phase lies below the limit of that phase. `check` holds all of it against each other.
"""

from __future__ import annotations

from typing import NamedTuple

from jtrain.config.schema import Config, FaultsConfig
from jtrain.errors import ConfigError
from jtrain.progress import PULSE_SECONDS

HEARTBEAT_SECONDS = 100.0
"""`jax.distributed` takes a process for lost that it has not heard of for so long."""
SILENCE_SECONDS = 150.0
"""The supervisor takes a process for stopped, or its machine for gone, that it has not heard of for so long."""
PREEMPTION_SECONDS = 600.0
"""The supervisor kills a run that is still there so long after it was asked to leave."""
GRACE_SECONDS = 60.0
"""What the supervisor leaves the watchdog within the run to write the stacks and to end it."""


class Phase(NamedTuple):
    """A phase of a run, the seconds that it may last without getting on, and what a library waits within it."""

    name: str
    seconds: float
    covers: str
    library: str = ""
    library_seconds: float = 0.0


PHASES = (
    Phase("init", 1800.0, "imports, the model, and the data: every chunk that is tokenised or scored is a step on"),
    Phase("queue", 14400.0, "another process tokenises the same data, and gets on by itself"),
    Phase("join", 600.0, "the processes find each other", "jax.distributed.initialize", 300.0),
    Phase("restore", 1800.0, "a checkpoint is verified and read"),
    Phase("compile", 3600.0, "a program is compiled"),
    Phase("step", 900.0, "an update"),
    Phase("data_wait", 900.0, "an update waits for its batch"),
    Phase("eval", 900.0, "a batch of an evaluation"),
    Phase("save_stall", 1800.0, "the device waits for a save", "an Orbax save", 600.0),
    Phase("shutdown", 600.0, "the processes leave each other", "jax.distributed.shutdown", 300.0),
)
"""In the order of a run."""
_BY_WATCHDOG = ("step", "data_wait", "eval")


def limits(faults: FaultsConfig) -> dict[str, float]:
    """Phase -> seconds after which the run itself takes it for hung; `faults.watchdog_minutes` sets those of a step."""
    minutes = faults.watchdog_minutes
    return {phase.name: 60.0 * minutes if phase.name in _BY_WATCHDOG else phase.seconds for phase in PHASES}


def outer_limits(faults: FaultsConfig) -> dict[str, float]:
    """Phase -> seconds after which the supervisor kills the run."""
    return {name: seconds + GRACE_SECONDS for name, seconds in limits(faults).items()}


def check(config: Config) -> None:
    """Sees that the ladder is in order.

    Raises:
      ConfigError: `faults.watchdog_minutes` lies below what has to speak before the watchdog, or
        `faults.preemption_grace_seconds` above what comes after it.
    """
    grace = config.faults.preemption_grace_seconds
    if grace >= PREEMPTION_SECONDS:
        raise ConfigError(
            f"faults.preemption_grace_seconds: {grace:g}, and a supervisor kills a run {PREEMPTION_SECONDS:g} s after "
            "it was asked to leave",
            f"Write less than {PREEMPTION_SECONDS:g}.",
        )
    order = (PULSE_SECONDS, HEARTBEAT_SECONDS, SILENCE_SECONDS)
    assert list(order) == sorted(set(order)), order
    inner, outer = limits(config.faults), outer_limits(config.faults)
    for phase in PHASES:
        limit = inner[phase.name]
        if limit <= SILENCE_SECONDS:
            raise ConfigError(
                f"faults.watchdog_minutes: {config.faults.watchdog_minutes:g} is {limit:g} s, and a lost process is "
                f"noticed after {HEARTBEAT_SECONDS:g} to {SILENCE_SECONDS:g} s",
                f"Write at least {SILENCE_SECONDS / 60 + 0.5:g}, so that the watchdog does not speak first.",
            )
        assert phase.library_seconds < limit < outer[phase.name], phase
