"""All processes stop at one place, whoever was asked and however far each had come."""

import random
import threading
import time

import pytest

from jtrain.parallel.agreement import Agreement


class Shared:
    """A store in this process."""

    def __init__(self):
        self.values, self.lock = {}, threading.Lock()

    def put(self, key, value, *, replace=False):
        with self.lock:
            return self.values.setdefault(key, value) is value

    def get(self, key):
        return self.values.get(key)

    def below(self, prefix):
        with self.lock:
            return {k.rpartition("/")[2]: v for k, v in self.values.items() if k.startswith(prefix + "/")}


def test_alone_it_stops_at_the_next_place():
    alone = Agreement()
    assert not alone.poll() and not alone.is_next()
    alone.ask("SIGTERM")
    assert alone.is_next() and alone.poll()


def test_nobody_stops_while_nobody_asks():
    two = [Agreement(Shared(), n, 2) for n in range(2)]
    for one in two:
        one.turn()
    assert not any(one.poll() for one in two)


@pytest.mark.parametrize("seed", range(4))
def test_all_stop_at_the_same_place_however_far_each_had_come(seed):
    rng, shared, count = random.Random(seed), Shared(), 3
    stopped, heard = {}, []
    agreements = [Agreement(shared, number, count) for number in range(count)]
    over = threading.Event()
    waits = [rng.uniform(0, 0.004) for _ in range(count)]
    meet = threading.Barrier(count, timeout=20)

    def loop(number):
        for place in range(10_000):
            time.sleep(waits[number])
            if agreements[number].poll():
                stopped[number] = place
                return
            meet.wait()  # an update: nobody gets further than one place ahead

    def beside(number):
        while not over.is_set():
            agreements[number].turn(heard.append)
            time.sleep(0.001)

    loops = [threading.Thread(target=loop, args=(n,)) for n in range(count)]
    threads = [threading.Thread(target=beside, args=(n,)) for n in range(count)]
    for thread in loops + threads:
        thread.start()
    time.sleep(0.05)
    agreements[rng.randrange(count)].ask("SIGTERM")
    for thread in loops:
        thread.join(20)
    over.set()
    for thread in threads:
        thread.join()
    assert len(stopped) == count and len(set(stopped.values())) == 1, stopped
    assert heard == ["SIGTERM"] * (count - 1)


def test_who_waits_for_what_lies_behind_the_place_need_not():
    shared = Shared()
    ahead, behind = Agreement(shared, 0, 2), Agreement(shared, 1, 2)
    ahead.poll(), ahead.poll(), behind.poll()
    behind.ask("STOP")
    for one in (behind, ahead, behind):
        one.turn()
    assert ahead.is_next() and not behind.is_next()  # what the one ahead has begun, the other takes part in
    assert not behind.poll() and behind.is_next()
    assert ahead.poll() and behind.poll()
