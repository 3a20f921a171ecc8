"""Where to stop: one place for all processes of a run, though they are asked at different times, and at one alone.

Every process passes the same places in the same order (before an update, before a batch of an evaluation), and counts
them. When one is asked to stop it says so in the store; the thread of each process that reads it holds its loop at the
next place for a moment, and says how many places it has passed. Nobody has passed more than the most that anybody says,
so all stop at the place after it. It takes a word and an answer of everybody, once; while nobody asks it is a look into
the store now and then, from a thread that nobody waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from jtrain.parallel.store import Store


class Agreement:
    """One stop of one run.

    Args:
      store: where the processes meet; None: this one is alone.
      process: number of this process.
      count: number of processes.
      name: another one for each stop.
    """

    def __init__(self, store: Store | None = None, process: int = 0, count: int = 1, name: str = "stop"):
        self._store, self._process, self._count, self._name = store, process, count, f"jtrain/{name}"
        self._changed = threading.Condition()
        self._passed = 0
        self._held = False
        self._stop: int | None = None
        self._asked = ""
        self._said = False

    @property
    def passed(self) -> int:
        """Places that this process has passed."""
        return self._passed

    @property
    def settled(self) -> bool:
        """Whether it is known where to stop."""
        return self._stop is not None

    def ask(self, reason: str) -> None:
        """Asks all processes to stop. Returns at once; `turn` carries it out."""
        with self._changed:
            self._asked = self._asked or reason
            if self._store is None and self._stop is None:
                self._stop = self._passed + 1

    def poll(self) -> bool:
        """Whether to stop here. For the thread of the loop, at every place."""
        with self._changed:
            while self._held and self._stop is None:
                self._changed.wait()
            self._passed += 1
            return self._stop is not None and self._passed >= self._stop

    def is_next(self) -> bool:
        """Whether the next `poll` will say so: there is no need to wait for what comes behind that place."""
        return self._stop is not None and self._passed + 1 >= self._stop

    def turn(self, heard: Callable[[str], None] = lambda reason: None) -> None:
        """Carries on what is going on between the processes. For a thread beside the loop, again and again.

        Args:
          heard: called once with the reason of another process that asks.
        """
        if self._store is None or self._stop is not None:
            return
        if self._asked and not self._said:
            self._said = True
            self._store.put(f"{self._name}/asked", self._asked)
        if not self._held:
            reason = self._store.get(f"{self._name}/asked")
            if reason is None:
                return
            with self._changed:
                self._held, mine = True, self._passed
            if not self._asked:
                heard(reason)
            self._store.put(f"{self._name}/passed/{self._process}", str(mine))
        places = self._store.below(f"{self._name}/passed")
        if len(places) == self._count:
            with self._changed:
                self._stop = max(map(int, places.values())) + 1
                self._changed.notify_all()
