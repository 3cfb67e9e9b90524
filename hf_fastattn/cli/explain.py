"""hf-fastattn explain."""

import json
from typing import Annotated, cast

from typer import Argument, Option

from .. import hf
from ..explanation import GPUS, SHAPES
from ..explanation import explain as explain_
from ..explanation.costs import GpuName
from .options import MODEL, Backend, Dtype, GgufFile, Sinks, Traceback, Window

SOURCE = f"{MODEL}; or a named shape: {', '.join(SHAPES)}"
GPU = f"published figures of one of {', '.join(GPUS)}; default: measure the GPU of this machine"


def explain(
    model: Annotated[str, Argument(metavar="MODEL", help=SOURCE, show_default=False)],
    gguf_file: GgufFile = None,
    dtype: Annotated[Dtype | None, Option(help="default: the model's")] = None,
    device: Annotated[str | None, Option(help="default: cuda")] = None,
    batch: Annotated[int, Option(help="number of rows")] = 1,
    length: Annotated[int, Option(help="tokens per row")] = 8192,
    backend: Backend = "lean",
    ranks: Annotated[int, Option("--tp", help="number of GPUs that share the model; figures are of one of them")] = 1,
    gpu: Annotated[str | None, Option(help=GPU)] = None,
    window: Window = None,
    sinks: Sinks = None,
    as_json: Annotated[bool, Option("--json", help="print JSON")] = False,
    traceback: Traceback = False,
) -> None:
    if ranks < 1:
        raise ValueError(f"--tp must be at least 1; got {ranks}.")
    source: str | hf.PreTrainedConfig = model
    if model.lower() not in SHAPES:
        source = hf.load_config(model, gguf_file)
        source._name_or_path = model
    found = explain_(
        source,
        batch=batch,
        length=length,
        backend=backend,
        device=device,
        dtype=dtype,
        gpu=cast(GpuName | None, gpu and gpu.lower()),
        window=window,
        sinks=sinks,
        ranks=ranks,
    )
    print(json.dumps(found.as_dict(), indent=1) if as_json else found)
