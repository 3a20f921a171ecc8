"""One process of two that train nothing: usage: lost_worker.py INDEX ADDRESS WHAT.

WHAT: `wait` sleeps for a minute; `raise` ends with an exception; `refuse` with a user's mistake, `late` with the same
one three seconds later; `done` ends in an orderly way.
"""

import sys
import time

from jtrain.config import load_config
from jtrain.errors import DataError
from jtrain.parallel import processes

if __name__ == "__main__":
    index, address, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    distributed = {"coordinator_address": address, "num_processes": 2, "process_id": index}
    config = {"accelerator": "cpu", "devices": 2, "compile_cache": "", "distributed": distributed}
    processes.start(load_config(config, env={}))
    print("up", flush=True)
    if what == "wait":
        time.sleep(60)
    elif what == "raise":
        raise KeyError("odd thing")
    elif what in ("refuse", "late"):
        time.sleep(3 * (what == "late"))
        raise DataError("corpus.txt is empty")
    processes.shutdown()
