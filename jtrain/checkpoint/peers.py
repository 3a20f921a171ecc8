"""What the processes of a run tell each other about a checkpoint.

It goes through the key-value store of jax's coordination service and not through a collective: it may run in a
background thread beside the training step, carries text, and never starts a device backend.
"""

from __future__ import annotations

import collections
import json
import threading
from typing import Any

from jax._src import distributed  # the client has no public name

from jtrain.errors import PeerLostError

TIMEOUT_SECONDS = 900
_LOOK_SECONDS = 0.5
_counts: collections.Counter[str] = collections.Counter()


def count() -> int:
    """Number of processes of the run."""
    return 1 if distributed.global_state.client is None else distributed.global_state.num_processes


def index() -> int:
    """Number of this process."""
    return 0 if distributed.global_state.client is None else distributed.global_state.process_id


def exchange(topic: str, value: Any, timeout_seconds: float = TIMEOUT_SECONDS) -> list[Any]:
    """Every process's value (JSON), in the order of the processes.

    Every process has to call it for the same topics, and for each topic equally often and in the same order.

    Raises:
      PeerLostError: a process did not answer within the time.
    """
    client = distributed.global_state.client
    if client is None or count() == 1:
        return [value]
    _counts[topic] += 1
    turn = _counts[topic]
    client.key_value_set(f"jtrain/{topic}/{turn}/{index()}", json.dumps(value))
    values = []
    for process in range(count()):
        try:
            text = client.blocking_key_value_get(f"jtrain/{topic}/{turn}/{process}", int(timeout_seconds * 1000))
        except RuntimeError as error:
            raise PeerLostError(
                f"process {process} did not answer within {timeout_seconds:.0f} s ({topic})",
                "look for its first error; a supervisor restarts all processes together",
            ) from error
        values.append(json.loads(text))
    if turn > 1:
        # Whoever is in this turn has read the one before it: the store stays small over a long run.
        client.key_value_delete(f"jtrain/{topic}/{turn - 1}/{index()}")
    return values


class GivenUp(Exception):
    """A peer has given up what all were to finish; what went wrong there comes with the next `exchange`."""


def give_up(topic: str) -> None:
    """Tells all who `meet` for a topic, now or later, that this process does not come."""
    client = distributed.global_state.client
    if client is not None and count() > 1:
        client.key_value_set(f"jtrain/given_up/{topic}/{index()}", "")


def forget(topic: str) -> None:
    """Clears away what `give_up` left. For one process, once all have left `meet`."""
    client = distributed.global_state.client
    if client is not None and count() > 1:
        client.key_value_delete(f"jtrain/given_up/{topic}/")


def meet(topic: str, key: str, timeout_ms: int) -> None:
    """A barrier that nobody waits at for a process that has given up.

    Args:
      topic: what they meet for.
      key: of the barrier; one of its own each time.
      timeout_ms: how long to wait.

    Raises:
      GivenUp: a process does not come.
      RuntimeError: not all came in time.
    """
    client = distributed.global_state.client
    if client is None or count() == 1:
        return
    outcome: list[Exception | None] = []

    def wait() -> None:
        try:
            client.wait_at_barrier(f"jtrain/{topic}/{key}", timeout_ms)
            outcome.append(None)
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=wait, name="checkpoint-barrier", daemon=True)  # it may be left behind
    thread.start()
    while not outcome:
        thread.join(_LOOK_SECONDS)
        if not outcome and client.key_value_dir_get(f"jtrain/given_up/{topic}/"):
            raise GivenUp(topic)
    if outcome[0] is not None:
        raise outcome[0]
