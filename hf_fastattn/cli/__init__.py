"""The command line: hf-fastattn backends | generate | explain | warm | eval | bench | lm_eval."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from hf_fastattn_cli import BENCHES, program

from . import commands, generate, handed_over, warm
from .handed_over import load_benchmark

__all__ = ["BENCHES", "load_benchmark", "main"]

PACKAGE = Path(__file__).parent.parent
OWN = (PACKAGE, PACKAGE.parent / "benchmarks")  # folders with code of this project
HANDED_OVER = {"bench": handed_over.bench, "lm_eval": handed_over.lm_eval}
NO_MEMORY = ("DefaultCPUAllocator", "Storage size calculation overflowed")  # torch's RuntimeErrors for too many bytes on the CPU
Command = Callable[..., int | None]


# These two are used only for --help: other arguments are parsed by the called program.
def _bench(name: Annotated[str, typer.Argument(metavar="NAME [OPTIONS]", help=f"one of {', '.join(BENCHES)}")]) -> None:
    pass


def _lm_eval(arguments: Annotated[str, typer.Argument(metavar="ARGUMENTS", help="of lm-eval, for example run --help")]) -> None:
    pass


# name: (function, end of the help)
COMMANDS: dict[str, tuple[Command, str | None]] = {
    "backends": (commands.backends, None),
    "generate": (generate.generate, None),
    "explain": (commands.explain, None),
    "warm": (warm.warm_, None),
    "eval": (commands.eval_, commands.EPILOG),
    "bench": (_bench, None),
    "lm_eval": (_lm_eval, None),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 for success, 1 if a comparison found a difference, 2 for an error in the request, 3 if one could
    not be judged."""
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    command, show = arguments[0], False
    run: Command
    if command in HANDED_OVER and arguments[1:] not in (["-h"], ["--help"]):
        run = functools.partial(HANDED_OVER[command], arguments[1:])
    else:
        command, run, show = _parse(arguments)
    try:
        return run() or 0
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except Exception as error:
        if show or not _is_refusal(error):
            raise
        print(f"hf-fastattn {command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _parse(arguments: list[str]) -> tuple[str, Command, bool]:
    """(command, its function with arguments, whether to show tracebacks). Raises SystemExit for help and for wrong arguments.
    The command runs outside of Typer, which would catch its exceptions."""
    asked: list[tuple[str, Command, bool]] = []

    def note(name: str, run: Command, *, traceback: bool = False, **options: Any) -> None:
        asked.append((name, functools.partial(run, **options), traceback))

    def noting(name: str, run: Command) -> Command:
        return functools.update_wrapper(functools.partial(note, name, run), run)  # with the parameters of `run`

    app = program({name: (noting(name, run), epilog) for name, (run, epilog) in COMMANDS.items()})
    try:
        typer.main.get_command(app).main(arguments, prog_name="hf-fastattn")
    except SystemExit:
        if not asked:
            raise
    return asked[0]


def _is_refusal(error: Exception) -> bool:
    """Whether an error reports a wrong request, as one that code of this package raises with `raise`. One that Python or torch
    raises in it is a fault, whose traceback is shown."""
    no_memory = isinstance(error, RuntimeError) and any(its in str(error) for its in NO_MEMORY)
    if no_memory or isinstance(error, (ImportError, OSError, MemoryError, torch.OutOfMemoryError)):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    if any(Path(last.filename).is_relative_to(folder) for folder in OWN):
        return (last.line or "").startswith("raise")
    return isinstance(error, ValueError)
