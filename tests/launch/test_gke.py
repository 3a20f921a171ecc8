"""`jtrain launch gke`: manifests against the schemas of Kubernetes and JobSet, and their life in a small cluster."""

import copy
import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from jtrain.launch.gke import Cluster, documents, hosts_of, manifest
from jtrain.launch.job import make_job

SCHEMAS = json.loads((Path(__file__).parent / "fixtures" / "jobset.schema.json").read_text())
URL = ("--run_dir", "gs://bucket/run")
GPU = ("--accelerator", "gpu", "--devices", "auto", "--mesh", "data=-1")
CLUSTERS = {
    "tpu": (URL, {"tpu": "v5p", "topology": "4x4x4", "hosts": 16, "chips": 4, "spot": True, "slices": 2}),
    "gpu": ((*URL, *GPU), {"gpu": "nvidia-h100-80gb", "hosts": 2, "chips": 8, "service_account": "trainer"}),
    "cpu on a claim": (
        ("--run_dir", "/runs/x"), {"claims": (("runs", "/runs"), ("data", "/data")), "cpu": "8", "memory": "64Gi"},
    ),
}  # fmt: skip


def made(kind, source="demo"):
    flags, fields = CLUSTERS[kind]
    job = make_job(source, flags)
    cluster = Cluster("run", "registry/jtrain@sha256:0", **fields)
    assert list(yaml.safe_load_all(manifest(job, cluster))) == documents(job, cluster)
    return documents(job, cluster)


def validate(document):
    jsonschema.Draft7Validator(SCHEMAS[document["kind"]]).validate(document)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text("data: {train: [gs://bucket/a.txt]}\nmax_steps: 3\n")
    return str(path)


@pytest.mark.parametrize("kind", CLUSTERS)
def test_manifests_are_what_the_schemas_allow(kind, file):
    for source in ("demo", file):
        for document in made(kind, source):
            validate(document)


def test_the_schemas_would_notice():
    (whole,) = made("tpu")
    mistakes = [
        ("spec.failurePolicy.restartStrategy", "Anyhow"),
        ("spec.failurePolicy.rules.0.action", "RestartAll"),
        ("spec.replicatedJobs.0.template.spec.backofflimit", 0),
        ("spec.replicatedJobs.0.template.spec.template.spec.terminationGracePeriodSeconds", "120"),
        ("spec.replicatedJobs.0.template.spec.template.spec.containers.0.securityContext.readonly", True),
        ("spec.coordinators", {}),
    ]
    for path, value in mistakes:
        wrong = copy.deepcopy(whole)
        *way, last = path.split(".")
        place = wrong
        for name in way:
            place = place[int(name) if name.isdigit() else name]
        place[last] = value
        with pytest.raises(jsonschema.ValidationError):
            validate(wrong)


def job_of(document):
    return document["spec"]["replicatedJobs"][0]["template"]["spec"]


