"""The program hf-fastattn. Its help and its version need neither torch nor Transformers, whose import takes seconds.

The module is outside the package, whose import brings both. `hf_fastattn.cli` has the commands.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

ABOUT = "Exact attention kernels inside Hugging Face Transformers: the backends, what runs, and comparisons of results."
BENCHES = (
    *("generate", "families", "hybrids", "modes", "evaluation", "prompts", "batch", "first_tokens", "chunks", "rollout"),
    *("quantised", "kv_dtype", "kv_dtype_speed", "ranks", "commits", "kernels", "stream", "paper_e2e", "paper_ranks"),
    *("context", "softmax", "report"),
)
COMMANDS = {
    "backends": "list the backends and whether each can run here",
    "generate": "generate text with a backend, and compare it with another",
    "explain": "which kernels run for a model and why, the least cost of a token, when memory is full",
    "warm": "compile the kernels of a model before it runs; it needs no weights and no GPU",
    "eval": "compare backends and caches on one model by lm-eval, over the same examples",
    "bench": f"benchmarks: {', '.join(BENCHES)}; `hf-fastattn bench generate --help` and so on",
    "lm_eval": "lm-eval's own command line, with these backends registered",
}


HELP = {"help_option_names": ["-h", "--help"]}


def main() -> int:
    """Run the command line of this process. Returns its exit code."""
    arguments = sys.argv[1:] or ["--help"]
    if arguments in (["-h"], ["--help"], ["--version"]):
        typer.main.get_command(program({})).main(arguments, prog_name="hf-fastattn")
    from hf_fastattn import cli

    return cli.main(arguments)


def program(commands: Mapping[str, tuple[Callable[..., Any], str | None]]) -> typer.Typer:
    """The program with the functions of its commands, each with the end of its help. Those left out do nothing."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=HELP)
    app.callback(help=ABOUT)(_options)
    for name, about in COMMANDS.items():
        run, epilog = commands.get(name, (_nothing, None))
        whole = f"{about[0].upper()}{about[1:]}."
        app.command(name, help=whole, short_help=about, epilog=epilog, context_settings=HELP)(run)
    return app


def _show_version(asked: bool) -> None:
    if asked:
        source = (Path(__file__).parent / "hf_fastattn" / "__init__.py").read_text(encoding="utf-8")
        print("hf-fastattn", *re.findall(r'^__version__ = "(.+)"', source, re.MULTILINE))
        raise typer.Exit()


def _options(
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_show_version, help="show the version")] = False,
) -> None:
    """Options of the program itself."""


def _nothing() -> None:
    pass
