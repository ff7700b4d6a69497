"""What each verb takes: one frozen dataclass a verb, whose fields are the arguments of the function in cli.VERBS."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import sys
import time
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from drivetrain.cluster.launch import Kuberay, Ray, Slurm
from drivetrain.flags import as_run, mirror
from drivetrain.types import UsageError

if TYPE_CHECKING:  # only `train` needs it, and it brings numpy
    from drivetrain.run import Run


@dataclass(frozen=True, kw_only=True)
class Record:
    suite: str
    """Simulator and task, as in metaworld/button-press-topdown."""
    episodes: int
    """Demonstrations to record."""
    out: Path
    """New folder for the data set."""
    first_state: int = 0
    """Index of the initial state of the first episode; each next episode takes the next one."""
    image_size: int = 96
    """Height and width of the recorded images, in pixels."""
    noise: float = 0.7
    """Standard deviation of the noise on the executed motion, as a share of an action's largest value."""
    max_steps: int = 250
    """Steps after which an episode without success is given up."""
    seed: int = 0
    """Seed of the noise."""
    workers: int = 2
    """Processes that simulate side by side."""

    def check(self) -> None:
        at_least(1, episodes=self.episodes, image_size=self.image_size, max_steps=self.max_steps, workers=self.workers)
        at_least(0, first_state=self.first_state, noise=self.noise)
        writable_folder("--out", self.out)


@dataclass(frozen=True, kw_only=True)
class Demo:
    out: Path = Path("out/demo")
    """New folder for everything the demo makes."""
    dataset: Path | None = None
    """Your own LeRobot data set, instead of demonstrations recorded in simulation."""
    seed: int = 0
    """Seed of recording, training and evaluation."""
    steps: int | None = None
    """Optimizer updates; by default as many as the policy needs to succeed."""

    def check(self) -> None:
        at_least(6, steps=6 if self.steps is None else self.steps)
        if self.dataset is not None:
            existing_folder("--dataset", self.dataset, "a LeRobot data set")
        writable_folder("--out", self.out)


@dataclass(frozen=True, kw_only=True)
class Ingest:
    sources: tyro.conf.Positional[Annotated[list[str], tyro.conf.arg(metavar="SOURCE...")]]
    """LeRobot data sets: folders, s3:// prefixes or hf://datasets/owner/name; NAME=SOURCE names one in the lake."""
    lake: str
    """Folder or s3:// prefix of the lake; made if it does not exist."""
    image_size: int = 224
    """Height and width at which images are stored, in pixels; the aspect is kept by padding."""
    strict: bool = False
    """Stop at the first bad episode, instead of setting it aside in `quarantine`."""
    ray_address: str | None = None
    """Ray cluster to work on; without it, this machine."""

    def check(self) -> None:
        if not self.sources:
            raise UsageError("ingest needs at least one source. Name a folder, a hub id or an s3:// prefix.")
        at_least(1, image_size=self.image_size)
        for source in self.sources:
            path = re.sub(r"^[^/:=]+=", "", source)
            if "://" not in path:
                on_hub = f" (on the Hub: hf://datasets/{path})" if re.fullmatch(r"\w[\w.-]*/[\w.-]+", path) else ""
                existing_folder("the source", Path(path), f"a LeRobot data set{on_hub}")
        if "://" not in self.lake:
            writable_folder("--lake", Path(self.lake))


@dataclass(frozen=True, kw_only=True)
class Inspect:
    target: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="LAKE|DATASET")]]
    """A lake, or a LeRobot data set."""
    sql: str | None = None
    """A question over the tables `datasets`, `episodes`, `steps` and `quarantine`."""
    html: Path | None = None
    """Write a page with pictures to this file."""

    def check(self) -> None:
        if "://" not in self.target:
            existing_folder("the target", Path(self.target), "a lake or a LeRobot data set")
        if self.html is not None:
            writable_file("--html", self.html)


