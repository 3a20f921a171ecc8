"""Writes tests/launch/fixtures/jobset.schema.json: what a JobSet and a ConfigMap may hold, strictly.

    pip install kubernetes-validate==1.37.0 kubeflow-trainer-api==2.3.0
    python tests/peers/make_jobset_schema.py

Jobs and pods are those of Kubernetes' own OpenAPI (the package kubernetes-validate, batch/v1 of 1.37); JobSet's fields
are those of its v1alpha2 (the package kubeflow-trainer-api has its models), its enumerations those of its CRD
(https://github.com/kubernetes-sigs/jobset, api/jobset/v1alpha2). Parts that no manifest of ours uses are left out, and
are errors therefore.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

OUT = Path(__file__).parents[1] / "launch" / "fixtures" / "jobset.schema.json"
SOURCE = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / "v1.37.0-local-strict"
LEFT_OUT = {
    "affinity", "ephemeralContainers", "initContainers", "lifecycle", "livenessProbe", "readinessProbe", "startupProbe",
    "resizePolicy", "restartPolicyRules", "topologySpreadConstraints", "resourceClaims", "readinessGates", "dnsConfig",
    "hostAliases", "managedFields", "ownerReferences", "selector", "volumeDevices", "envFrom", "volumeClaimPolicies",
    "startupPolicy", "successPolicy", "dependsOn", "overhead", "schedulingGates", "os", "windowsOptions",
    "seLinuxOptions", "appArmorProfile", "sysctls", "workloadRef", "hostnameOverride", "schedulingGroup",
}  # fmt: skip
VOLUMES = {"name", "emptyDir", "persistentVolumeClaim", "configMap"}
KEPT = ("type", "items", "required", "enum", "format", "oneOf", "anyOf", "pattern", "additionalProperties")
"""Words of JSON schema that say something of a value."""
ENUMS = {
    ("FailurePolicyRule", "action"): [
        "FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob",
        "RestartJobAndIgnoreMaxRestarts",
    ],
    ("FailurePolicy", "restartStrategy"): ["Recreate", "BlockingRecreate", "InPlaceRestart"],
}  # fmt: skip
_definitions = json.loads((SOURCE / "_definitions.json").read_text())["$defs"]


def resolved(schema: Any, name: str = "") -> Any:
    """A schema without references and descriptions."""
    if isinstance(schema, list):
        return [resolved(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        target = schema["$ref"].rpartition("/")[2]
        return resolved(_definitions[target], target.rpartition(".")[2])
    found = {k: resolved(v) for k, v in schema.items() if k in KEPT}
    if "properties" in schema:
        kept = {k: v for k, v in schema["properties"].items() if k not in LEFT_OUT}
        if name == "Volume":
            kept = {k: v for k, v in kept.items() if k in VOLUMES}
        found["properties"] = {k: resolved(v) for k, v in kept.items()}
        found["additionalProperties"] = False
    return found


def of_model(model: Any) -> dict[str, Any]:
    """The schema of one of JobSet's own models; what belongs to Kubernetes is taken from there."""
    definitions = model.model_json_schema(by_alias=True)["$defs"]

    def walk(schema: dict[str, Any]) -> Any:
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            kind = name.removeprefix("JobsetV1alpha2")
            if kind != name:
                return built(kind, definitions[name])
            kind = name.removeprefix("IoK8sApiBatchV1")
            group = "io.k8s.api.batch.v1." if kind != name else "io.k8s.apimachinery.pkg.apis.meta.v1."
            return resolved(_definitions[group + kind.removeprefix("IoK8sApimachineryPkgApisMetaV1")])
        if "anyOf" in schema:
            (real,) = (option for option in schema["anyOf"] if option.get("type") != "null")
            return walk(real)
        found = {k: v for k, v in schema.items() if k == "type"}
        if "items" in schema:
            found["items"] = walk(schema["items"])
        return found

    def built(kind: str, schema: dict[str, Any]) -> dict[str, Any]:
        properties = {k: walk(v) for k, v in schema["properties"].items() if k not in {*LEFT_OUT, "status"}}
        for (owner, field), values in ENUMS.items():
            if owner == kind:
                properties[field]["enum"] = values
        required = {"required": schema["required"]} if "required" in schema else {}
        return {"type": "object", "properties": properties, "additionalProperties": False, **required}

    return built("JobSet", model.model_json_schema(by_alias=True))


def main() -> None:
    job_set = of_model(JobsetV1alpha2JobSet)
    job_set["properties"] |= {"apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"}, "kind": {"const": "JobSet"}}
    job_set["required"] = ["apiVersion", "kind", "metadata", "spec"]
    config_map = resolved(_definitions["io.k8s.api.core.v1.ConfigMap"])
    config_map["required"] = ["apiVersion", "kind", "metadata"]
    OUT.write_text(
        json.dumps({"source": __doc__.split("\n\n")[2], "JobSet": job_set, "ConfigMap": config_map},
                   separators=(",", ":"), sort_keys=True) + "\n"
    )  # fmt: skip
    print(OUT, OUT.stat().st_size)


if __name__ == "__main__":
    main()
