"""`jtrain launch gke CONFIG --image IMAGE`."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path
from typing import Any

from jtrain.errors import ConfigError
from jtrain.launch.gke import TPUS, Cluster, apply, apply_command, follow, hosts_of, logs_command, manifest
from jtrain.launch.hosts import parse_hosts
from jtrain.launch.job import Job, need_program

USAGE = "jtrain launch gke CONFIG --image IMAGE [--tpu KIND --topology AxBxC | --gpu LABEL] [--options] [--flags]"
OPTIONS: dict[str, type] = {
    "name": str, "namespace": str, "image": str, "hosts": str, "slices": int, "tpu": str, "topology": str,
    "chips-per-host": int, "gpu": str, "gpus-per-node": int, "spot": bool, "claim": list, "service-account": str,
    "python": str, "grace-seconds": int, "cpu": str, "memory": str, "follow": bool, "dry-run": bool,
}  # fmt: skip
HELP = f"""usage: {USAGE}

Applies a JobSet whose pods run `jtrain train CONFIG`. By their exit code Kubernetes starts all of them again: 10 and 11
(preempted) as often as need be; 12, 13, 14 and killed ones up to faults.max_infra_restarts times; 15, 64, 65, 66 and 70
end it. It needs JobSet 0.10 or later in the cluster.

  --image IMAGE            with jtrain in it; by digest is best
  --name, --namespace      of the JobSet (the run directory's name, default)
  --tpu KIND               {", ".join(TPUS)}
  --topology AxB | AxBxC   of a slice; its hosts follow from it
  --chips-per-host N       TPU chips of a host (4)
  --slices N               slices of that topology (1)
  --gpu LABEL              of the nodes: nvidia-h100-80gb
  --gpus-per-node G        GPUs of a pod (8 with --gpu)
  --hosts N                pods, without --tpu (1)
  --spot                   on machines that may be preempted
  --claim NAME:PATH        mounts a PersistentVolumeClaim; may come several times
  --service-account NAME   of Kubernetes, for gs:// by workload identity
  --cpu, --memory          what a pod asks for (8, 64Gi)
  --grace-seconds N        time for the save at a preemption (120; spot machines give 30 at most)
  --python NAME            the interpreter in the image (python)
  --follow                 show the logs, and return the exit code of the run
  --dry-run                print the manifest, and apply nothing

The run directory has to be a URL or on a claim. Pods run as user 1000 with a read-only root file system and a /tmp. A
CONFIG that is a file goes along as a ConfigMap; its data has to be at a URL or on a claim."""


def launch(job: Job, options: dict[str, Any]) -> int:
    """Applies, and returns the exit code."""
    cluster = cluster_of(job, options)
    text = manifest(job, cluster)
    if options.get("dry-run"):
        print(f"# {shlex.join(apply_command(cluster))}\n{text}", end="")
        return 0
    need_program("kubectl", "Install it (gcloud components install kubectl), or use --dry-run.")
    apply(text, cluster)
    print(f"its logs: {shlex.join(logs_command(cluster))}", flush=True)
    return follow(cluster, time.sleep) if options.get("follow") else 0


def cluster_of(job: Job, options: dict[str, Any]) -> Cluster:
    """What the options ask of Kubernetes.

    Raises:
      ConfigError: one is missing, or says nothing beside another.
    """
    if not options.get("image"):
        raise ConfigError("--image is missing", f"usage: {USAGE}")
    tpu, gpu = options.get("tpu", ""), options.get("gpu", "")
    if tpu and gpu:
        raise ConfigError("--tpu beside --gpu", "Keep one of them.")
    if tpu and tpu not in TPUS:
        raise ConfigError(f"--tpu: {tpu!r}", f"Write one of {', '.join(TPUS)}.")
    if tpu and "topology" not in options:
        raise ConfigError(f"--tpu {tpu} without --topology", "Write --topology 4x4x4, or another one.")
    for name, needs in (("topology", "tpu"), ("chips-per-host", "tpu"), ("slices", "tpu"), ("gpus-per-node", "gpu")):
        if name in options and not options.get(needs):
            raise ConfigError(f"--{name} without --{needs}", f"Write --{needs}, or leave it out.")
    if tpu and "hosts" in options:
        raise ConfigError("--hosts beside --tpu: they follow from --topology", "Leave it out.")
    for name in ("slices", "chips-per-host", "gpus-per-node", "grace-seconds"):
        if options.get(name, 1) < 1:
            raise ConfigError(f"--{name}: {options[name]}", "Write a number above 0.")
    least, most = parse_hosts(options.get("hosts", "1"))
    if least < most:
        raise ConfigError(f"--hosts {least}:{most}: a JobSet has all of its pods or none", f"Write --hosts {most}.")
    chips = options.get("chips-per-host", 4) if tpu else options.get("gpus-per-node", 8) if gpu else 0
    claims = [claim.partition(":")[::2] for claim in options.get("claim", [])]
    default = re.sub(r"[^a-z0-9-]+", "-", Path(job.config.run_dir).name.lower()).strip("-")[:40] or "jtrain"
    return Cluster(
        options.get("name", default),
        options["image"],
        options.get("namespace", "default"),
        hosts_of(options["topology"], chips) if tpu else most,
        options.get("slices", 1),
        tpu,
        options.get("topology", ""),
        gpu,
        chips,
        bool(options.get("spot")),
        tuple((name, path) for name, path in claims),
        options.get("service-account", ""),
        options.get("python", "python"),
        options.get("grace-seconds", 120),
        options.get("memory", ""),
        options.get("cpu", ""),
    )
