"""hf-fastattn warm."""

from typing import Annotated

import torch
from typer import Option

from .. import hf, registry
from ..kernels.host import gpu
from ..patches import ahead, preflight, warm
from .commands import Backend, Dtype, GgufFile, KvDtype, Model, Traceback, listed

SMS = {80: 108, 86: 84, 89: 128, 90: 132}  # of the most common GPU of each architecture
ARCH = "compute capability of the GPU that will run them, 80 or 90; default: that of this machine"
COUNT = f"its number of multiprocessors; default: of this machine's, or {', '.join(f'{n} for {a}' for a, n in SMS.items())}"

NUMBERS = f"numbers of rows of the calls; default: {','.join(map(str, warm.ROWS))}, or with --batch all up to 256"
BATCH = "the kernels of generate_batch() instead, with pages of so many tokens: 64, or page_size of its configuration"


def warm_(
    model: Model,
    rows: Annotated[str | None, Option(help=NUMBERS)] = None,
    tokens: Annotated[int, Option(help="the longest text")] = warm.LONGEST,
    backend: Backend = "lean",
    dtype: Annotated[Dtype | None, Option(help="default: the model's")] = None,
    arch: Annotated[int | None, Option(help=ARCH)] = None,
    sms: Annotated[int | None, Option(help=COUNT)] = None,
    batch: Annotated[int, Option(metavar="SIZE", help=BATCH)] = 0,
    gguf_file: GgufFile = None,
    kv_dtype: KvDtype = None,
    traceback: Traceback = False,
) -> None:
    counts = None if rows is None else _counts(rows)
    for option, value in (("--tokens", tokens), ("--sms", sms)):
        if value is not None and value < 1:
            raise ValueError(f"{option} must be at least 1; got {value}.")
    config = hf.load_config(model, gguf_file)
    of = torch.bfloat16 if (found := dtype or config.dtype) is None else found
    made = hf.model_on_meta(config, getattr(torch, of) if isinstance(of, str) else of)
    preflight.which_kv_dtype(made, registry.get(backend), None if batch else "preallocated", kv_dtype)
    recipe = warm.Recipe.of(made, backend, _target(arch, sms), batch)._replace(kv_dtype=kv_dtype)
    print(ahead.warm_up(recipe, counts, tokens))


def _counts(rows: str) -> tuple[int, ...]:
    counts = tuple(int(count) if count.isdecimal() else 0 for count in listed(rows))
    if not counts or min(counts) < 1:
        raise ValueError(f"--rows are numbers of at least 1, as in 1,8; got {rows!r}.")
    return counts


def _target(arch: int | None, sms: int | None) -> gpu.Target:
    """The GPU that the options name, by default that of this machine."""
    if arch is None:
        if not torch.cuda.is_available():
            raise ValueError("This machine has no GPU. Pass --arch: 80 for an A100, 90 for an H100 or H200.")
        device = torch.device("cuda", torch.cuda.current_device())
        return gpu.Target(gpu.arch(device), sms or gpu.num_sms(device))
    if arch not in SMS and (sms is None or arch < gpu.OLDEST):
        raise ValueError(
            f"--arch must be one of {', '.join(map(str, SMS))}, or another from {gpu.OLDEST} on with --sms; got {arch}."
        )
    return gpu.Target(arch, sms or SMS[arch])
