"""hf-fastattn warm."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from .commands import MODEL, Backend, Dtype, GgufFile, KvDtype, Traceback, listed

if TYPE_CHECKING:
    from hf_fastattn.kernels.host import gpu

ROWS = (1, 2, 4, 8, 16, 32, 64)
LONGEST = 1 << 17
SMS = {80: 108, 86: 84, 89: 128, 90: 132}  # of the most common GPU of each architecture
ARCH = "compute capability of the GPU that will run them, 80 or 90; default: that of this machine"
COUNT = f"its number of multiprocessors; default: of this machine's, or {', '.join(f'{n} for {a}' for a, n in SMS.items())}"

NUMBERS = f"numbers of rows of the calls; default: {','.join(map(str, ROWS))}, or with --batch all up to 256"
BATCH = "the kernels of generate_batch() instead, with pages of so many tokens: 64, or page_size of its configuration"


def warm_(
    model: Annotated[str | None, Argument(metavar="MODEL", help=MODEL, show_default=False)] = None,
    rows: Annotated[str | None, Option(help=NUMBERS)] = None,
    tokens: Annotated[int, Option(help="the longest text")] = LONGEST,
    backend: Backend = "lean",
    dtype: Annotated[Dtype | None, Option(help="default: the model's")] = None,
    arch: Annotated[int | None, Option(help=ARCH)] = None,
    sms: Annotated[int | None, Option(help=COUNT)] = None,
    batch: Annotated[int, Option(metavar="SIZE", help=BATCH)] = 0,
    gguf_file: GgufFile = None,
    kv_dtype: KvDtype = None,
    export: Annotated[Path | None, Option(metavar="FILE", help="also write the kernels to a file, for other machines")] = None,
    import_: Annotated[Path | None, Option("--import", metavar="FILE", help="read such a file into Triton's cache")] = None,
    traceback: Traceback = False,
) -> None:
    if import_ is not None:
        with nullcontext() if model else _kernels_alone():
            _import(import_)
    if model is None:
        if import_ is None or export is not None:
            raise ValueError("Name a MODEL whose kernels are to be compiled, or a file of kernels with --import.")
        return
    import torch

    from hf_fastattn import hf, registry
    from hf_fastattn.kernels.ahead import archive
    from hf_fastattn.patches import ahead, preflight, warm

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
    if export is not None:
        about = {"model": model, "rows": counts, "tokens": tokens}
        if ahead.is_whole(counts, tokens):
            about["known"] = ahead.Known(recipe).name
        number = archive.export(warm.listed(recipe, counts, tokens), export, about)
        print(f"{number} kernels are in {export}, {export.stat().st_size / 2**20:.1f} MiB.")


def _import(file: Path) -> None:
    from hf_fastattn.kernels.ahead import archive, describe, locks

    if not file.is_file():
        raise ValueError(f"--import: there is no file {file}.")
    kernels = archive.import_(file)
    if locks.has_launchers():
        describe.compile_launchers(kernels)
    print(f"{len(kernels)} kernels of {file} are in Triton's cache.")


@contextmanager
def _kernels_alone() -> Iterator[None]:
    """A context in which hf_fastattn.kernels is imported without the package, which imports Transformers: that takes longer."""
    if "hf_fastattn" in sys.modules:
        yield
        return
    package = sys.modules["hf_fastattn"] = ModuleType("hf_fastattn")
    package.__path__ = [str(Path(__file__).parents[1] / "hf_fastattn")]
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "hf_fastattn"]:
            del sys.modules[name]


def _counts(rows: str) -> tuple[int, ...]:
    counts = tuple(int(count) if count.isdecimal() else 0 for count in listed(rows))
    if not counts or min(counts) < 1:
        raise ValueError(f"--rows are numbers of at least 1, as in 1,8; got {rows!r}.")
    return counts


def _target(arch: int | None, sms: int | None) -> gpu.Target:
    """The GPU that the options name, by default that of this machine."""
    import torch

    from hf_fastattn.kernels.host import gpu

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