@dataclass(frozen=True, kw_only=True)
class Train:
    lake: str = ""
    """Folder or s3:// prefix of the lake that `drivetrain ingest` wrote."""
    out: Path = Path()
    """Folder of the run: run.json, metrics.jsonl, checkpoints."""
    resume: Literal["auto", "changed", "never"] = "never"
    """auto: go on from the newest whole checkpoint in --out; changed: also with settings that bend the run; never: refuse
    a folder that already holds a run."""
    dry_run: bool = False
    """Train nothing: one step of one of --gpus ranks in shapes alone, and what it takes. Needs no --lake and no --out."""
    gpus: int = 1
    """With --dry-run: how many GPUs."""
    rank: int = 0
    """With --dry-run: which of them, counted from 0."""
    cameras: int = 2
    """With --dry-run: images of a sample."""
    run: Any  # the Run: a recipe with its overrides; `_with_overrides` makes the flags

    def check(self) -> None:
        at_least(1, steps=self.run.steps, save_every=self.run.save_every, log_every=self.run.log_every)
        at_least(1, **{"batch.samples": self.run.batch.samples, "batch.packs": self.run.batch.packs})
        at_least(1, gpus=self.gpus, cameras=self.cameras)
        if self.dry_run:
            return
        if not self.lake or self.out == Path():
            raise UsageError("train needs --lake and --out. Without them only --dry-run works.")
        if "://" not in self.lake:
            existing_folder("--lake", Path(self.lake), "a lake; `drivetrain ingest` makes one")
        writable_folder("--out", self.out)


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    checkpoint: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="CHECKPOINT")]]
    """Folder of a run, of one of its checkpoints, or of an exported policy."""
    suite: str
    """Simulator and task, as in metaworld/button-press-topdown."""
    episodes: int
    """Episodes to run, each from its own initial state."""
    first_state: int = 0
    """Index of the first initial state; choose it beyond the states that were recorded for training."""
    out: Path = Path("out/evaluation")
    """Folder for results and films."""
    dataset: str | None = None
    """Which of the data sets it was trained on has this robot; may be left out where there is only one."""
    blind: bool = False
    """Show the policy black images: what it does without seeing is the floor to beat."""

    def check(self) -> None:
        at_least(1, episodes=self.episodes)
        at_least(0, first_state=self.first_state)
        existing_folder("the checkpoint", self.checkpoint, "a run, a checkpoint or an exported policy")
        writable_folder("--out", self.out)


@dataclass(frozen=True, kw_only=True)
class Export:
    checkpoint: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="CHECKPOINT")]]
    """Folder of a run (its newest checkpoint is taken) or of one of its checkpoints."""
    out: Path
    """New folder for the policy."""

    def check(self) -> None:
        existing_folder("the checkpoint", self.checkpoint, "a run or a checkpoint")
        writable_folder("--out", self.out)


@dataclass(frozen=True, kw_only=True)
class Report:
    runs: tyro.conf.Positional[Annotated[list[Path], tyro.conf.arg(metavar="RUN...")]]
    """Folders of runs, evaluations or demos."""
    html: Path
    """The page to write."""

    def check(self) -> None:
        if not self.runs:
            raise UsageError("report needs at least one run. Name the folder that --out named.")
        for run in self.runs:
            existing_folder("the run", run, "what --out named")
        writable_file("--html", self.html)


@dataclass(frozen=True, kw_only=True)
class Doctor:
    lake: str | None = None
    """A lake to read from, the way training reads it."""
    out: Path = Path("out/doctor")
    """Folder on the disk that checkpoints will go to; written to and cleared again."""
    html: Path | None = None
    """Write a page with heat maps of the links to this file."""

    def check(self) -> None:
        if self.lake is not None and "://" not in self.lake:
            existing_folder("--lake", Path(self.lake), "a lake; `drivetrain ingest` makes one")
        writable_folder("--out", self.out)
        if self.html is not None:
            writable_file("--html", self.html)