def test_pods_are_placed_on_the_nodes_of_their_slice():
    (document,) = made("tpu")
    job, pod = job_of(document), job_of(document)["template"]["spec"]
    assert (job["completions"], job["parallelism"], document["spec"]["replicatedJobs"][0]["replicas"]) == (16, 16, 2)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "4x4x4",
        "cloud.google.com/gke-spot": "true",
    }
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}
    (gpu,) = made("gpu")
    assert job_of(gpu)["template"]["spec"]["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}


@pytest.mark.parametrize("kind", CLUSTERS)
def test_pods_are_no_root_write_to_no_image_and_hold_no_token(kind):
    pod = job_of(made(kind)[-1])["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
    assert not pod["automountServiceAccountToken"] and pod["terminationGracePeriodSeconds"] >= 30
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/tmp", "/dev/shm"} <= mounted
    assert {m["name"] for m in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_a_config_file_goes_along(file):
    config_map, document = made("gpu", file)
    assert config_map["data"] == {"my.yaml": Path(file).read_text()}
    assert job_of(document)["template"]["spec"]["containers"][0]["command"][4] == "/etc/jtrain/my.yaml"


def test_hosts_follow_from_the_topology():
    assert (hosts_of("4x4x4", 4), hosts_of("2x4", 8), hosts_of("2x4", 4)) == (16, 1, 2)


# -- life -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def launch(run, fake, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)

    def call(script, *words):
        fake.runs_shell(script)
        words = (*URL, "--image", "i", "--hosts", "2", "--python", fake.python, "--follow", *words)
        code, _, err = run("launch", "gke", "demo", *words)
        return code, err, json.loads((fake.folder / "jobset.json").read_text())

    return call


def test_the_gang_is_started_again_by_exit_code_until_it_is_done(launch, fake):
    code, err, state = launch("""
echo $JTRAIN_DISTRIBUTED__COORDINATOR_ADDRESS $JTRAIN_DISTRIBUTED__NUM_PROCESSES > "$FAKE/$rank"
case $attempt in 1) exit 12;; 2) exit 10;; 3) exit $((12 + rank));; esac
""")
    assert (code, state["restarts"], state["counted"]) == (0, 3, 2), err
    for rank in (0, 1):
        assert (fake.folder / str(rank)).read_text() == "name-workers-0-0.name:8476 2\n"


@pytest.mark.parametrize("failed", [70, *(pytest.param(code, marks=pytest.mark.faults) for code in (15, 64, 65, 66))])
def test_what_a_restart_does_not_mend_fails_at_once_with_its_code(failed, launch):
    code, _, state = launch(f"exit $((rank ? {failed} : 12))")
    assert (code, state["restarts"]) == (failed, 0)


@pytest.mark.faults
def test_lost_processes_have_a_budget(launch):
    code, _, state = launch("exit 12", "--max-infra-restarts", "2")
    assert (code, state["restarts"], state["counted"]) == (12, 2, 2)


@pytest.mark.faults
def test_a_node_that_went_away_counts_for_nothing(launch):
    script = '[ $rank = 0 ] || [ $attempt = 4 ] || { touch "$FAKE/disrupted.1"; kill -9 $$; }'
    code, _, state = launch(script, "--max-infra-restarts", "0")
    assert (code, state["restarts"], state["counted"]) == (0, 3, 0)


def test_a_dry_run_prints_what_is_applied(run, fake):
    words = ("launch", "gke", "demo", *URL, "--image", "i", "--hosts", "2", "--namespace", "ml")
    code, out, _ = run(*words, "--dry-run")
    assert code == 0 and not fake.calls()
    assert out.startswith("# kubectl apply --validate=strict --namespace=ml --filename=-\n")
    code, told, _ = run(*words)
    assert code == 0 and (fake.folder / "manifest.yaml").read_text() == out.partition("\n")[2]
    assert "its logs: kubectl logs --follow" in told and len(fake.calls()) == 1


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, expected",
    [
        ("", "--image is missing"),
        ("--image i", "would go with its pod"),
        ("--image i --run_dir /runs/x --claim runs", "--claim data:/data"),
        ("--image i --run_dir /elsewhere --claim runs:/runs", "would go with its pod"),
        ("--image i --run_dir gs://b/r --tpu v5p", "Write --topology"),
        ("--image i --run_dir gs://b/r --tpu v9 --topology 2x2", "Write one of v4"),
        ("--image i --run_dir gs://b/r --tpu v5p --topology 4by4", "Write 2x4"),
        ("--image i --run_dir gs://b/r --tpu v5p --topology 2x2x1 --chips-per-host 3", "a divisor of 4"),
        ("--image i --run_dir gs://b/r --tpu v5p --topology 2x2x1 --hosts 2", "they follow from --topology"),
        ("--image i --run_dir gs://b/r --tpu v5p --topology 2x2x1 --gpu a", "Keep one of them"),
        ("--image i --run_dir gs://b/r --gpus-per-node 8", "without --gpu"),
        ("--image i --run_dir gs://b/r --hosts 0", "a run needs a host"),
        ("--image i --run_dir gs://b/r --hosts 2:4", "all of its pods or none"),
        ("--image i --run_dir gs://b/r --hosts 3", "Write devices: 9"),
        ("--image i --run_dir gs://b/r --name My_Run", "small letters"),
        ("--image i --run_dir gs://b/r --grace-seconds 0", "above 0"),
        ("--image i --run_dir gs://b/r --data.train mine.txt", "mine.txt is on this machine alone"),
    ],
)
def test_mistakes_are_answered_before_anything_is_applied(words, expected, run, fake):
    code, _, err = run("launch", "gke", "demo", *words.split())
    assert code == 64 and expected in err and not fake.calls()


def test_without_kubectl_the_remedy_is_said_and_a_refusal_is_passed_on(run, fake, monkeypatch):
    words = ("launch", "gke", "demo", *URL, "--image", "i")
    monkeypatch.setenv("FAKE_REFUSES", 'unknown field "spec.failurePolicy.rules[0].onJobFailureMessagePatterns"')
    code, _, err = run(*words)
    assert code == 64 and "onJobFailureMessagePatterns" in err and "JobSet installed there (0.10" in err
    monkeypatch.setenv("PATH", "/nowhere")
    code, _, err = run(*words)
    assert code == 64 and "kubectl is not on PATH" in err
