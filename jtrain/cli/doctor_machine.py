"""Checks of the machine: versions, driver, limits, credentials. None needs a config, none starts a device."""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from jtrain.cli import tested
from jtrain.cli.doctor_checks import GIB, Check, output, size

LEAST_DRIVER = {"cuda12": 525, "cuda13": 580}
"""Extra -> least NVIDIA driver (docs.nvidia.com, CUDA compatibility: minor versions)."""
OPEN_FILES = 4096
SHARED_MEMORY = 1 * GIB
LOCKED_MEMORY = 1 * GIB
CREDENTIALS = (
    "HF_TOKEN",
    "WANDB_API_KEY",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_ROLE_ARN",
)
"""Variables that stores, the hub and trackers read."""
FILES = {
    "HF_TOKEN": ("~/.cache/huggingface/token",),
    "GOOGLE_APPLICATION_CREDENTIALS": ("~/.config/gcloud/application_default_credentials.json",),
    "AWS_ACCESS_KEY_ID": ("~/.aws/credentials", "~/.aws/config"),
    "WANDB_API_KEY": ("~/.netrc",),
}
"""Where a log-in leaves what the variable would say."""


def versions(table: tested.Tested, python: str, found: Mapping[str, str]) -> Check:
    """Every package against the least version, and against those that were tested with this Python.

    Args:
      table: the tested ones.
      python: `3.12`.
      found: package -> installed version.
    """
    missing = [name for name in table.least if name not in found]
    old = [
        f"{name} {found[name]} (at least {least})"
        for name, least in table.least.items()
        if name in found and tested.number(found[name]) < tested.number(least)
    ]
    if missing or old:
        wrong = ", ".join([*(f"{name} is missing" for name in missing), *old])
        return Check("versions", "fail", wrong, "pip install --upgrade jtrain")
    if tested.number(found.get("jax", "0"))[:3] != tested.number(found.get("jaxlib", "0"))[:3]:
        value = f"jax {found.get('jax')} with jaxlib {found.get('jaxlib')}"
        return Check("versions", "fail", value, f"pip install jaxlib=={found.get('jax')}")
    row = table.rows.get(python)
    if row is None:
        known = ", ".join(table.rows)
        return Check("versions", "warn", f"Python {python}: not tested", f"tested are {known}")
    other = [
        f"{name} {found.get(name)} (tested: {version})" for name, version in row.items() if found.get(name) != version
    ]
    head = f"Python {python}, jax {found['jax']}"
    if other:
        return Check("versions", "warn", f"{head}; not as tested: {', '.join(other)}", "pip install those versions")
    return Check("versions", "ok", f"{head}: all {len(row)} packages as tested")


def installed_versions() -> Check:
    """`versions` of this interpreter."""
    table, python = tested.read(), tested.python_version()
    return versions(table, python, tested.installed({**table.least, **table.rows.get(python, {})}))


def driver() -> Iterator[Check]:
    """The NVIDIA driver, its GPUs and NCCL; the TPU's library and device files. Says so where there are none."""
    plugins = {extra: _version(f"jax-{extra}-plugin") for extra in LEAST_DRIVER}
    extra = next((extra for extra, version in plugins.items() if version), None)
    module = Path("/proc/driver/nvidia/version")
    present = module.exists() or shutil.which("nvidia-smi") is not None
    if present:
        yield _nvidia(module, extra)
        yield nccl(extra, extra and _version(f"nvidia-nccl-cu{extra[-2:]}"), extra and plugins[extra])
    elif extra:
        remedy = "install NVIDIA's driver, or start the container with its GPUs (docker run --gpus all)"
        yield Check("driver", "fail", f"jax-{extra}-plugin is installed, and there is no NVIDIA driver", remedy)
    tpu = [path for path in ("/dev/accel0", "/dev/vfio/0") if os.path.exists(path)]
    library = _version("libtpu")
    if tpu and library is None:
        yield Check("driver", "fail", f"a TPU ({tpu[0]}), and libtpu is not installed", "pip install 'jtrain[tpu]'")
    elif tpu:
        yield Check("driver", "ok", f"TPU, libtpu {library}")
    if not present and not extra and not tpu:
        yield Check("driver", "ok", "no NVIDIA driver and no TPU: CPU devices")


def nccl(extra: str | None, version: str | None, plugin: str | None) -> Check:
    """NCCL, and the plugin of jax that uses it."""
    if extra is None:
        return Check("nccl", "fail", "an NVIDIA driver, and no jax plugin for it", "pip install 'jtrain[cuda12]'")
    own = _version("jaxlib")
    if plugin != own:
        return Check("nccl", "fail", f"jax-{extra}-plugin {plugin} with jaxlib {own}", f"pip install 'jtrain[{extra}]'")
    if version is None:
        remedy = f"pip install 'jtrain[{extra}]'; or see that the system's libnccl is found"
        return Check("nccl", "warn", "no NCCL among the packages", remedy)
    return Check("nccl", "ok", f"NCCL {version}, jax-{extra}-plugin {plugin}")