@dataclass(frozen=True, kw_only=True)
class Launch:
    recipe: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RECIPE")]]
    """What to train. Every flag of `drivetrain train RECIPE` may follow, and is passed on: --steps 5000."""
    on: Literal["torchrun", "slurm", "ray", "kuberay"]
    """What starts the processes."""
    nodes: int
    """Machines."""
    gpus_per_node: int
    """GPUs of each, with one process per GPU; 0: one process per machine, on its CPU."""
    lake: str
    """Folder or s3:// prefix of the lake, as the machines see it."""
    out: Path
    """Folder of the run, on storage that the machines share."""
    write: Path | None = None
    """Write the files to this folder, instead of printing them."""
    start: Annotated[bool, tyro.conf.arg(name="run")] = False
    """Start it: sbatch, kubectl apply, torchrun on this node, or Ray Train from this machine."""
    cpus_per_node: int = 0
    """CPU cores to ask for on each machine; 0: Slurm gives whole machines, the others no promise."""
    restarts: int = 3
    """Failures of processes to survive before the launcher gives up."""
    interface: str = ""
    """Network interface through which processes find each other, as in eth0; only where the first one is wrong."""
    head: str = ""
    """torchrun on several nodes: name, or name:port, of the node where they meet."""
    slurm: Slurm = field(default_factory=Slurm)
    ray: Ray = field(default_factory=Ray)
    kuberay: Kuberay = field(default_factory=Kuberay)
    overrides: tyro.conf.Suppress[tyro.conf.Fixed[tuple[str, ...]]] = ()
    run: tyro.conf.Suppress[tyro.conf.Fixed[Any]] = None

    def check(self) -> None:
        at_least(1, nodes=self.nodes)
        at_least(0, gpus_per_node=self.gpus_per_node, cpus_per_node=self.cpus_per_node, restarts=self.restarts)
        if self.on != "kuberay":  # whose pods see other folders than this machine does
            if "://" not in self.lake:
                existing_folder("--lake", Path(self.lake), "a lake; `drivetrain ingest` makes one")
            writable_folder("--out", self.out)
        if self.write is not None:
            writable_folder("--write", self.write)


ARGUMENTS: dict[str, type] = {
    kind.__name__.lower(): kind
    for kind in (Record, Demo, Ingest, Inspect, Train, Evaluate, Export, Report, Doctor, Launch)
}


JSON_HELP = "Print one JSON object on stdout, and everything else on stderr."
ONE_WAY = (tyro.conf.FlagCreatePairsOff,)  # --strict needs no --no-strict; the flags of a recipe may be on, and need it


def parse(verb: str, arguments: list[str], summary: str, example: str) -> dict[str, Any]:
    """The keyword arguments of the verb's function. Raises UsageError, or SystemExit once the parser has spoken."""
    kind: type = ARGUMENTS[verb]
    program, recipe = f"drivetrain {verb}", None
    if kind is Train:
        recipe, arguments = _recipe(verb, arguments, summary, example)
        program = f"{program} {recipe.recipe}"
        kind = _with_overrides(recipe)
    kind = dataclasses.make_dataclass(
        kind.__name__, [("json", Annotated[bool, *ONE_WAY, tyro.conf.arg(help=JSON_HELP)], field(default=False))],
        bases=(kind,), frozen=True, kw_only=True,
    )  # fmt: skip
    description = f"{summary[0].upper()}{summary[1:]}.\n\nExample:\n  {example}"
    if recipe:
        description += "\n\nSteps are optimizer updates. Every field of the run can be changed:"
    if issubclass(kind, Launch):
        return _parse_launch(kind, arguments, description)
    parsed = tyro.cli(kind, prog=program, description=description, args=arguments, config=() if recipe else ONE_WAY)
    keywords = {f.name: getattr(parsed, f.name) for f in dataclasses.fields(ARGUMENTS[verb])}
    if recipe:
        keywords["run"] = as_run(recipe, keywords["run"])
    ARGUMENTS[verb](**keywords).check()
    if verb == "ingest":
        keywords["progress"] = progress_line()
    return keywords


def _parse_launch(kind: type, arguments: list[str], description: str) -> dict[str, Any]:
    """The keyword arguments of `launch`. Flags that are not its own must be flags of the recipe."""
    parsed, others = tyro.cli(
        kind,
        prog="drivetrain launch",
        description=description,
        args=arguments,
        config=ONE_WAY,
        return_unknown_args=True,
    )
    keywords = {f.name: getattr(parsed, f.name) for f in dataclasses.fields(Launch)}
    recipe, _ = _recipe("launch", [parsed.recipe], "", "")
    flags = mirror(recipe)
    keywords["run"] = as_run(recipe, tyro.cli(flags, prog=f"drivetrain launch {parsed.recipe}", args=others))
    keywords["overrides"] = tuple(others)
    Launch(**keywords).check()
    return keywords


