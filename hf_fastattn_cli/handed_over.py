"""hf-fastattn bench and lm_eval, which pass their arguments to another program."""

import importlib
import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from . import placeholders

BENCHES = (
    *("generate", "families", "hybrids", "modes", "evaluation", "prompts", "batch", "first_tokens", "chunks", "rollout"),
    *("quantised", "kv_dtype", "kv_dtype_speed", "linear", "sampling", "ranks", "commits", "kernels", "stream", "paper_e2e"),
    *("paper_ranks", "context", "tree", "softmax", "unified", "roofline", "session", "report"),
)
ROOT = Path(__file__).parent.parent


# These two are used only for --help: other arguments are parsed by the called program.
def bench_help(name: Annotated[str, typer.Argument(metavar="NAME [OPTIONS]", help=f"one of {', '.join(BENCHES)}")]) -> None:
    pass


def lm_eval_help(arguments: Annotated[str, typer.Argument(metavar="ARGUMENTS", help="of lm-eval, as run --help")]) -> None:
    pass


def bench(arguments: list[str]) -> int:
    """Run the named benchmark."""
    what = arguments[0] if arguments else ""
    if not what:
        raise ValueError(f"Name a benchmark, one of {', '.join(BENCHES)}.")
    if what not in BENCHES:
        raise ValueError(f"Unknown benchmark {what!r}; known: {', '.join(BENCHES)}.")
    only_help = {"-h", "--help"} & {*arguments} and "torch" not in sys.modules
    with placeholders.instead() if only_help else nullcontext():
        code: int = load_benchmark(what).main(arguments[1:], prog=f"hf-fastattn bench {what}")
    return code


def load_benchmark(name: str) -> ModuleType:
    """The named module in benchmarks/ of the clone that this package runs from.

    It is loaded under a unique name, because a module `benchmarks` on the path may belong to another project.
    """
    package = "hf_fastattn_benchmarks"
    if package not in sys.modules:
        init, project = ROOT / "benchmarks" / "__init__.py", ROOT / "pyproject.toml"
        if not (init.exists() and project.exists() and 'name = "hf-fastattn"' in project.read_text(encoding="utf-8")):
            raise ModuleNotFoundError(
                'The benchmarks do not come with the package: clone its repository and run `pip install -e ".[bench]"` there.'
            )
        spec = importlib.util.spec_from_file_location(package, init, submodule_search_locations=[str(init.parent)])
        if spec is None or spec.loader is None:
            raise ModuleNotFoundError(f"{init} cannot be loaded.")
        sys.modules[package] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return importlib.import_module(f"{package}.{name}")


def lm_eval(arguments: list[str]) -> int:
    """Run lm-eval in a process where the backends and the model type "hf-fastattn" are registered."""
    import hf_fastattn_autoload
    from hf_fastattn.evaluation.harness import require

    require()
    import lm_eval.models  # noqa: F401
    from lm_eval.__main__ import cli_evaluate

    hf_fastattn_autoload.register_lm()  # autoload() may be off, or the package not installed
    if not any("hf-fastattn" in argument for argument in arguments):
        print("Of lm-eval's model types only --model hf-fastattn patches the model.", file=sys.stderr)
    sys.argv = ["lm_eval", *arguments]
    return cli_evaluate() or 0
