"""The command line as a person and a machine meet it.

What is about time, streams or exit codes runs `drivetrain` in a process of its own; refusals run in this one, which
saves a second each.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain import cli, verbs
from drivetrain.flags import help_texts
from drivetrain.recipes import RECIPES
from drivetrain.types import PackShape, UsageError

SOURCE = Path(cli.__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "160"}
SUITE = "metaworld/button-press-topdown"


def drivetrain(*arguments: object, code: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run `drivetrain ARGUMENTS`, or `code` with them in sys.argv, in a process of its own."""
    start = ["-c", code] if code else ["-m", "drivetrain"]
    command = [sys.executable, *start, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, stdin=subprocess.DEVNULL)


@pytest.fixture
def typed(capfd: pytest.CaptureFixture[str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Like `drivetrain`, in this process."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        code = cli.run([str(a) for a in arguments])
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return run


def assert_refused(done: subprocess.CompletedProcess[str], codes: tuple[int, ...], says: str) -> None:
    """One sentence on stderr that names the culprit and says what to type; no stack trace, nothing on stdout."""
    assert done.returncode in codes, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout == ""
    assert says in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("drivetrain: "), done.stderr
    assert re.search(r"\b(Type|Give|Choose|Name|Add|Remove|Free|Did you mean|must be)\b", last), f"what to type? {last}"


# --- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("--help",), ()])
def test_help_is_fast_and_lists_every_verb(arguments: tuple[str, ...]) -> None:
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        done = drivetrain(*arguments)
        seconds.append(time.perf_counter() - started)
        assert done.returncode == 0
        assert done.stderr == ""
    assert all(f"  {verb} " in done.stdout for verb in cli.VERBS)
    assert min(seconds) < 0.5


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help_of_a_verb_shows_an_example_that_parses(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, summary, example = cli.VERBS[verb]
    done = drivetrain(verb, "--help")
    assert done.returncode == 0
    assert example in done.stdout
    if verb != "train":  # whose flags come with the recipe
        assert "--json" in done.stdout

    import shlex

    monkeypatch.chdir(tmp_path)
    for folder in ("out/dataset", "out/lake", "out/train"):
        Path(folder).mkdir(parents=True)
    program, named, *arguments = shlex.split(example)
    assert (program, named) == ("drivetrain", verb)
    assert verbs.parse(verb, arguments, summary, example)


def test_help_of_a_recipe_explains_its_settings() -> None:
    done = drivetrain("train", "groot_demo", "--help")
    assert done.returncode == 0
    default = f"default: {RECIPES['groot_demo']().steps}"
    for text in ("--batch.samples", "--optimizer.learning-rate", "optimizer updates", "--json", default):
        assert text in done.stdout
    for filled_in in ("--recipe", "--lake-version", "--run."):
        assert filled_in not in done.stdout


def test_help_into_a_closed_pipe_is_no_error() -> None:
    command = f"'{sys.executable}' -m drivetrain --help | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.stderr == ""


def test_version() -> None:
    assert drivetrain("--version").stdout.strip().count(".") == 2


# --- bad arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "says"), [("trian", "drivetrain train"), ("injest", "drivetrain ingest"), ("xyzzy", "--help")]
)
def test_unknown_verb_suggests(typed, verb: str, says: str) -> None:
    assert_refused(typed(verb), (2,), says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["record", "--suite", SUITE, "--episodes", "0", "--out", "new"], "--episodes is 0"),
        (["record", "--suite", SUITE, "--episodes", "1", "--out", "new", "--noise", "-1"], "--noise is -1.0"),
        (["ingest", "--lake", "new"], "at least one source"),
        (["ingest", "here", "--lake", "new", "--image-size", "0"], "--image-size is 0"),
        (["train"], "needs a recipe"),
        (["train", "--lake", "here", "--out", "new"], "needs a recipe"),
        (["train", "groot_dmo", "--lake", "here", "--out", "new"], "Did you mean groot_demo?"),
        (["train", "groot_demo", "--lake", "here", "--out", "new", "--steps", "0"], "--steps is 0"),
        (["train", "groot_demo", "--lake", "here", "--out", "new", "--batch.samples", "0"], "--batch.samples is 0"),
        (["evaluate", "here", "--suite", SUITE, "--episodes", "0", "--out", "new"], "--episodes is 0"),
        (["report", "--html", "new.html"], "at least one run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_values(typed, arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    assert_refused(typed(*arguments), (2,), says)
    assert os.listdir(tmp_path) == ["here"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["record", "--suite", SUITE], "--episodes"),
        (["record", "--suite", SUITE, "--episodes", "many", "--out", "new"], "many"),
        (["export", "here"], "--out"),
        (["export", "here", "--out", "new", "--wat"], "--wat"),
        (["train", "groot_demo", "--lake", "here", "--out", "new", "--optimizer.lr", "1"], "--optimizer.lr"),
        (["train", "groot_demo", "--lake", "here", "--out", "new", "--precision", "int4"], "int4"),
        (["train", "groot_demo", "--lake", "here", "--out", "new", "--resume", "maybe"], "maybe"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_arguments_that_do_not_parse(
    typed, arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    done = typed(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "--help" in done.stderr  # where to look
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert os.listdir(tmp_path) == ["here"]


MISSING = [
    ["ingest", "./missing", "--lake", "new"],
    ["ingest", "missing", "--lake", "new"],
    ["inspect", "missing"],
    ["demo", "--dataset", "missing", "--out", "new"],
    ["train", "groot_demo", "--lake", "missing", "--out", "new"],
    ["evaluate", "missing", "--suite", SUITE, "--episodes", "1", "--out", "new"],
    ["export", "missing", "--out", "new"],
    ["report", "missing", "--html", "new.html"],
]


@pytest.mark.parametrize("arguments", MISSING, ids=" ".join)
def test_missing_folder(typed, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(typed(*arguments), (2,), "missing does not exist")
    assert os.listdir(tmp_path) == []


UNWRITABLE = [  # `file/new` cannot be written because `file` is a file: true for every user, root too
    (["record", "--suite", SUITE, "--episodes", "1", "--out", "file/new"], "--out file/new"),
    (["demo", "--out", "file/new"], "--out file/new"),
    (["ingest", "./here", "--lake", "file/new"], "--lake file/new"),
    (["inspect", "here", "--html", "file/new.html"], "--html file/new.html"),
    (["train", "groot_demo", "--lake", "here", "--out", "file/new"], "--out file/new"),
    (["evaluate", "here", "--suite", SUITE, "--episodes", "1", "--out", "file/new"], "--out file/new"),
    (["export", "here", "--out", "file/new"], "--out file/new"),
    (["export", "here", "--out", "file"], "--out file"),
    (["report", "here", "--html", "file/new.html"], "--html file/new.html"),
    (["report", "here", "--html", "here"], "--html here"),
]


@pytest.mark.parametrize(("arguments", "says"), UNWRITABLE, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_unwritable_output(
    typed, arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    Path("file").write_text("x")
    assert_refused(typed(*arguments), (2,), says)
    assert sorted(os.listdir(tmp_path)) == ["file", "here"]
    assert Path("file").read_text() == "x"
    assert os.listdir("here") == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_output_without_permission(typed, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        assert_refused(typed("demo", "--out", tmp_path / "new"), (2,), "no permission")
    finally:
        tmp_path.chmod(0o700)


# --- the verbs' own refusals: these import the rooms ------------------------------------------------------------------


WRONG_KIND = [  # a folder that exists and is not what the verb takes
    ["ingest", "./here", "--lake", "new"],
    ["inspect", "here"],
    ["demo", "--dataset", "here", "--out", "new"],
    ["train", "groot_demo", "--lake", "here", "--out", "new"],
    ["evaluate", "here", "--suite", SUITE, "--episodes", "1", "--out", "new"],
    ["export", "here", "--out", "new"],
    ["report", "here", "--html", "new.html"],
]


@pytest.mark.parametrize("arguments", WRONG_KIND, ids=" ".join)
def test_folder_of_the_wrong_kind(typed, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    Path("here/readme.txt").write_text("not a data set, nor a run")
    assert_refused(typed(*arguments), (1, 2), "here")
    assert os.listdir("here") == ["readme.txt"]
    left = [p for p in tmp_path.rglob("*") if p.is_file() and p.name != "readme.txt"]
    assert not left, f"half-written files are left behind: {left}"


def test_unknown_suite(typed, tmp_path: Path) -> None:
    done = typed("record", "--suite", "metaworld/no-such-task", "--episodes", 1, "--out", tmp_path / "new")
    assert_refused(done, (1, 2), "no-such-task")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_holds_a_run_is_not_overwritten(typed, tmp_path: Path) -> None:
    (tmp_path / "lake").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text("{}")
    done = typed("train", "groot_demo", "--lake", tmp_path / "lake", "--out", tmp_path / "out")
    assert_refused(done, (1, 2), "--resume auto")
    assert (tmp_path / "out" / "run.json").read_text() == "{}"
    assert os.listdir(tmp_path / "out") == ["run.json"]


@pytest.mark.parametrize("verb", cli.VERBS)
def test_the_function_takes_what_the_verb_gives(verb: str) -> None:
    module, _, name = cli.VERBS[verb][0].partition(":")
    function = getattr(importlib.import_module(module), name)
    given = dict.fromkeys(f.name for f in dataclasses.fields(verbs.ARGUMENTS[verb]))
    bound = inspect.signature(function).bind(**given)  # raises TypeError if a name is missing or too many
    for f in dataclasses.fields(verbs.ARGUMENTS[verb]):
        default = bound.signature.parameters[f.name].default
        if default is not inspect.Parameter.empty and f.default is not dataclasses.MISSING:
            assert f.default == default, f"--{f.name} says {f.default!r} and {name} says {default!r}"


# --- train's flags are the recipe's Run -------------------------------------------------------------------------------


def parse_train(tmp_path: Path, recipe: str, *flags: str):
    lake = tmp_path / "lake"
    lake.mkdir(exist_ok=True)
    arguments = [recipe, "--lake", str(lake), "--out", str(tmp_path / "out"), *flags]
    return verbs.parse("train", arguments, "summary", "example")["run"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_without_overrides_is_the_recipe(recipe: str, tmp_path: Path) -> None:
    assert parse_train(tmp_path, recipe) == RECIPES[recipe]()


def test_overrides_change_what_they_name_and_nothing_else(tmp_path: Path) -> None:
    flags = "--steps 7 --batch.samples 4 --optimizer.learning-rate 1e-3 --policy.no-tune-llm --policy.vision.layers 5"
    run = parse_train(tmp_path, "groot_demo", *flags.split(), "--mixture.weights", "a", "1", "b", "3")
    recipe = RECIPES["groot_demo"]()
    expected = dataclasses.replace(
        recipe,
        steps=7,
        batch=dataclasses.replace(recipe.batch, samples=4),
        optimizer=dataclasses.replace(recipe.optimizer, learning_rate=1e-3),
        mixture=dataclasses.replace(recipe.mixture, weights={"a": 1.0, "b": 3.0}),
        policy=dataclasses.replace(
            recipe.policy, tune_llm=False, vision=dataclasses.replace(recipe.policy.vision, layers=5)
        ),
    )
    assert run == expected
    assert type(run) is type(recipe)
    assert type(run.policy.vision) is type(recipe.policy.vision)


def test_an_optional_dataclass_is_given_as_its_numbers(tmp_path: Path) -> None:
    run = parse_train(tmp_path, "groot_demo", "--batch.shape", "4096", "32", "16")
    assert run.batch.shape == PackShape(tokens=4096, samples=32, images=16)


def test_help_texts_come_from_docstrings() -> None:
    @dataclasses.dataclass
    class House:
        """A house.

        rooms, doors: how many.   roof: what it is
                      made of.
        has_*: comforts.
        """

        rooms: int
        doors: int
        roof: str
        has_garden: bool
        has_cellar: bool

    assert help_texts(House) == {
        "rooms": "how many.",
        "doors": "how many.",
        "roof": "what it is made of.",
        "has_garden": "comforts.",
        "has_cellar": "comforts.",
    }


def test_a_source_is_a_folder_or_an_address(tmp_path: Path) -> None:
    for source in ("hf://datasets/lerobot/pusht", "s3://bucket/sets", str(tmp_path), f"mine={tmp_path}"):
        assert verbs.parse("ingest", [source, "--lake", str(tmp_path / "lake")], "s", "e")["sources"] == [source]
    for source in ("lerobot/pusht", str(tmp_path / "no"), f"mine={tmp_path / 'no'}", "word"):
        with pytest.raises(UsageError, match="does not exist"):
            verbs.parse("ingest", [source, "--lake", str(tmp_path / "lake")], "s", "e")


# --- results and faults: a small verb of our own behind the real command line -----------------------------------------

WORK = """
import os, signal, sys, types
import numpy as np
from drivetrain import cli
from drivetrain.types import DrivetrainError, UsageError

def work(checkpoint, out):
    print("printed by python")
    os.write(1, b"printed by a library\\n")
    os.system("echo printed by a child")
    match str(out):
        case "fine":
            return {"successes": np.int64(3), "path": out, "losses": np.array([1.5, float("nan")])}
        case "fault":
            raise DrivetrainError("episode 3 has no frames. Type: drivetrain inspect.")
        case "usage":
            raise UsageError("there is no camera 'up'. Choose front.")
        case "bug":
            raise KeyError("oops")
        case "full":
            raise OSError(28, "No space left on device", "out/file")
        case "package":
            import nowhere_to_be_found
        case "interrupt":
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
            os.kill(os.getpid(), signal.SIGINT)

module = types.ModuleType("work")
module.work = work
sys.modules["work"] = module
cli.VERBS["export"] = ("work:work", "summary", "example")
cli.main()
"""


@pytest.mark.parametrize(
    ("case", "code", "says", "trace"),
    [
        ("fine", 0, "", False),
        ("fault", 1, "episode 3 has no frames", False),
        ("usage", 2, "there is no camera", False),
        ("bug", 1, "KeyError", True),
        ("full", 1, "out/file", False),
        ("package", 1, "nowhere_to_be_found", False),
        ("interrupt", 130, "interrupted", False),
    ],
)
def test_exit_code_and_output(case: str, code: int, says: str, trace: bool, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for_people = drivetrain("export", tmp_path, "--out", case, code=WORK)
    for_machines = drivetrain("export", tmp_path, "--out", case, "--json", code=WORK)
    for done in (for_people, for_machines):
        assert done.returncode == code
        assert says in done.stderr
        assert ("Traceback" in done.stderr) == trace
    assert "printed by a library" in for_people.stdout

    answer = json.loads(for_machines.stdout)  # one object and nothing else
    for line in ("printed by python", "printed by a library", "printed by a child"):
        assert line in for_machines.stderr
    if code:
        assert says in answer["error"]
    else:
        assert answer == {"successes": 3, "path": "fine", "losses": [1.5, None]}
        assert "successes  3" in for_people.stdout


def test_bad_arguments_are_one_object_too() -> None:
    for arguments in (["export", "--json"], ["inspect", "missing-folder", "--json"], ["train", "nothing", "--json"]):
        done = drivetrain(*arguments)
        assert done.returncode == 2
        assert json.loads(done.stdout)["error"]
        assert done.stderr


def test_under_torchrun_one_process_prints_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "RANK", "1")
    assert "successes" not in drivetrain("export", tmp_path, "--out", "fine", code=WORK).stdout
    assert "rank 1: episode 3" in drivetrain("export", tmp_path, "--out", "fault", code=WORK).stderr
