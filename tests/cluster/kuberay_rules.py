"""KubeRay's rules for the fields that drivetrain writes, as JSON Schema, with Kubernetes' own schema for pods.

Kubernetes' schemas are the published ones, as the package kubernetes-validate carries them. KubeRay's are in no package;
what stands here is the subset that is relied on, taken down from ray-operator/apis/ray/v1/rayjob_types.go and
raycluster_types.go of ray-project/kuberay (API group ray.io/v1, read in December 2026): field names, types, enumerations,
and which fields are required. A field that is not listed is refused, so a misspelt one is caught.
"""

from __future__ import annotations

from typing import Any

import kubernetes_validate
from jsonschema import Draft7Validator

KUBERNETES = "1.32"

STRING, COUNT, BOOLEAN = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
PARAMETERS = {"type": "object", "additionalProperties": STRING}  # numbers must be written as text
POD = {"type": "object"}  # held to Kubernetes' own schema by `problems`


def fields(required: list[str], **properties: Any) -> dict:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


CLUSTER = fields(
    ["headGroupSpec"],
    rayVersion=STRING,
    enableInTreeAutoscaling=BOOLEAN,
    autoscalerOptions=fields(
        [],
        version={"enum": ["v1", "v2"]},
        idleTimeoutSeconds=COUNT,
        upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
    ),
    headGroupSpec=fields(["rayStartParams", "template"], rayStartParams=PARAMETERS, template=POD),
    workerGroupSpecs={
        "type": "array",
        "items": fields(
            ["groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"],
            groupName=STRING,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            rayStartParams=PARAMETERS,
            template=POD,
        ),
    },
)
JOB = fields(
    [],
    entrypoint=STRING,
    backoffLimit=COUNT,
    shutdownAfterJobFinishes=BOOLEAN,
    ttlSecondsAfterFinished=COUNT,
    rayClusterSpec=CLUSTER,
)


def problems(manifest: dict) -> list[str]:
    """What Kubernetes and KubeRay would not take of a RayJob or RayCluster; empty if all is well."""
    kind = manifest.get("kind")
    spec = {"RayJob": JOB, "RayCluster": CLUSTER}[kind]
    whole = fields(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": "ray.io/v1"}, kind={"const": kind}, metadata={"type": "object"}, spec=spec,
    )  # fmt: skip
    found = [f"{_path(e)}: {e.message}" for e in Draft7Validator(whole).iter_errors(manifest)]
    found += _kubernetes({"apiVersion": "v1", "kind": "ConfigMap", "metadata": manifest["metadata"]})
    cluster = manifest["spec"]["rayClusterSpec"] if kind == "RayJob" else manifest["spec"]
    groups = [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]
    for group in groups:
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": group["template"]}
        found += _kubernetes(pod)
        found += _pod_rules(group["template"]["spec"])
    for group in groups[1:]:
        if not group["minReplicas"] <= group.get("replicas", 0) <= group["maxReplicas"]:
            found.append(f"{group['groupName']}: replicas are not between minReplicas and maxReplicas")
    return found


def _kubernetes(value: dict) -> list[str]:
    """By the strict schemas, which refuse fields that Kubernetes does not know."""
    try:
        kubernetes_validate.validate(value, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{_path(error)}: {error.message}"]
    return []


def _pod_rules(spec: dict) -> list[str]:
    """What the API server checks beyond the schema, of what is used here."""
    found = []
    volumes = {v["name"] for v in spec.get("volumes", [])}
    for container in spec["containers"]:
        found += [
            f"{container['name']}: no volume {m['name']}"
            for m in container.get("volumeMounts", [])
            if m["name"] not in volumes
        ]
        requests, limits = (container["resources"].get(k, {}) for k in ("requests", "limits"))
        for name in {*requests, *limits}:
            if "/" in name and requests.get(name, limits.get(name)) != limits.get(name):
                found.append(f"{container['name']}: {name} is a device, so its request must equal its limit")
    return found


def _path(error: Any) -> str:
    return ".".join(map(str, error.absolute_path))
