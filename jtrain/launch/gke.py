"""`jtrain launch gke`: a JobSet (https://jobset.sigs.k8s.io) whose pods are the processes of a run.

Kubernetes is the supervisor here. The exit code of the training container decides, in two steps: a rule of the Job
makes it fail, and a rule of the JobSet says what that means.

| exit code | Job | JobSet |
|---|---|---|
| 10, 11 preempted | fails by rule | starts all pods again; counts for nothing |
| 15, 64, 65, 66, 70 | fails by rule | fails: a restart would not help |
| 12, 13, 14, a signal | fails, since no pod may be retried alone | starts all pods again, up to `maxRestarts` times |
| (the node went away) | fails by rule | starts all pods again; counts for nothing |

A pod of a gang is of no use alone, so even where Kubernetes took the node (DisruptionTarget) it is not replaced alone.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from jtrain.errors import ConfigError, Exit
from jtrain.launch.job import Job

PORT = 8476
FINAL = sorted(int(code) for code in (Exit.NUMBERS, Exit.CONFIG, Exit.DATA, Exit.CHECKPOINT, Exit.BUG))
PREEMPTED = [int(Exit.PREEMPTED_SAVED), int(Exit.PREEMPTED_NOT_SAVED)]
TPUS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "7x": "tpu7x",
}
"""Kind of TPU -> label of its nodes (https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus)."""
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_CONFIG = "/etc/jtrain"
_USER = 1000


@dataclass(frozen=True)
class Cluster:
    """What is asked of Kubernetes.

    Attributes:
      name, namespace: of the JobSet.
      image: with jtrain in it.
      hosts: pods of a slice, or in all.
      slices: TPU slices.
      tpu, topology: `v5p`, `4x4x4`.
      gpu: label of the nodes (`nvidia-h100-80gb`).
      chips: TPU chips or GPUs of a pod; 0: a CPU run.
      spot: on machines that may be preempted.
      claims: (PersistentVolumeClaim, where it is mounted).
      service_account: of Kubernetes; empty: the default one.
      python: the interpreter in the image.
      grace_seconds: from SIGTERM to SIGKILL: the time for a save.
      memory, cpu: what a pod asks for; empty: nothing is said.
    """

    name: str
    image: str
    namespace: str = "default"
    hosts: int = 1
    slices: int = 1
    tpu: str = ""
    topology: str = ""
    gpu: str = ""
    chips: int = 0
    spot: bool = False
    claims: tuple[tuple[str, str], ...] = ()
    service_account: str = ""
    python: str = "python"
    grace_seconds: int = 120
    memory: str = ""
    cpu: str = ""


def manifest(job: Job, cluster: Cluster) -> str:
    """The JobSet as YAML; before it a ConfigMap, where CONFIG is a file.

    Raises:
      ConfigError: parts that don't fit.
    """
    check(job, cluster)
    return yaml.safe_dump_all(documents(job, cluster), sort_keys=False, width=120)


def documents(job: Job, cluster: Cluster) -> list[dict[str, Any]]:
    """What is applied."""
    found = [] if job.file is None else [_config_map(job, cluster)]
    return [*found, _job_set(job, cluster)]


def _metadata(cluster: Cluster) -> dict[str, Any]:
    return {"name": cluster.name, "namespace": cluster.namespace, "labels": {"app.kubernetes.io/name": "jtrain"}}


def _config_map(job: Job, cluster: Cluster) -> dict[str, Any]:
    assert job.file is not None
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(cluster),
        "data": {job.file.name: job.file.read_text()},
    }


def _job_set(job: Job, cluster: Cluster) -> dict[str, Any]:
    metadata = _metadata(cluster)
    if cluster.tpu:  # a slice is a node pool: a job has it for itself
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    rules = [
        {
            "name": "preempted",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
            # The words of the Job controller for a rule that matched (kubernetes/pkg/controller/job).
            "onJobFailureMessagePatterns": [
                f"exit code ({'|'.join(map(str, PREEMPTED))}) matching",
                "condition DisruptionTarget matching",
            ],
        },
        {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
    ]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": {
                "maxRestarts": job.config.faults.max_infra_restarts,
                "restartStrategy": "BlockingRecreate",  # never two attempts at once
                "rules": rules,
            },
            # The headless service by which pods find each other, before they are ready.
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "coordinator": {"replicatedJob": "workers", "jobIndex": 0, "podIndex": 0},
            "replicatedJobs": [{"name": "workers", "replicas": cluster.slices, "template": _job(job, cluster)}],
        },
    }


def _job(job: Job, cluster: Cluster) -> dict[str, Any]:
    def codes(values: list[int]) -> dict[str, Any]:
        return {"containerName": "train", "operator": "In", "values": values}

    return {
        "spec": {
            "parallelism": cluster.hosts,
            "completions": cluster.hosts,
            "completionMode": "Indexed",
            "backoffLimit": 0,  # no pod is retried alone: the gang lives and dies together
            "podFailurePolicy": {
                "rules": [
                    {"action": "FailJob", "onExitCodes": codes(PREEMPTED)},
                    {"action": "FailJob", "onExitCodes": codes(FINAL)},
                    {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": {"spec": _pod(job, cluster)},
        }
    }


def _pod(job: Job, cluster: Cluster) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": cluster.grace_seconds,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }  # fmt: skip
    if cluster.service_account:
        pod["serviceAccountName"] = cluster.service_account
    selector: dict[str, str] = {}
    if cluster.tpu:
        selector["cloud.google.com/gke-tpu-accelerator"] = TPUS[cluster.tpu]
        selector["cloud.google.com/gke-tpu-topology"] = cluster.topology
    if cluster.gpu:
        selector["cloud.google.com/gke-accelerator"] = cluster.gpu
    if cluster.spot:
        selector["cloud.google.com/gke-spot"] = "true"
        pod["tolerations"] = [
            {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        ]
    if selector:
        pod["nodeSelector"] = selector
    volumes = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        *({"name": f"claim-{n}", "persistentVolumeClaim": {"claimName": name}} for n, (name, _) in _numbered(cluster)),
    ]
    if job.file is not None:
        volumes.append({"name": "config", "configMap": {"name": cluster.name}})
    return pod | {"containers": [_container(job, cluster)], "volumes": volumes}


def _numbered(cluster: Cluster) -> list[tuple[int, tuple[str, str]]]:
    return list(enumerate(cluster.claims))


def _container(job: Job, cluster: Cluster) -> dict[str, Any]:
    source = None if job.file is None else f"{_CONFIG}/{job.file.name}"
    asked = {name: value for name, value in (("cpu", cluster.cpu), ("memory", cluster.memory)) if value}
    kind = "google.com/tpu" if cluster.tpu else "nvidia.com/gpu"
    devices = {kind: cluster.chips} if cluster.chips else {}
    mounts: list[dict[str, Any]] = [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
        *({"name": f"claim-{n}", "mountPath": path} for n, (_, path) in _numbered(cluster)),
    ]
    if job.file is not None:
        mounts.append({"name": "config", "mountPath": _CONFIG, "readOnly": True})
    return {
        "name": "train",
        "image": cluster.image,
        "command": job.command(cluster.python, source=source),
        "env": list(_environment(cluster)),
        "ports": [{"containerPort": PORT}],
        "resources": {"requests": asked | devices, "limits": devices},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def _environment(cluster: Cluster) -> Iterator[dict[str, Any]]:
    def annotation(name: str, key: str) -> dict[str, Any]:
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{key}']"}}}

    # The root file system is read-only: what is written beside the run goes to /tmp.
    for name, value in (("HOME", "/tmp"), ("XDG_CACHE_HOME", "/tmp/cache"), ("PYTHONUNBUFFERED", "1"),
                        ("PYTHONFAULTHANDLER", "1")):  # fmt: skip
        yield {"name": name, "value": value}
    if cluster.tpu or cluster.hosts == 1:
        return  # on TPUs GKE tells the processes of each other
    yield annotation("COORDINATOR", "jobset.sigs.k8s.io/coordinator")
    yield {"name": "JTRAIN_DISTRIBUTED__COORDINATOR_ADDRESS", "value": f"$(COORDINATOR):{PORT}"}
    yield {"name": "JTRAIN_DISTRIBUTED__NUM_PROCESSES", "value": str(cluster.hosts)}
    yield annotation("JTRAIN_DISTRIBUTED__PROCESS_ID", "batch.kubernetes.io/job-completion-index")


def hosts_of(topology: str, chips: int) -> int:
    """Hosts of a TPU slice with so many chips each.

    Raises:
      ConfigError: it is no topology, or can't be divided.
    """
    if not re.fullmatch(r"\d+x\d+(x\d+)?", topology):
        raise ConfigError(f"--topology: {topology!r}", "Write 2x4 (v5e, v6e) or 4x4x4 (v4, v5p).")
    total = math.prod(map(int, topology.split("x")))
    if chips < 1 or total % chips:
        raise ConfigError(
            f"--topology {topology} is {total} chips, which are not hosts of {chips}",
            f"Write --chips-per-host with a divisor of {total}.",
        )
    return total // chips


def check(job: Job, cluster: Cluster) -> None:
    """Sees that the parts fit, and that what the run writes outlives its pods.

    Raises:
      ConfigError: they don't.
    """
    if not _NAME.fullmatch(cluster.name):
        raise ConfigError(
            f"--name: {cluster.name!r} is no name of Kubernetes", "Write small letters, digits and dashes, 40 at most."
        )
    for name, path in cluster.claims:
        if not _NAME.fullmatch(name) or not path.startswith("/"):
            raise ConfigError(f"--claim: {name}:{path}", "Write the claim and an absolute path: --claim data:/data.")
    places = [path for _, path in cluster.claims]

    def kept(path: str) -> bool:
        return "://" in path or any(Path(path).is_relative_to(place) for place in places)

    if not kept(job.config.run_dir):
        raise ConfigError(
            f"run_dir: {job.config.run_dir} would go with its pod",
            "Write --run_dir gs://BUCKET/NAME, or a folder on a claim: --claim runs:/runs --run_dir /runs/NAME.",
        )
    job.check_data(kept, "Write gs://…, or --claim the volume that holds it.")
    if not cluster.tpu:
        count = cluster.hosts * cluster.slices
        if count > 1:
            job.changed("--distributed.num_processes", str(count))


# -- kubectl ----------------------------------------------------------------------------------------------------------


def apply_command(cluster: Cluster) -> list[str]:
    """Applies what comes on standard input; a field that the cluster does not know is an error, and not left out."""
    return ["kubectl", "apply", "--validate=strict", f"--namespace={cluster.namespace}", "--filename=-"]


def logs_command(cluster: Cluster) -> list[str]:
    """Follows the log of all pods that there are."""
    return [
        "kubectl", "logs", "--follow", "--prefix", "--tail=-1", f"--namespace={cluster.namespace}",
        f"--selector=jobset.sigs.k8s.io/jobset-name={cluster.name}",
        f"--max-log-requests={max(5, cluster.hosts * cluster.slices)}",
    ]  # fmt: skip


def get_command(cluster: Cluster, kind: str, *words: str) -> list[str]:
    """What the cluster knows of it, as JSON."""
    return ["kubectl", "get", kind, *words, f"--namespace={cluster.namespace}", "--output=json"]


def apply(text: str, cluster: Cluster) -> None:
    """Hands the manifest over.

    Raises:
      ConfigError: the cluster refuses it.
    """
    found = subprocess.run(apply_command(cluster), input=text, capture_output=True, text=True, check=False)
    if found.returncode:
        said = " ".join(found.stderr.split())[-400:]
        raise ConfigError(
            f"kubectl refuses it: {said}",
            "Is the right cluster chosen (kubectl config current-context), and JobSet installed there (0.10 or later)?",
        )
    print(found.stdout, end="", flush=True)


def follow(cluster: Cluster, sleep: Callable[[float], None]) -> int:
    """Shows the logs until the JobSet has ended, through all restarts, and returns the exit code of the run."""
    while True:
        state = _get(get_command(cluster, "jobset", cluster.name)).get("status", {})
        ended = state.get("terminalState")
        if ended == "Completed":
            return int(Exit.DONE)
        if ended == "Failed":
            return _code(cluster)
        subprocess.run(logs_command(cluster), stdin=subprocess.DEVNULL, check=False)  # until these pods have ended
        sleep(5.0)


def _code(cluster: Cluster) -> int:
    """The exit code of the process that failed first; 12 where no pod is left to tell."""
    selector = f"--selector=jobset.sigs.k8s.io/jobset-name={cluster.name}"
    ends = []
    for pod in _get(get_command(cluster, "pods", selector)).get("items", []):
        for status in pod.get("status", {}).get("containerStatuses", []):
            end = status.get("state", {}).get("terminated")
            if end and end["exitCode"]:
                ends.append((end["exitCode"] == Exit.PEER_LOST, end.get("finishedAt", ""), end["exitCode"]))
    return min(ends)[2] if ends else int(Exit.PEER_LOST)


def _get(command: list[str]) -> dict[str, Any]:
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        if "not found" in found.stderr.lower():
            raise ConfigError(f"it is gone: {found.stderr.strip()}", "Somebody deleted it; launch it again.")
        return {}  # asked again
    try:
        return json.loads(found.stdout)
    except ValueError:
        return {}
