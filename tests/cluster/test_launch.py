"""What `drivetrain launch` writes: scripts that start the very run that was asked for, and YAML that clusters take."""

from __future__ import annotations

import copy
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from kuberay_rules import problems

from drivetrain import cli, verbs
from drivetrain.cluster.launch import launch
from drivetrain.types import UsageError

OVERRIDES = ["--steps", "7", "--batch.packs", "32", "--mixture.weights", "a", "1", "b", "3", "--policy.no-tune-llm"]
CLUSTER = [
    "--kuberay.image", "registry.example/drivetrain:1", "--kuberay.volume", "work:/scratch", "--kuberay.rdma", "rdma/hca=8",
    "--kuberay.host-network", "--kuberay.secrets", "s3-credentials", "hub-token", "--kuberay.data-workers", "1", "6",
    "--kuberay.ingest", "hf://datasets/lerobot/pusht", "--kuberay.node-selector", "gpu", "h200",
]  # fmt: skip


def parse(verb: str, arguments: list[str]) -> dict:
    return verbs.parse(verb, arguments, "summary", "example")


def launched(arguments: list[str]) -> dict[str, str]:
    """The files of `drivetrain launch ARGUMENTS`."""
    result = launch(**parse("launch", arguments))
    assert result is not None
    return result.files


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    """Flags for a lake and an output folder whose names need quoting."""
    lake = tmp_path / "my lake"
    lake.mkdir()
    return ["--lake", str(lake), "--out", str(tmp_path / "the out $HOME")]


@pytest.fixture
def kuberay() -> dict[str, str]:
    place = ["--lake", "s3://bucket/lake", "--out", "/scratch/out"]
    size = ["--on", "kuberay", "--nodes", "4", "--gpus-per-node", "8", "--ray.min-nodes", "2", "--cpus-per-node", "96"]
    return launched(["groot_finetune", *size, *place, *CLUSTER, *OVERRIDES])


def same_run(command: list[str], places: list[str]) -> None:
    """The command line trains the recipe with the overrides, into the same folders, and resumes."""
    assert command[0] == "train"
    keywords = parse("train", command[1:])
    wanted = parse("train", ["groot_finetune", *places, *OVERRIDES])
    assert keywords == {**wanted, "resume": "auto"}


# --- the same run


@pytest.mark.parametrize("nodes", [1, 2])
def test_torchrun_starts_the_same_run(places: list[str], nodes: int) -> None:
    size = ["--on", "torchrun", "--nodes", str(nodes), "--gpus-per-node", "8", "--head", "gpu-7" if nodes > 1 else ""]
    script = launched(["groot_finetune", *size, *places, *OVERRIDES])["node.sh"]
    words = shlex.split(script[script.index("exec ") :].replace("\\\n", " "))
    same_run(words[words.index("drivetrain") + 1 :], places)
    assert "--nproc-per-node=8" in words
    assert ("--standalone" in words) == (nodes == 1)
    assert ("--rdzv-endpoint=gpu-7:29400" in words) == (nodes > 1)


def test_slurm_starts_the_same_run(places: list[str]) -> None:
    size = ["--on", "slurm", "--nodes", "4", "--gpus-per-node", "8", "--slurm.exclude", "n[3-5]", "n9"]
    script = launched(["groot_finetune", *size, *places, *OVERRIDES, "--slurm.options", "qos=high", "contiguous"])[
        "job.sbatch"
    ]
    step = script[script.index("srun ") : script.index("</dev/null")].replace("\\\n", " ")
    words = shlex.split(step)
    same_run(words[words.index("train") :], places)

    options = sbatch_options(script)
    assert options["nodes"] == "4" and options["gpus-per-node"] == "8" and options["ntasks-per-node"] == "1"
    assert options["exclude"] == "n[3-5],n9"
    assert options["qos"] == "high" and options["contiguous"] == ""
    assert options["requeue"] == "" and options["open-mode"] == "append"
    assert options["signal"] == "B:USR1@300"
    assert options["output"] == f"{places[3]}/logs/slurm-%j.out"


