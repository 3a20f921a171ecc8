"""K2, N1 to N3: kills while it compiles and of the coordinator, a network that is cut, a port that is taken."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.faults.runs import ROOT, codes, config_of, durable, goes_on, said
from tests.faults.soak import worker_environment
from tests.parity.launch import Running
from tests.parity.test_kill import result

pytestmark = pytest.mark.faults


def launched(config, folder, fault):
    """What a supervisor and its two processes said, of which process 0 has the fault, and its ledger of rows."""
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    (folder / "ledger").mkdir()
    environment = worker_environment(folder, folder / "ledger") | {"SLOW": "0.1", "FAULT": fault, "FAULT_RANK": "0"}
    command = [sys.executable, "-m", "jtrain", "launch", "local", str(folder / "run.yaml"), "--hosts", "2"]
    ran = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )
    text = ran.stdout + ran.stderr
    assert ran.returncode == 0, text[-4000:]
    assert "rank 0 (local0): killed by SIGKILL" in text and "done: exit 0 after 2 attempts" in text
    return [json.loads(line) for line in (folder / "ledger" / "rows-0.jsonl").read_text().splitlines()]


def same(config, reference):
    found = result(config)
    return all(found[part] == reference[part] for part in ("step", "counters", "lines", "bits"))


def test_k2_a_kill_in_the_first_compilation_leaves_a_cache_that_works(reference, tmp_path):
    config = config_of(tmp_path, compile_cache=str(tmp_path / "compiled"))
    launched(config, tmp_path, "kill@compile")
    assert same(config, reference)


def test_n1_a_killed_coordinator_is_started_again_within_a_minute(reference, tmp_path):
    config = config_of(tmp_path)
    lines = launched(config, tmp_path, "kill@step:6")  # process 0 holds the coordinator
    starts = [place for place, line in enumerate(lines) if line["kind"] == "start"]
    before = lines[starts[1] - 1]["time"]
    after = next(line["time"] for line in lines[starts[1] :] if line["kind"] == "done")
    assert after - before < 60
    assert same(config, reference)


# -- N2: each process in a network of its own, with a cable between them ----------------------------------------------

NAMES = ("jt-fault-a", "jt-fault-b")
PLACES = ("10.77.31.1", "10.77.31.2")


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


@pytest.fixture
def networks():
    """Two network namespaces that a pair of veth devices joins; gives the function that cuts or mends the cable."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the program `ip`")
    with contextlib.ExitStack() as stack:
        for name in NAMES:
            if (made := ip("netns", "add", name)).returncode:
                pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
            stack.callback(ip, "netns", "del", name)
        if (made := ip("link", "add", NAMES[0], "type", "veth", "peer", "name", NAMES[1])).returncode:
            pytest.skip(f"no veth devices here: {made.stderr.strip()}")
        host = socket.gethostname()
        for name, place in zip(NAMES, PLACES, strict=True):
            ip("link", "set", name, "netns", name)
            ip("-n", name, "addr", "add", f"{place}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
            folder = Path("/etc/netns") / name  # `ip netns exec` mounts what lies here over /etc
            folder.mkdir(parents=True)
            stack.callback(shutil.rmtree, folder)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{place} {host}\n")  # gloo looks its own name up
        yield lambda state: ip("-n", NAMES[1], "link", "set", NAMES[1], state)


def start_apart(config, name, **environment):
    folder = Path(config["run_dir"]).parent
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    running = []
    for number, network in enumerate(NAMES):
        with (folder / f"{name}.{number}.out").open("wb") as out, (folder / f"{name}.{number}.err").open("wb") as err:
            process = subprocess.Popen(
                ["ip", "netns", "exec", network, sys.executable, str(Path(__file__).with_name("linear_run.py")),
                 "train", str(path), "--distributed.coordinator_address", f"{PLACES[0]}:29571",
                 "--distributed.num_processes", "2", "--distributed.process_id", str(number)],
                cwd=folder,
                env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)} | environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )  # fmt: skip
        running.append(Running(process, folder, f"{name}.{number}"))
    return running


def wait_for_step(running, step, seconds=150):
    deadline = time.monotonic() + seconds
    while step not in running[0].steps:
        assert time.monotonic() < deadline and running[0].process.poll() is None, said(running)
        time.sleep(0.02)


def test_n2_a_network_that_is_cut_for_five_seconds_changes_no_bit(networks, reference, tmp_path):
    config = config_of(tmp_path)
    running = start_apart(config, "first", SLOW="0.1")
    wait_for_step(running, 6)
    networks("down")
    time.sleep(5)
    networks("up")
    found = codes(running, 150)
    if found != [0, 0]:  # lost: then as after any end
        assert set(found) <= {12, 13, -6}, said(running)
        goes_on(config, reference)
    assert all(result(config)[part] == reference[part] for part in ("step", "counters", "lines", "bits"))


def test_n2_a_network_that_stays_cut_ends_both_sides_and_none_goes_on_alone(networks, reference, tmp_path):
    config = config_of(tmp_path)
    running = start_apart(config, "first", SLOW="0.1", LIMITS="step=20,data_wait=20,eval=20,save_stall=20,queue=20")
    wait_for_step(running, 6)
    networks("down")
    kept = durable(config)
    cut = time.monotonic()
    found = codes(running, 150)
    assert set(found) <= {12, 13, -6}, said(running)
    print(f"both sides had left {time.monotonic() - cut:.0f} s after the cut, with {found}")
    assert set(durable(config)) - set(kept) <= {8}  # at most the save that was under way
    goes_on(config, reference)


def test_n3_a_port_that_is_taken_is_a_clear_error(tmp_path):
    config = config_of(tmp_path)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(config))
        ran = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("linear_run.py")), "train", str(path),
             "--distributed.coordinator_address", address, "--distributed.num_processes", "2",
             "--distributed.process_id", "0"],
            cwd=tmp_path, env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert ran.returncode == 12, ran.stderr[-3000:]  # a supervisor starts it again: who holds it may be gone by then
    assert f"{address} is taken: another program listens there" in ran.stderr


def test_n3_every_start_has_a_port_that_nobody_has():
    from jtrain.launch.local import free_address

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        assert free_address() != f"127.0.0.1:{holder.getsockname()[1]}"