def progress_line(interval: float = 10.0) -> Callable[[Any], None]:
    """What shows an ingest's `Progress` on stderr: a live line on a terminal, one plain line per interval otherwise."""
    live, due = sys.stderr.isatty(), 0.0

    def show(progress: Any) -> None:
        nonlocal due
        finished = progress.done == progress.episodes
        if time.monotonic() < due and not finished:
            return
        due = time.monotonic() + (0.1 if live else interval)
        rate = progress.steps / max(progress.seconds, 1e-9)
        text = f"{progress.dataset}: {progress.done} of {progress.episodes} episodes, {rate:.0f} steps/s"
        start, end = ("\r\033[K", "\n" if finished else "") if live else ("", "\n")
        print(f"{start}{text}", end=end, file=sys.stderr, flush=True)

    return show


# --- train: the fields of a recipe's Run as flags ---------------------------------------------------------------------


def _recipe(verb: str, arguments: list[str], summary: str, example: str) -> tuple[Run, list[str]]:
    """The recipe that the first argument names, and the other arguments."""
    from drivetrain.recipes import RECIPES

    first = arguments[0] if arguments else ""
    if first in RECIPES:
        return RECIPES[first](), arguments[1:]
    width = max(map(len, RECIPES))
    lines = [f"  {n:<{width}}  {(f.__doc__ or '').strip().splitlines()[0]}" for n, f in RECIPES.items()]
    if first in ("-h", "--help"):
        print(f"usage: drivetrain train RECIPE --lake URI --out DIR [--resume auto] [overrides]\n\n{summary}\n")
        print("\n".join(["Recipes:", *lines, "", "Example:", f"  {example}"]))
        print("\nAll settings of a recipe: drivetrain train RECIPE --help. Steps are optimizer updates.")
        raise SystemExit(0)
    if first.startswith("-") or not first:
        raise UsageError(f"{verb} needs a recipe before all flags. Choose one of: {', '.join(RECIPES)}.")
    close = difflib.get_close_matches(first, RECIPES, n=1)
    hint = f"Did you mean {close[0]}?" if close else f"Choose one of: {', '.join(RECIPES)}."
    raise UsageError(f"there is no recipe {first!r}. {hint}")


def _with_overrides(recipe: Run) -> type:
    """`Train` with the fields of `recipe` as flags (`--batch.samples`), and its values as their defaults."""
    flags = Annotated[mirror(recipe), tyro.conf.arg(name="")]
    default = field(default_factory=lambda: typing.get_args(flags)[0]())
    return dataclasses.make_dataclass("Train", [("run", flags, default)], bases=(Train,), frozen=True, kw_only=True)


# --- checks that cost nothing, before anything is imported or written -------------------------------------------------


def at_least(least: int, **numbers: float) -> None:
    for name, number in numbers.items():
        if number < least:
            raise UsageError(f"--{name.replace('_', '-')} is {number}, and must be at least {least}.")


def existing_folder(what: str, path: Path, of: str) -> None:
    if not path.expanduser().is_dir():
        problem = "is not a folder" if path.exists() else "does not exist"
        raise UsageError(f"{what} {path} {problem}. Give the folder of {of}.")


def writable_folder(flag: str, path: Path) -> None:
    _writable(flag, path, path.absolute())
    if path.exists() and not path.is_dir():
        raise UsageError(f"{flag} {path} is a file. Give a folder.")


def writable_file(flag: str, path: Path) -> None:
    _writable(flag, path, path.absolute().parent)
    if path.is_dir():
        raise UsageError(f"{flag} {path} is a folder. Give a file name.")


def _writable(flag: str, path: Path, folder: Path) -> None:
    """The nearest folder that exists must be one that we may write to; nothing is created to find out."""
    nearest = next(p for p in (folder, *folder.parents) if os.path.lexists(p))
    if not nearest.is_dir():
        raise UsageError(f"{flag} {path} cannot be written: {nearest} is a file. Give another {flag}.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UsageError(f"{flag} {path} cannot be written: no permission in {nearest}. Give another {flag}.")
