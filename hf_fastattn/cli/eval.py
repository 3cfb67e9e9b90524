"""hf-fastattn eval."""

import sys
from pathlib import Path
from typing import Annotated, cast

from typer import Option

from ..evaluation import CACHES, Cache, evaluate
from ..evaluation.harness import PACK
from .options import Device, DtypeOption, GgufFile, Model, Sinks, Traceback, Window, listed

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
    out: Annotated[Path, Option(metavar="FOLDER", help="folder for eval.json and eval.md")] = Path("eval"),
    traceback: Traceback = False,
) -> int:
    found = evaluate(
        model,
        backends=listed(backends),
        tasks=listed(tasks),
        caches=cast(list[Cache], listed(caches)),
        limit=limit,
        batch_size=int(batch_size) if batch_size.isdecimal() else batch_size,
        num_fewshot=num_fewshot,
        include_path=include_path or [],
        gen_kwargs=gen_kwargs,
        apply_chat_template=apply_chat_template,
        confirm_run_unsafe_code=confirm_run_unsafe_code,
        decode_tokens=decode_tokens,
        text=None if text is None else _read(text),
        window=window,
        sinks=sinks,
        out=out,
        gguf_file=gguf_file,
        dtype=dtype,
        device=device,
    )
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
