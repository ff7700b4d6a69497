"""The command line: the table of verbs, and how their results and faults are shown.

Nothing heavy is imported before the verb is known, so that `drivetrain --help` answers at once. What a verb takes
stands in verbs.py; what it does stands in the function that the table names.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # what type checkers take for true, without the time that importing typing takes
    from collections.abc import Iterator
    from typing import IO, Any

# verb -> (the function that does the work, what it does, an example)
VERBS = {
    "record": (
        "drivetrain.evaluate.record:record",
        "scripted experts in simulation, written as a LeRobot data set",
        "drivetrain record --suite metaworld/button-press-topdown --episodes 30 --out out/dataset",
    ),
    "demo": (
        "drivetrain.demo:demo",
        "the whole path on a CPU in minutes; with --dataset, on your own LeRobot data",
        "drivetrain demo --out out/demo",
    ),
    "ingest": (
        "drivetrain.lake.ingest:ingest",
        "LeRobot v2.0, v2.1 and v3.0 data sets, from folders, buckets or the Hub, into a lake",
        "drivetrain ingest out/dataset --lake out/lake",
    ),
    "inspect": (
        "drivetrain.lake.inspect:inspect",
        "what is in a lake or data set, and what is wrong with it",
        "drivetrain inspect out/lake --sql 'select dataset, count(*) from episodes group by dataset'",
    ),
    "train": (
        "drivetrain.train.main:train",
        "train a recipe on a lake; works alone and under torchrun",
        "drivetrain train groot_finetune_tiny --lake out/lake --out out/train --steps 100 --batch.samples 64",
    ),
    "launch": (
        "drivetrain.cluster.launch:launch",
        "train on many machines: files for torchrun, Slurm, Ray or Kubernetes, or started at once",
        "drivetrain launch groot_finetune --on slurm --nodes 2 --gpus-per-node 8 --lake out/lake --out out/train "
        "--batch.packs 16",
    ),
    "evaluate": (
        "drivetrain.evaluate.main:evaluate_checkpoint",
        "success of a checkpoint in simulation",
        "drivetrain evaluate out/train --suite metaworld/button-press-topdown --episodes 20 --out out/evaluation",
    ),
    "export": (
        "drivetrain.checkpoint.export:export",
        "a checkpoint as a LeRobot policy",
        "drivetrain export out/train --out out/policy",
    ),
    "report": (
        "drivetrain.evaluate.report:report",
        "runs and their measurements on one page",
        "drivetrain report out/train --html out/report.html",
    ),
    "doctor": (
        "drivetrain.cluster.doctor:doctor",
        "is this machine or cluster fit to train; measured, with what to fix",
        "drivetrain doctor --lake out/lake --html out/doctor.html",
    ),
}


def main() -> None:
    """The entry point of the `drivetrain` command."""
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output (head, less) has gone
        import os

        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 1
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command line. Returns the exit code: 0, 1 (the work failed), 2 (bad arguments) or 130 (interrupted)."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    verb, *rest = arguments
    if verb == "--version":
        from drivetrain import __version__

        print(__version__)
        return 0
    if verb not in VERBS:
        return _unknown(verb)
    for_machine = "--json" in rest and not {"-h", "--help"} & set(rest)
    return _run(verb, rest, _machine_output() if for_machine else None)


def usage() -> str:
    """What `drivetrain --help` prints."""
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {summary}" for verb, (_, summary, _) in VERBS.items()]
    return "\n".join(
        [
            "usage: drivetrain VERB ...",
            "",
            "Trains vision-language-action robot policies on LeRobot data and measures them in simulation.",
            "",
            *lines,
            "",
            "Try:       drivetrain demo",
            "Options:   drivetrain VERB --help. With --json, one JSON object on stdout and everything else on stderr.",
            "Exit code: 0 done, 1 the work failed, 2 bad arguments. Steps are optimizer updates.",
        ]
    )


def _unknown(verb: str) -> int:
    import difflib

    close = difflib.get_close_matches(verb, VERBS, n=1)
    hint = f"Did you mean `drivetrain {close[0]}`?" if close else "Type `drivetrain --help` for the verbs."
    print(f"drivetrain: there is no verb {verb!r}. {hint}", file=sys.stderr)
    return 2


def _run(verb: str, rest: list[str], machine: IO[str] | None) -> int:
    """One verb. machine: the stream that takes the JSON object, or None to write for a person."""
    result = error = None
    try:
        result = _call(verb, rest)
        code = getattr(result, "exit_code", 0)  # a result may say by itself that the work came out badly
    except SystemExit as stopped:  # the argument parser has printed the reasons, or the help
        code = stopped.code if isinstance(stopped.code, int) else 1
        error = "bad arguments; the reasons are on stderr" if code else None
    except KeyboardInterrupt:
        code, error = 130, "interrupted"
        print("drivetrain: interrupted", file=sys.stderr)
    except BrokenPipeError:
        raise
    except Exception as fault:
        code, error = _explain(fault)

    if machine is not None:
        import json

        answer = {"error": error} if error else plain(result)
        if error or _rank() in (None, "0"):
            print(json.dumps(answer if isinstance(answer, dict) else {"result": answer}), file=machine)
        machine.close()
    elif not error and _rank() in (None, "0"):
        _print(result)
    return code


def _call(verb: str, rest: list[str]) -> Any:
    import importlib

    from drivetrain.verbs import parse

    keywords = parse(verb, rest, *VERBS[verb][1:])
    module, _, function = VERBS[verb][0].partition(":")
    return getattr(importlib.import_module(module), function)(**keywords)


def _explain(fault: Exception) -> tuple[int, str]:
    """Exit code and message of a fault: a sentence where the user can act on it, a stack trace where we must."""
    import errno

    from drivetrain.types import DrivetrainError

    message = None
    if isinstance(fault, DrivetrainError):
        message = str(fault)
    elif isinstance(fault, OSError) and fault.errno in (errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT):
        where = fault.filename or "the output"
        message = f"cannot write or read {where}: {fault.strerror}. Free the place, or give another one."
    elif isinstance(fault, ModuleNotFoundError) and not (fault.name or "drivetrain").startswith("drivetrain"):
        message = f"the package {fault.name!r} is not installed here. Type: pip install 'drivetrain'"
    if message is None:
        import traceback

        traceback.print_exc()
        return 1, f"{type(fault).__name__}: {fault}"
    rank = _rank()
    print(f"drivetrain: {f'rank {rank}: ' if rank else ''}{message}", file=sys.stderr)
    return (fault.exit_code if isinstance(fault, DrivetrainError) else 1), message


def _rank() -> str | None:
    """This process's rank under torchrun, None alone."""
    import os

    return os.environ.get("RANK")


def _machine_output() -> IO[str]:
    """The real stdout. From here on whatever else is printed, by libraries and child processes too, goes to stderr."""
    import os

    sys.stdout.flush()
    real = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return real


def plain(value: Any) -> Any:
    """`value` as JSON has it: dataclasses become objects, arrays lists, paths text, and NaN null."""
    import dataclasses
    import math

    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, range)):
        return [plain(v) for v in value]
    if tolist := getattr(value, "tolist", None):
        return plain(tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (str, int, bool, type(None))) else str(value)


def _print(result: Any) -> None:
    """A result for a person: in its own words if it has some, otherwise as `name: value` lines."""
    if result is None:
        return
    if isinstance(result, str) or type(result).__str__ is not object.__str__:
        print(result)
        return
    lines = list(_lines("", plain(result)))
    width = max((len(name) for name, _ in lines), default=0)
    for name, value in lines:
        print(f"{name:<{width}}  {value}" if name else value)


def _lines(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _lines(f"{name}.{key}" if name else key, inner)
    elif isinstance(value, list) and any(isinstance(v, (dict, list)) for v in value):
        for index, inner in enumerate(value):
            yield from _lines(f"{name}[{index}]", inner)
    else:
        yield name, value


if __name__ == "__main__":
    main()
