"""The rules of the house that no single room can hold: sizes, imports, and what must not stand in a tracked file."""

from __future__ import annotations

import ast
import fnmatch
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "drivetrain"
MODULES = sorted(SOURCE.rglob("*.py"))

LONGEST = 450
HEAVY = {"lerobot", "ray", "lance", "lance_ray", "transformers", "metaworld", "mujoco", "duckdb", "pyarrow"}

# These rooms run on a bare GPU image. What they may import beyond that stands here by name.
BARE = ["policies/**", "parallel/**", "train/**", "data/plan*", "data/pack*", "run.py", "types.py"]
ALLOWED = {"drivetrain", "torch", "numpy", "safetensors"}
EXCEPTIONS = {
    "policies/*/lerobot.py": {"lerobot"},
    "data/image.py": {"PIL"},
    "policies/__init__.py": {"huggingface_hub"},
    "policies/*/prompt.py": {"transformers", "tokenizers"},
}


def name_of(file: Path) -> str:
    return file.relative_to(SOURCE).as_posix()


def bare_modules() -> list[Path]:
    return [f for f in MODULES if any(fnmatch.fnmatch(name_of(f), pattern) for pattern in BARE)]


def imports_of(file: Path) -> set[str]:
    """Top-level packages that `file` imports anywhere, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def loaded_by(statements: str) -> set[str]:
    """The top-level packages that a fresh interpreter holds after running `statements`."""
    code = f"import sys\n{statements}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout, so no file is tracked")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_source_file_is_too_long() -> None:
    long = {name_of(f): n for f in MODULES if (n := len(f.read_text().splitlines())) > LONGEST}
    assert not long, f"split these files; {LONGEST} lines are the most: {long}"


@pytest.mark.parametrize("file", bare_modules(), ids=name_of)
def test_bare_rooms_import_only_torch_numpy_and_safetensors(file: Path) -> None:
    allowed = ALLOWED | set(sys.stdlib_module_names)
    for pattern, extra in EXCEPTIONS.items():
        if fnmatch.fnmatch(name_of(file), pattern):
            allowed = allowed | extra
    assert imports_of(file) <= allowed, f"{name_of(file)} imports {sorted(imports_of(file) - allowed)}"


def test_every_bare_room_is_checked() -> None:
    checked = {name_of(f).partition("/")[0] for f in bare_modules()}
    assert {"policies", "parallel", "train", "data", "run.py", "types.py"} <= checked


def test_command_line_loads_nothing_heavy() -> None:
    loaded = loaded_by("import drivetrain.cli")
    assert not loaded & (HEAVY | {"torch", "numpy", "tyro"})


def test_arguments_load_nothing_heavy() -> None:
    loaded = loaded_by("import drivetrain.verbs, drivetrain.recipes, drivetrain.types")
    assert not loaded & (HEAVY | {"torch"})


def test_bare_rooms_load_nothing_heavy() -> None:
    """Not even through another room: what the list of imports above cannot see."""
    modules = [name_of(f) for f in bare_modules() if not name_of(f).endswith("/lerobot.py")]
    names = ["drivetrain." + name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in modules]
    loaded = loaded_by("\n".join(f"import {name}" for name in names))
    assert "torch" in loaded
    assert not loaded & HEAVY, f"importing the bare rooms loads {sorted(loaded & HEAVY)}"


def test_the_tour_names_files_that_exist() -> None:
    named = set(re.findall(r"`([a-z_0-9/]+\.py)`", (ROOT / "docs" / "tour.md").read_text()))
    assert len(named) > 20
    missing = sorted(name for name in named if not any((base / name).is_file() for base in (SOURCE, ROOT)))
    assert not missing, f"docs/tour.md names files that do not exist: {missing}"


# Written in parts, so that this file does not hold what it forbids.
FORBIDDEN = {
    "an absolute path of one machine": r"(?:^|[\s\"'`=(:,])/(?:root|work|home|Users)/[\w.]",
    "a host of a package registry": "|".join(
        re.escape(".".join(parts))
        for parts in (
            ("pypi", "org"),
            ("files", "pythonhosted", "org"),
            ("registry", "npmjs", "org"),
            ("deb", "debian", "org"),
            ("download", "pytorch", "org"),
            ("archive", "ubuntu", "com"),
        )
    ),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_tracked_file_holds(what: str) -> None:
    pattern, found = re.compile(FORBIDDEN[what], re.MULTILINE), []
    for file in tracked_files():
        try:
            text = file.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{file.relative_to(ROOT)}: {match.group().strip()}" for match in pattern.finditer(text)]
    assert not found, f"{what}: {found[:5]}"


def test_forbidden_patterns_find_what_they_forbid() -> None:
    path, host = FORBIDDEN.values()
    assert re.search(path, 'open("/' + 'home/me/data")', re.MULTILINE)
    assert not re.search(path, "see docs/home/page and src/work/x", re.MULTILINE)
    assert re.search(host, "https://pypi" + ".org/simple")


def test_second_setup_does_nothing_and_is_fast() -> None:
    if not (ROOT / ".venv" / "setup-stamp").is_file():
        pytest.skip("this checkout was not set up by make: there is no .venv/setup-stamp")
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        done = subprocess.run(
            [str(ROOT / "scripts" / "setup.sh")], capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        seconds.append(time.perf_counter() - started)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert min(seconds) < 0.3
