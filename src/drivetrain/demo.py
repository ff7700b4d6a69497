"""`drivetrain demo`: the whole path on a CPU in minutes, from demonstrations to a measured policy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from drivetrain.checkpoint.export import ExportedPolicy, export, write_policy
from drivetrain.checkpoint.folder import find
from drivetrain.evaluate.open_loop import open_loop
from drivetrain.evaluate.record import record
from drivetrain.evaluate.report import write_report
from drivetrain.evaluate.results import count_successes, success_text
from drivetrain.evaluate.rollout import evaluate
from drivetrain.lake.ingest import Progress, ingest
from drivetrain.lake.lake import open_lake
from drivetrain.lake.sources import read_source
from drivetrain.policies import make_model
from drivetrain.recipes.groot import groot_demo
from drivetrain.run import Run, read_run, to_json
from drivetrain.types import DrivetrainError

SUITE = "metaworld/button-press-topdown"
EPISODES = 30  # demonstrations, from the initial states 0..29
EVALUATION_STATES = range(30, 50)
MAX_STEPS = 150
EXECUTE = 4  # actions of a chunk that are run before the policy is asked again
HELD_OUT = 2  # episodes of the user's own data that are kept for measuring
PROCESSES = 2


@dataclass(frozen=True)
class Demo:
    """What the demo measured, and where everything is. Parts that were not measured are None.

    untrained, trained, blind: {"successes", "episodes"} in simulation, from the same initial states.
    open_loop: errors on held-out episodes of the user's own data; see evaluate/open_loop.py.
    """

    untrained: dict | None
    trained: dict | None
    blind: dict | None
    open_loop: dict | None
    seconds: float
    resumed_at_step: int
    lake: str
    checkpoint: str
    policy: str
    report: str

    def __str__(self) -> str:
        if self.open_loop:
            errors = {k: self.open_loop[k] for k in ("policy", "mean_action", "repeat_state")}
            lines = [f"  {name:<14}{value:.3f}" for name, value in errors.items() if value is not None]
            lines = [
                f"error on {self.open_loop['episodes']} held-out episodes ({self.open_loop['definition']}):",
                *lines,
            ]
            then = f"drivetrain inspect {self.lake}"
        else:
            tested = {"untrained": self.untrained, "trained": self.trained, "trained, blind": self.blind}
            lines = [f"  {name:<16}{success_text(**result)}" for name, result in tested.items() if result]
            lines = [f"success in {SUITE}, from initial states never seen in training:", *lines]
            first = EVALUATION_STATES.stop
            then = f"drivetrain evaluate {self.policy} --suite {SUITE} --first-state {first} --episodes 50 --out out/evaluation"
        files = [f"  {name:<12}{getattr(self, name)}" for name in ("report", "policy", "checkpoint", "lake")]
        done = (
            f"{self.seconds:.0f} s, of which one process was killed and the run resumed at step {self.resumed_at_step}"
        )
        return "\n".join(["", *lines, "", done, *files, "", f"next: {then}"])


def demo(out: Path, *, dataset: Path | None = None, seed: int = 0, steps: int | None = None) -> Demo:
    """Run everything into the new folder `out`.

    dataset: a LeRobot folder to train on instead of recording one; it is measured open loop on held-out episodes.
    steps:   optimizer updates; by default as many as the recipe has, which the policy needs to succeed.
    """
    run = replace(groot_demo(), steps=steps, save_every=max(1, steps // 6)) if steps else groot_demo()
    started = time.perf_counter()
    image_size = run.policy.vision.image_size
    if out.exists() and any(out.iterdir()):
        raise DrivetrainError(f"{out} is not empty. Remove it, or give another --out.")
    if dataset is not None:
        read_source(str(dataset))  # raises what is wrong with it before anything is written
    out.mkdir(parents=True, exist_ok=True)
    source = dataset
    if source is None:
        say(f"1/5 record: {EPISODES} scripted demonstrations of {SUITE}")
        source = out / "dataset"
        record(SUITE, EPISODES, source, image_size=image_size, seed=seed, progress=lambda line: say(f"  {line}"))
    say(f"2/5 ingest: {source} into a lake")
    ingest([str(source)], str(out / "lake"), image_size=image_size, ray_address="local", progress=say_ingested)

    say(f"3/5 train: {PROCESSES} processes, one of them killed half-way")
    resumed_at = train_with_a_kill(out, replace(run, seed=seed), held_out=HELD_OUT if dataset else 0)
    policy = export(out / "train", out / "policy")

    say("4/5 measure")
    measured: dict[str, dict | None] = dict.fromkeys(("untrained", "trained", "blind", "open_loop"))
    if dataset:
        measured["open_loop"] = measure_open_loop(out, policy)
    else:
        measured |= measure_in_simulation(out, policy, read_run(out / "train"))

    say("5/5 report")
    report = out / "report.html"
    result = Demo(
        **measured,
        seconds=round(time.perf_counter() - started, 1),
        resumed_at_step=resumed_at,
        lake=str(out / "lake"),
        checkpoint=str(find(out / "train")),
        policy=str(policy),
        report=str(report),
    )
    (out / "summary.json").write_text(to_json(result))
    write_report(report, out)
    return result


def train_with_a_kill(out: Path, run: Run, held_out: int) -> int:
    """Train through torchrun; SIGKILL one process half-way. Returns the step at which the run went on."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}",
        "--max-restarts=1", "-m", "drivetrain", "train", run.recipe,
        "--lake", str(out / "lake"), "--out", str(out / "train"),
        "--steps", str(run.steps), "--save-every", str(run.save_every), "--seed", str(run.seed),
        "--resume", "auto", "--mixture.held-out", str(held_out),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    log = out / "train.log"
    with log.open("w") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        resumed_at, victim = None, 0
        try:
            for line in follow(out / "train" / "metrics.jsonl", child):
                if "loss" in line:
                    say(
                        f"    step {line['step']}/{run.steps} loss {line['loss']:.3f} "
                        f"{line['samples_per_second']:.0f} samples/s data wait {line['data_wait_seconds'] * 1e3:.0f} ms"
                    )
                if line.get("event") == "started":
                    victim = line["pids"][-1]
                if line.get("event") == "resumed":
                    resumed_at = line["step"]
                    say(f"    resumed at step {resumed_at}")
                if line.get("event") == "checkpoint" and line["step"] >= run.steps // 2 and victim:
                    say(f"    kill -9 {victim}, on purpose")
                    os.kill(victim, signal.SIGKILL)
                    victim = 0
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
    if child.returncode or resumed_at is None:
        raise DrivetrainError(f"training failed; its output is in {log}:\n{log.read_text()[-2000:]}")
    return resumed_at