def test_ray_starts_the_same_run(places: list[str]) -> None:
    size = ["--on", "ray", "--nodes", "4", "--gpus-per-node", "8", "--ray.min-nodes", "2"]
    script = launched(["groot_finetune", *size, *places, *OVERRIDES])["ray_job.sh"]
    program, verb, *arguments = shlex.split(script[script.index("exec ") + 5 :])
    assert (program, verb) == ("drivetrain", "launch")
    keywords = parse("launch", arguments)
    asked = parse("launch", ["groot_finetune", *size, *places, *OVERRIDES])
    assert keywords == {**asked, "start": True}


def test_a_rayjob_ingests_and_starts_the_same_run(kuberay: dict[str, str], tmp_path: Path) -> None:
    bash, flag, both = shlex.split(yaml.safe_load(kuberay["rayjob.yaml"])["spec"]["entrypoint"])
    assert (bash, flag) == ("bash", "-c")
    first, second = (shlex.split(c) for c in both.split(" && "))
    assert first == [
        "drivetrain",
        "ingest",
        "hf://datasets/lerobot/pusht",
        "--lake",
        "s3://bucket/lake",
        "--ray-address",
        "auto",
    ]
    assert second[:2] == ["drivetrain", "launch"]
    keywords = parse("launch", second[2:])
    assert keywords["start"] and keywords["on"] == "ray"
    assert (keywords["nodes"], keywords["gpus_per_node"], keywords["ray"].min_nodes) == (4, 8, 2)
    assert (keywords["lake"], keywords["out"]) == ("s3://bucket/lake", Path("/scratch/out"))
    assert (
        keywords["run"]
        == parse("train", ["groot_finetune", "--lake", "s3://x", "--out", str(tmp_path), *OVERRIDES])["run"]
    )


# --- scripts


@pytest.mark.parametrize("size", [["--on", "torchrun"], ["--on", "slurm"], ["--on", "ray"]], ids=lambda s: s[1])
@pytest.mark.parametrize("gpus", ["0", "8"])
def test_scripts_are_shell(places: list[str], size: list[str], gpus: str, tmp_path: Path) -> None:
    flags = ["--nodes", "2", "--gpus-per-node", gpus, "--head", "n1", "--interface", "eth0"]
    for text in launched(["groot_finetune", *size, *flags, *places, *OVERRIDES]).values():
        checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
        assert checked.returncode == 0 and not checked.stderr, checked.stderr
        assert ("NCCL_DEBUG" in text) == (gpus != "0" and size[1] != "ray")  # Ray's workers get it from Ray


def test_every_setting_of_the_environment_says_why(places: list[str]) -> None:
    flags = ["--on", "slurm", "--nodes", "2", "--gpus-per-node", "8", "--interface", "eth0"]
    script = launched(["groot_finetune", *flags, *places, *OVERRIDES])["job.sbatch"]
    settings = [line for line in script.splitlines() if line.startswith("export ") and "=" in line]
    assert len(settings) == 7
    assert all(len(line.partition("  # ")[2]) > 20 for line in settings)


def sbatch_options(script: str) -> dict[str, str]:
    """Option -> value, as sbatch reads the lines before the first command: blanks end a value, quotes keep it together."""
    options: dict[str, str] = {}
    for line in script.splitlines():
        if line and not line.startswith("#"):
            break
        if line.startswith("#SBATCH "):
            for word in shlex.split(line.removeprefix("#SBATCH "), comments=True):
                name, _, value = word.removeprefix("--").partition("=")
                assert word.startswith("--") and name not in options
                options[name] = value
    return options


# --- Kubernetes


def test_kubernetes_and_kuberay_take_the_manifests(kuberay: dict[str, str]) -> None:
    for name, text in kuberay.items():
        assert problems(yaml.safe_load(text)) == [], name


def test_the_rules_catch_mistakes(kuberay: dict[str, str]) -> None:
    def spoil(change) -> list[str]:
        manifest = copy.deepcopy(yaml.safe_load(kuberay["rayjob.yaml"]))
        change(manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][0])
        return problems(manifest)

    assert spoil(lambda group: group.update(minReplica=1))
    assert spoil(lambda group: group.update(replicas=9))
    assert spoil(lambda group: group["rayStartParams"].update({"num-cpus": 4}))
    assert spoil(lambda group: group["template"]["spec"].update(hostnetwork=True))
    assert spoil(lambda group: group["template"]["spec"]["volumes"][0]["emptyDir"].update(medium=1))
    assert spoil(lambda group: group["template"]["spec"]["volumes"].pop())
    assert spoil(lambda group: group["template"]["spec"]["containers"][0]["resources"]["limits"].pop("nvidia.com/gpu"))


