"""Kubernetes: a KubeRay RayJob that trains and then takes its cluster away, and the same cluster to stay.

The fields are those of KubeRay's API ray.io/v1. A GPU pod is a whole node; data pods have CPUs only and come and go.
"""

from __future__ import annotations

import re
import shlex
from importlib.metadata import version
from typing import Any

import yaml

from drivetrain.cluster.launch import Job, Kuberay, Ray, ray_command
from drivetrain.types import UsageError

GPU = "nvidia.com/gpu"
RETRIES = 3  # of the whole job on a new cluster, which resumes
IDLE_SECONDS = 120
KEEP_SECONDS = 600  # of a finished cluster, to read its logs

type Manifest = dict[str, Any]


def manifests(job: Job, ray: Ray, kuberay: Kuberay) -> dict[str, str]:
    """File name -> YAML of `rayjob.yaml` and `raycluster.yaml`."""
    _check(job, kuberay)
    cluster = _cluster(job, min(ray.min_nodes, job.nodes), kuberay)
    files = {
        "rayjob.yaml": _object("RayJob", job, kuberay, _job(job, ray, kuberay, cluster)),
        "raycluster.yaml": _object("RayCluster", job, kuberay, cluster),
    }
    return {name: yaml.dump(manifest, Dumper=_Plain, sort_keys=False, width=118) for name, manifest in files.items()}


class _Plain(yaml.SafeDumper):
    """Writes everything out, without YAML's references from one place to another."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _check(job: Job, kuberay: Kuberay) -> None:
    if not kuberay.image:
        raise UsageError("pods need an image. Give --kuberay.image; the repository's Dockerfile builds one.")
    claim, _, path = kuberay.volume.partition(":")
    if not claim or not path.startswith("/"):
        raise UsageError(
            "pods need storage that they share. Give --kuberay.volume CLAIM:/PATH, with --out under /PATH."
        )
    for flag, place in (("--out", str(job.out)), ("--lake", job.lake)):
        if "://" not in place and not f"{place}/".startswith(f"{path.rstrip('/')}/"):
            raise UsageError(f"{flag} {place} would be lost with its pod. Give a folder under {path}.")
    if kuberay.rdma and not re.fullmatch(r"[^=\s]+/[^=\s]+=[1-9]\d*", kuberay.rdma):
        raise UsageError(f"--kuberay.rdma is {kuberay.rdma!r}, and must be RESOURCE=COUNT, as in rdma/hca=8.")
    fewest, most = kuberay.data_workers
    if not 0 <= fewest <= most:
        raise UsageError(f"--kuberay.data-workers is {fewest} {most}, and must be the fewest and the most, from 0 on.")


def _object(kind: str, job: Job, kuberay: Kuberay, spec: Manifest) -> Manifest:
    metadata = {"name": job.name, "namespace": kuberay.namespace, "labels": {"app.kubernetes.io/part-of": "drivetrain"}}
    return {"apiVersion": "ray.io/v1", "kind": kind, "metadata": metadata, "spec": spec}


def _job(job: Job, ray: Ray, kuberay: Kuberay, cluster: Manifest) -> Manifest:
    commands = [ray_command(job, "auto", min(ray.min_nodes, job.nodes))]
    if kuberay.ingest:
        commands.insert(0, ["drivetrain", "ingest", *kuberay.ingest, "--lake", job.lake, "--ray-address", "auto"])
    both = " && ".join(map(shlex.join, commands))
    return {
        # KubeRay puts it into a shell command as it stands, after `ray job submit`: a bare && would end that command
        "entrypoint": both if len(commands) == 1 else shlex.join(["bash", "-c", both]),
        "backoffLimit": RETRIES,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": KEEP_SECONDS,
        "rayClusterSpec": cluster,
    }


def _cluster(job: Job, min_nodes: int, kuberay: Kuberay) -> Manifest:
    fewest, most = kuberay.data_workers
    return {
        "rayVersion": version("ray"),
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {"version": "v2", "idleTimeoutSeconds": IDLE_SECONDS, "upscalingMode": "Default"},
        "headGroupSpec": {
            # no task runs beside the cluster's own services
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
            "template": _pod("ray-head", kuberay, {"cpu": "4", "memory": "16Gi"}, shared_memory="4Gi"),
        },
        "workerGroupSpecs": [
            {
                "groupName": "gpu" if job.gpus_per_node else "train",
                "replicas": job.nodes,
                "minReplicas": min_nodes,
                "maxReplicas": job.nodes,
                "rayStartParams": {},
                "template": _training_pod(job, kuberay),
            },
            {
                "groupName": "data",
                "replicas": fewest,
                "minReplicas": fewest,
                "maxReplicas": most,
                "rayStartParams": {},
                "template": _pod(
                    "ray-worker", kuberay, shared_memory=f"{kuberay.data_cpus}Gi",
                    resources={"cpu": str(kuberay.data_cpus), "memory": f"{4 * kuberay.data_cpus}Gi"},
                ),
            },
        ],
    }  # fmt: skip


def _training_pod(job: Job, kuberay: Kuberay) -> Manifest:
    resources = {"memory": kuberay.memory}
    if job.cpus_per_node:
        resources["cpu"] = str(job.cpus_per_node)
    if job.gpus_per_node:
        resources[GPU] = str(job.gpus_per_node)
    if kuberay.rdma:
        name, _, count = kuberay.rdma.partition("=")
        resources[name] = count
    pod = _pod("ray-worker", kuberay, resources, kuberay.shared_memory)
    spec, labels = pod["spec"], pod["metadata"]["labels"]
    labels["drivetrain/role"] = "train"
    if kuberay.rdma:  # memory that a network card reads must stay where it is
        spec["containers"][0]["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    if job.gpus_per_node:
        spec["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    if kuberay.node_selector:
        spec["nodeSelector"] = dict(kuberay.node_selector)
    if kuberay.host_network:
        spec["hostNetwork"] = True
        spec["dnsPolicy"] = "ClusterFirstWithHostNet"  # the host's own resolver does not know the head's service
        alone = {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
        # two Ray nodes on one host network would take each other's ports
        spec["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [alone]}}
    return pod


def _pod(container: str, kuberay: Kuberay, resources: dict[str, str], shared_memory: str) -> Manifest:
    """A pod template. Limits equal requests: what a pod is promised, nobody else can take from it."""
    claim, _, path = kuberay.volume.partition(":")
    main: Manifest = {
        "name": container,
        "image": kuberay.image,
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}, {"name": "work", "mountPath": path}],
    }
    if kuberay.secrets:
        main["envFrom"] = [{"secretRef": {"name": name}} for name in kuberay.secrets]
    return {
        "metadata": {"labels": {"app.kubernetes.io/part-of": "drivetrain"}},
        "spec": {
            "containers": [main],
            "volumes": [
                {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": shared_memory}},
                {"name": "work", "persistentVolumeClaim": {"claimName": claim}},
            ],
        },
    }
