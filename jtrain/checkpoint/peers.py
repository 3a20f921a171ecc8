"""What the processes of a run tell each other about a checkpoint.

It goes through the key-value store of jax's coordination service and not through a collective: it may run in a
background thread beside the training step, carries text, and never starts a device backend.
"""

from __future__ import annotations

import collections
import json
from typing import Any

from jax._src import distributed  # the client has no public name

from jtrain.errors import PeerLostError

TIMEOUT_SECONDS = 900
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
