"""The program hf-fastattn: backends | generate | explain | warm | eval | bench | lm_eval.

It is outside the package, whose import takes seconds, and imports from it when a command runs: help, the version and options that
cannot be parsed need neither torch nor Transformers.
"""

from __future__ import annotations

import functools
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from . import commands, generate, handed_over, warm
from .handed_over import BENCHES, load_benchmark
from .refusals import as_options, corrected

__all__ = ["BENCHES", "load_benchmark", "main"]

ABOUT = "Exact attention kernels inside Hugging Face Transformers: the backends, what runs, and comparisons of results."
ROOT = Path(__file__).parent.parent
OWN = (Path(__file__).parent, ROOT / "hf_fastattn", ROOT / "benchmarks")  # folders with code of this project
HANDED_OVER = {"bench": handed_over.bench, "lm_eval": handed_over.lm_eval}
NO_MEMORY = ("DefaultCPUAllocator", "Storage size calculation overflowed")  # torch's RuntimeErrors for too many bytes on the CPU
HELP = {"help_option_names": ["-h", "--help"]}
Command = Callable[..., int | None]

# name: (function, its help, the end of the help)
COMMANDS: dict[str, tuple[Command, str, str | None]] = {
    "backends": (commands.backends, "list the backends and whether each can run here", None),
    "generate": (generate.generate, "generate text with a backend, and compare it with another", None),
    "explain": (commands.explain, "which kernels run for a model and why, the least cost of a token, when memory is full", None),
    "warm": (warm.warm_, "compile the kernels of a model before it runs; it needs no weights and no GPU", None),
    "eval": (commands.eval_, "compare backends and caches on one model by lm-eval, over the same examples", commands.EPILOG),
    "bench": (
        handed_over.bench_help,
        f"benchmarks: {', '.join(BENCHES)}; `hf-fastattn bench generate --help` and so on",
        None,
    ),
    "lm_eval": (handed_over.lm_eval_help, "lm-eval's own command line, with these backends registered", None),
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
        with warnings.catch_warnings():
            warnings.showwarning = functools.partial(_show_warning, command, warnings.showwarning)
            return run() or 0
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except Exception as error:
        if show or not _is_refusal(error):
            raise
        text = as_options(" ".join(str(error).split()), COMMANDS[command][0])
        print(f"hf-fastattn {command}: {text}{corrected(arguments, text)}", file=sys.stderr)
        return 2


def _parse(arguments: list[str]) -> tuple[str, Command, bool]:
    """(command, its function with arguments, whether to show tracebacks). Raises SystemExit for help and for wrong arguments.
    The command runs outside of Typer, which would catch its exceptions."""
    asked: list[tuple[str, Command, bool]] = []

    def note(name: str, run: Command, *, traceback: bool = False, **options: Any) -> None:
        asked.append((name, functools.partial(run, **options), traceback))

    app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=HELP)
    app.callback(help=ABOUT)(_options)
    for name, (run, about, epilog) in COMMANDS.items():
        noting = functools.update_wrapper(functools.partial(note, name, run), run)  # with the parameters of `run`
        whole = f"{about[0].upper()}{about[1:]}."
        app.command(name, help=whole, short_help=about, epilog=epilog, context_settings=HELP)(noting)
    try:
        typer.main.get_command(app).main(arguments, prog_name="hf-fastattn")
    except SystemExit:
        if not asked:
            raise
    return asked[0]


def _show_version(asked: bool) -> None:
    if asked:
        source = (ROOT / "hf_fastattn" / "__init__.py").read_text(encoding="utf-8")
        print("hf-fastattn", *re.findall(r'^__version__ = "(.+)"', source, re.MULTILINE))
        raise typer.Exit()


def _options(
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_show_version, help="show the version")] = False,
) -> None:
    """Options of the program itself."""


def _show_warning(command: str, other: Callable[..., None], message: Warning, category: type, file: str, *rest: Any) -> None:
    """Show a warning: of code of this project without the place in it, which is no line of the user."""
    if _is_own(file):
        print(f"hf-fastattn {command}: warning: {message}", file=sys.stderr)
    else:
        other(message, category, file, *rest)


def _is_own(file: str) -> bool:
    return any(Path(file).is_relative_to(folder) for folder in OWN)


def _is_refusal(error: Exception) -> bool:
    """Whether an error reports a wrong request, as one that code of this package raises with `raise`. One that Python or torch
    raises in it is a fault, whose traceback is shown."""
    no_memory = isinstance(error, RuntimeError) and any(its in str(error) for its in NO_MEMORY)
    no_memory |= type(error).__name__ == "OutOfMemoryError"  # torch's
    if no_memory or isinstance(error, (ImportError, OSError, MemoryError)):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    if _is_own(last.filename):
        return (last.line or "").startswith("raise")
    return isinstance(error, ValueError)
