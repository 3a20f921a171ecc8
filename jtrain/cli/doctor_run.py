"""Checks of a run: its devices, memory, ports, data, tokenizer. Without a config they look at the defaults."""

from __future__ import annotations

import errno
import math
import os
import socket
from collections.abc import Iterator
from typing import Any

from jtrain.cli.doctor_checks import GIB, Check, probe, size
from jtrain.cli.doctor_storage import Needs, run_dir
from jtrain.config.mesh_rules import AXES, resolve_mesh
from jtrain.config.schema import Config
from jtrain.errors import ConfigError, DataError
from jtrain.observe.host_memory import available_memory

DEVICE_SECONDS = 90.0
STATE_SECONDS = 120.0
_FILL = 0.9
"""Share of a device's memory that a program gets."""
_PLATFORMS = {"cpu": "cpu", "gpu": "cuda,rocm", "tpu": "tpu", "auto": ""}


def devices_and_memory(config: Config, given: bool) -> Iterator[Check]:
    """Devices against the mesh; the state against the memory of device and host, and the run directory; the model.

    Args:
      config: the run's.
      given: whether there is a run: without one only the machine is looked at.
    """
    processes = config.distributed.num_processes or 1
    cpus = config.devices // processes if config.accelerator == "cpu" and isinstance(config.devices, int) else 0
    found, failure = probe("devices", {"platforms": _PLATFORMS[config.accelerator], "cpus": cpus}, DEVICE_SECONDS)
    fits = False
    if found is None:
        remedy = "write accelerator: cpu, or install the extra for it (pip install 'jtrain[cuda12]' or 'jtrain[tpu]')"
        if "no answer" in failure:
            remedy = "another program may hold the devices; on a TPU pod start doctor on all hosts at once"
        yield Check("devices", "fail", f"accelerator: {config.accelerator}: {failure}", remedy)
    else:
        check = devices(config, found, found["count"] * processes, given)
        fits = check.status != "fail"
        yield check
    yield host_memory()
    if not given:
        yield from run_dir(config, None)
        return
    wanted = devices_of(config, found["count"] * processes if found and fits else None)
    needs = None
    fields = config.model_dump(mode="json")
    if "max_length" not in config.model_fields_set:
        del fields["max_length"]  # a model's own limit is its max_length, where nobody says another
    answer, failure = probe("state", {"config": fields, "devices": wanted}, STATE_SECONDS)
    if answer is None:
        yield Check("model", "fail", failure, "jtrain explain CONFIG --debug says more")
    elif "failure" in answer:
        yield Check("model", "fail", answer["failure"], answer["remedy"])
    else:
        needs = Needs(**answer)
        name, each = config.model.path or config.model.preset, size(needs.state_bytes)
        over = f" of {wanted}" if wanted > 1 else ""
        yield Check("model", "ok", f"{name}: {needs.parameters:,} parameters, {each} of state on a device{over}")
        if found is not None and fits:
            yield device_memory(needs, found, wanted, processes)
    yield from run_dir(config, needs)


def devices_of(config: Config, count: int | None) -> int:
    """How many devices the run is for: those that are asked for, or are there, or the fewest that its mesh fits on."""
    if isinstance(config.devices, int):
        return config.devices
    return count or math.prod(n for axis in AXES if (n := getattr(config.mesh, axis)) > 0) * (
        config.mesh.slices if config.mesh.data == -1 else 1
    )


def devices(config: Config, found: dict[str, Any], count: int, given: bool) -> Check:
    """What is there against what the config asks for.

    Args:
      config: the run's.
      found: of this process.
      count: of all processes.
      given: whether there is a config to compare with.
    """
    kinds = ", ".join(f"{number} x {kind}" for kind, number in found["kinds"].items())
    value = kinds if count == found["count"] else f"{kinds}, {count} over all processes"
    if not given:
        return Check("devices", "ok", value)
    wanted = config.devices if isinstance(config.devices, int) else count
    if wanted > count:
        return Check("devices", "fail", f"{value}; devices: {wanted}", "write devices: auto")
    try:
        mesh = resolve_mesh(config.mesh, wanted)
    except ConfigError as error:
        return Check("devices", "fail", f"{value}; {error.message}", error.remedy)
    shown = " ".join(f"{axis}={number}" for axis, number in mesh.items() if number > 1) or "one device"
    if wanted < count:
        return Check("devices", "warn", f"{value}; mesh {shown}", f"{count - wanted} of them stay idle: devices: auto")
    return Check("devices", "ok", f"{value}; mesh {shown}")