def test_pods_have_what_training_needs(kuberay: dict[str, str]) -> None:
    cluster = yaml.safe_load(kuberay["raycluster.yaml"])["spec"]
    assert cluster == yaml.safe_load(kuberay["rayjob.yaml"])["spec"]["rayClusterSpec"]
    gpu, data = cluster["workerGroupSpecs"]
    assert [gpu[k] for k in ("replicas", "minReplicas", "maxReplicas")] == [4, 2, 4]
    assert [data[k] for k in ("replicas", "minReplicas", "maxReplicas")] == [1, 1, 6]
    pod, data_pod = gpu["template"]["spec"], data["template"]["spec"]
    limits = pod["containers"][0]["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["rdma/hca"], limits["cpu"]) == ("8", "8", "96")
    assert pod["hostNetwork"] and pod["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert pod["nodeSelector"] == {"gpu": "h200"}
    assert "nvidia.com/gpu" not in data_pod["containers"][0]["resources"]["limits"]
    assert not data_pod.get("hostNetwork")
    for each in (pod, data_pod, cluster["headGroupSpec"]["template"]["spec"]):
        memory = next(v for v in each["volumes"] if v["name"] == "shared-memory")
        assert memory["emptyDir"]["medium"] == "Memory" and memory["emptyDir"]["sizeLimit"].endswith("Gi")
        assert each["containers"][0]["envFrom"] == [{"secretRef": {"name": n}} for n in ("s3-credentials", "hub-token")]
        assert "env" not in each["containers"][0]  # secrets come by reference only


# --- refusals


BAD = [
    (["--on", "slurm", "--nodes", "2", "--gpus-per-node", "8"], "--batch.packs 16"),
    (["--on", "slurm", "--nodes", "1", "--gpus-per-node", "2", "--shard", "3"], "groups of 3"),
    (["--on", "torchrun", "--nodes", "2", "--gpus-per-node", "1"], "needs --head"),
    (["--on", "slurm", "--nodes", "1", "--gpus-per-node", "1", "--slurm.grace", "20"], "--slurm.grace is 20"),
    (["--on", "kuberay", "--nodes", "1", "--gpus-per-node", "1"], "Give --kuberay.image"),
    (["--on", "kuberay", "--nodes", "1", "--gpus-per-node", "1", "--kuberay.image", "i"], "--kuberay.volume"),
    (
        ["--on", "kuberay", "--nodes", "1", "--gpus-per-node", "1", "--kuberay.image", "i", "--kuberay.volume", "c:/scratch"],
        "would be lost with its pod",
    ),
    (["--on", "slurm", "--nodes", "0", "--gpus-per-node", "1"], "--nodes is 0"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "says"), BAD, ids=lambda v: v if isinstance(v, str) else "")
def test_what_cannot_run_is_refused_before_it_is_queued(places: list[str], flags: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        launched(["groot_finetune", *flags, *places])


def test_flags_that_no_recipe_has_are_refused(places: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--on", "slurm", "--nodes", "1", "--gpus-per-node", "1", "--stepz", "3"]
    with pytest.raises(SystemExit) as stopped:
        parse("launch", ["groot_finetune", *flags, *places])
    assert stopped.value.code == 2
    assert "--stepz" in capsys.readouterr().err


def test_files_are_written_and_the_next_command_is_told(places: list[str], tmp_path: Path, capsys) -> None:
    flags = ["--on", "slurm", "--nodes", "1", "--gpus-per-node", "2", "--write", str(tmp_path / "files")]
    assert cli.run(["launch", "groot_finetune", *flags, *places]) == 0
    assert f"sbatch {tmp_path}/files/job.sbatch" in capsys.readouterr().out
    assert (tmp_path / "files" / "job.sbatch").read_text().startswith("#!/bin/bash\n#SBATCH")