def follow(file: Path, child: subprocess.Popen) -> Iterator[dict]:
    """The lines of a growing JSON-lines file, until the process that writes it has ended."""
    position, rest = 0, ""
    while True:
        ended = child.poll() is not None
        if file.exists():
            with file.open() as lines:
                lines.seek(position)
                *whole, rest = (rest + lines.read()).split("\n")
                position = lines.tell()
            yield from map(json.loads, whole)
        if ended:
            return
        time.sleep(0.05)


def measure_in_simulation(out: Path, policy: Path, run: Run) -> dict:
    """Success of the untrained, the trained and the trained-but-blind policy from the same initial states."""
    trained = ExportedPolicy(policy)
    torch.manual_seed(run.seed)
    untrained_folder = write_policy(
        make_model(run.policy),
        run.policy,
        {trained.info.name: trained.info},
        out / "untrained",
        recipe=run.recipe,
        step=0,
    )
    untrained = ExportedPolicy(untrained_folder)
    measured = {}
    for name, measured_policy in {"untrained": untrained, "trained": trained, "blind": trained}.items():
        results = evaluate(
            measured_policy.act,
            SUITE,
            EVALUATION_STATES,
            max_steps=MAX_STEPS,
            execute=EXECUTE,
            image_size=trained.info.image_size,
            blind=name == "blind",
            out=out / "evaluation" / name,
            videos_per_outcome=1,
            progress=lambda line: None,
        )
        measured[name] = {"successes": count_successes(results), "episodes": len(results)}
        say(f"    {name}: {success_text(**measured[name])}")
    return measured


def measure_open_loop(out: Path, policy: Path) -> dict:
    """Error of predicted action chunks on held-out episodes, against two baselines."""
    errors = open_loop(ExportedPolicy(policy), open_lake(str(out / "lake")), held_out=HELD_OUT)
    (out / "open_loop.json").write_text(json.dumps(errors, indent=2))
    return errors


def say_ingested(progress: Progress) -> None:
    if progress.done % 10 == 0 or progress.done == progress.episodes:
        say(f"    {progress.done} of {progress.episodes} episodes, {progress.steps} steps, {progress.seconds:.0f} s")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