def _nvidia(module: Path, extra: str | None) -> Check:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        found = re.search(r"Module\s+([\d.]+)", module.read_text())
        return driver_of([["GPU", found[1] if found else "?", "0", "0", "0"]], extra)
    fields = "name,driver_version,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"
    text, failure = output([smi, f"--query-gpu={fields}", "--format=csv,noheader,nounits"], 15)
    if not (text or "").strip():
        remedy = "look at dmesg; a GPU that fell off the bus needs a restart of the machine"
        return Check("driver", "fail", f"nvidia-smi: {failure or 'no answer'}", remedy)
    return driver_of([line.split(", ") for line in (text or "").strip().splitlines()], extra)


def driver_of(rows: list[list[str]], extra: str | None) -> Check:
    """What nvidia-smi says of each GPU: name, driver, memory in MiB, memory in use, ECC errors that were not mended."""
    names = ", ".join(f"{sum(row[0] == name for row in rows)} x {name}" for name in dict.fromkeys(r[0] for r in rows))
    version = rows[0][1]
    value = f"{names}, driver {version}"
    least = LEAST_DRIVER.get(extra or "", 0)
    if tested.number(version)[:1] < (least,):
        return Check("driver", "fail", f"{value}: {extra} needs {least} or newer", f"install driver {least} or newer")
    broken = [str(place) for place, row in enumerate(rows) if row[4].isdigit() and int(row[4])]
    if broken:
        remedy = "restart the machine or reset the GPU; if they come again, replace it"
        return Check("driver", "fail", f"{value}; uncorrected memory errors on GPU {', '.join(broken)}", remedy)
    busy = [f"{place} ({row[3]} MiB)" for place, row in enumerate(rows) if row[3].isdigit() and int(row[3]) > 1024]
    if busy:
        remedy = "another program holds memory there: nvidia-smi names it"
        return Check("driver", "warn", f"{value}; in use: GPU {', '.join(busy)}", remedy)
    return Check("driver", "ok", value)


def ulimits(gpus: bool) -> Iterator[Check]:
    """Open files; locked and shared memory, which NCCL and the network cards need.

    Args:
      gpus: whether there are NVIDIA GPUs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        remedy = f"ulimit -n {OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)}"
        yield Check("open_files", "warn", f"at most {soft:,}", remedy)
    else:
        yield Check("open_files", "ok", f"at most {_limit(soft)}")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    needs = gpus and os.path.exists("/dev/infiniband")
    text = "unlimited" if locked == resource.RLIM_INFINITY else size(locked)
    if needs and locked != resource.RLIM_INFINITY and locked < LOCKED_MEMORY:
        remedy = "ulimit -l unlimited (docker run --ulimit memlock=-1): InfiniBand pins memory"
        yield Check("locked_memory", "warn", text, remedy)
    else:
        yield Check("locked_memory", "ok", text)
    yield shared_memory(gpus)


def shared_memory(gpus: bool, folder: str = "/dev/shm") -> Check:
    """The file system that NCCL exchanges data of one host through."""
    if not os.path.isdir(folder):
        return Check("shared_memory", "warn" if gpus else "ok", f"no {folder}", "mount it (tmpfs)" if gpus else None)
    free = shutil.disk_usage(folder).free
    short = gpus and free < SHARED_MEMORY
    remedy = "docker run --shm-size 16g (or --ipc host); Kubernetes: an emptyDir with medium: Memory" if short else None
    return Check("shared_memory", "warn" if short else "ok", f"{size(free)} free in {folder}", remedy)


def _limit(number: int) -> str:
    return "any number" if number == resource.RLIM_INFINITY else f"{number:,}"


def credentials(env: Mapping[str, str], places: Iterable[str]) -> Check:
    """Which keys are there, and whether those that the places need are; never what they hold.

    Args:
      env: the environment.
      places: URLs and names of the config: gs://, s3://, hf:, org/name.
    """
    home = Path(env.get("HOME") or os.path.expanduser("~"))
    there = {name: bool(env.get(name)) for name in CREDENTIALS}
    logged_in = {
        name for name, files in FILES.items() if any((home / file.removeprefix("~/")).is_file() for file in files)
    }
    value = ", ".join(f"{name} {_presence(name, there, logged_in)}" for name in CREDENTIALS)
    file = env.get("GOOGLE_APPLICATION_CREDENTIALS")
    if file and not os.path.isfile(file):
        return Check("credentials", "warn", value, "GOOGLE_APPLICATION_CREDENTIALS names a file that is not there")
    needed = {
        "gs://": (
            ("GOOGLE_APPLICATION_CREDENTIALS",),
            "gcloud auth application-default login, unless the machine has a role",
        ),
        "s3://": (("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_ROLE_ARN"), "aws configure, unless the machine has a role"),
    }
    for scheme, (names, remedy) in needed.items():
        used = any(place.startswith(scheme) for place in places)
        if used and not any(there[name] or name in logged_in for name in names):
            return Check("credentials", "warn", f"{value}; the config uses {scheme}", remedy)
    return Check("credentials", "ok", value)


def _presence(name: str, there: Mapping[str, bool], logged_in: set[str]) -> str:
    return "present" if there[name] else "present (logged in)" if name in logged_in else "absent"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