def device_memory(needs: Needs, found: dict[str, Any], wanted: int, processes: int) -> Check:
    """State and gradients against the memory of a device; of CPU devices against that of the host."""
    need = needs.state_bytes + needs.gradient_bytes
    if found["memory"] is None:
        local = max(1, min(wanted // processes, found["count"]))
        need, room, where = need * local, available_memory(), f"{local} x CPU in the memory of this host"
    else:
        room, where = int(found["memory"] * _FILL) - found["used"], "a device"
    value = f"parameters, optimizer and gradients {size(need)} on {where}, {size(room)} free"
    if need > room:
        return Check(
            "device_memory", "fail", value, "more mesh.fsdp or mesh.tensor, a smaller model, or model.lora.rank"
        )
    if need > 0.8 * room:
        remedy = "little is left for activations: jtrain plan says how much they need"
        return Check("device_memory", "warn", value, remedy)
    return Check("device_memory", "ok", f"{value} (activations come on top)")


def host_memory() -> Check:
    """What this process may still take: of the machine, and of its control group."""
    free = available_memory()
    short = free < 2 * GIB
    remedy = "end other programs: importing and compiling take 2 GiB" if short else None
    return Check("host_memory", "warn" if short else "ok", f"{size(free)} free", remedy)


def ports(config: Config) -> Check:
    """Whether the coordinator can listen where it is told to: here if this is its host, else whether that is known."""
    section = config.distributed
    address = section.bind_address or section.coordinator_address
    if address is None:
        with socket.socket() as probe_:
            probe_.bind(("127.0.0.1", 0))
            return Check("ports", "ok", "one process; 127.0.0.1 can be listened on")
    host, _, port = address.rpartition(":")
    try:
        families = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        return Check("ports", "fail", f"{address}: {error.strerror or error}", "write an address that this host knows")
    family, kind, protocol, _, place = families[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(place)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL and section.process_id:
                return Check("ports", "ok", f"{address} is {place[0]}, another host")
            if error.errno == errno.EADDRNOTAVAIL:
                remedy = "process 0 has to run there; or set distributed.bind_address to an address of its host"
                return Check(
                    "ports", "fail" if section.process_id == 0 else "warn", f"{address}: not of this host", remedy
                )
            return Check("ports", "fail", f"{address}: {error.strerror}", "end what uses it, or write another port")
    if place[0] in ("0.0.0.0", "::"):
        remedy = "it is neither encrypted nor authenticated: bind an address of a private network"
        return Check("ports", "warn", f"{address} is every interface", remedy)
    return Check("ports", "ok", f"{address} can be listened on")


def data(config: Config, place: str, field: str) -> Check:
    """One entry of data.train or data.eval: its files, and the first record.

    Args:
      config: the run's.
      place: the path, glob, URL or name.
      field: `data.train[0]`.
    """
    from jtrain.data.files import find_files, kind_of, open_file, stat
    from jtrain.data.sources import CHUNK_BYTES, Bad, Chunk, read_records

    if place.startswith("hf:"):
        return Check(field, "ok", f"{place}: of the hub, fetched when the run begins")
    files = find_files(place, field=field)
    sizes = [stat(file)[0] for file in files[:1000]]
    kind = kind_of(files[0])
    end = {"parquet": 1, "array_record": 1, "text": min(sizes[0], CHUNK_BYTES)}.get(kind, sizes[0])
    with open_file(files[0], field=field):
        chunk = Chunk(files[0], kind, 0, end, closes=end == sizes[0])
    first = next((record for record in read_records(chunk, config.data.text_field) if record is not None), None)
    if first is None:
        raise DataError(f"{field}: {files[0]} holds no record", "leave it out, or fill it")
    if isinstance(first, Bad):
        raise DataError(f"{field}: {files[0]}: the first record: {first.reason}", first.remedy)
    if config.task == "pretrain" and not isinstance(first.get(config.data.text_field), str):
        fields = ", ".join(sorted(first)[:8])
        raise DataError(
            f"{field}: {files[0]}: the first record has no text in {config.data.text_field!r}; it has {fields}",
            "set data.text_field",
        )
    more = "" if len(files) == 1 else f", {len(files):,} files"
    return Check(field, "ok", f"{place}{more}, {size(sum(sizes))}, {kind}; the first record can be read")


def tokenizer(config: Config) -> Check:
    """Whether it loads, and gives back what it was given."""
    from jtrain.config.paths import is_hub_name
    from jtrain.data.tokenizers import load_tokenizer

    spec = config.data.tokenizer or config.model.path or "bytes"
    if not config.data.tokenizer and config.model.path and not os.path.isdir(spec):
        where = "of the hub" if is_hub_name(spec) else "in the model's file"
        return Check("tokenizer", "ok", f"that of {spec}, {where}")
    found = load_tokenizer(spec)
    text = "The quick brown fox, 1234"
    back = found.decode(found.encode(text))
    if back.split() != text.split():
        remedy = "it lower-cases or drops letters: see that it is the one that the model was trained with"
        return Check("tokenizer", "warn", f"{spec}: {text!r} comes back as {back!r}", remedy)
    return Check("tokenizer", "ok", f"{spec}: {found.vocab_size:,} tokens")


def compile_cache(config: Config) -> Check:
    """Whether compiled programs are kept where nobody else can write."""
    from jtrain.parallel.compile_cache import find_cache

    try:
        folder = find_cache(config.compile_cache)
    except OSError as error:
        value = f"{config.compile_cache}: {error.strerror or error}"
        return Check(
            "compile_cache", "warn", value, "every start compiles anew: set compile_cache to a folder of yours"
        )
    return Check("compile_cache", "ok", "none" if folder is None else folder.path)
