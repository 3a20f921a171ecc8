"""usage: listening_worker.py ADDRESS PROCESS: joins a run of two processes, and prints where it listens as JSON."""

from __future__ import annotations

import ipaddress
import json
import os
import sys
from pathlib import Path

from jax.experimental import multihost_utils

from jtrain.config import load_config
from jtrain.parallel import processes


def listening() -> list[tuple[str, int]]:
    """(address, port) of every TCP socket of this process that listens (proc(5): net/tcp)."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except FileNotFoundError:  # that of the listing itself
            continue
    own = {link[8:-1] for link in links if link.startswith("socket:[")}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in own:
                address, port = fields[1].split(":")
                words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
                place = ipaddress.ip_address(b"".join(words))
                found.append((str(getattr(place, "ipv4_mapped", None) or place), int(port, 16)))
    return found


if __name__ == "__main__":
    distributed = {"coordinator_address": sys.argv[1], "num_processes": 2, "process_id": int(sys.argv[2])}
    fields = {"accelerator": "cpu", "devices": 2, "compile_cache": "", "distributed": distributed}
    processes.start(load_config(fields, env={}))
    multihost_utils.sync_global_devices("all are here")
    print(json.dumps(listening()), flush=True)
    multihost_utils.sync_global_devices("all have looked")
    processes.shutdown()
