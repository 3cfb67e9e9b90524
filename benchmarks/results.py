"""One run of a benchmark: its time limit, its progress bar, and its JSON, written after every row."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from tqdm import tqdm

from hf_fastattn import __version__
from hf_fastattn.report.machine import find_device as find_device
from hf_fastattn.report.machine import prepare_folder, write_whole

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # settings that determine what fits into memory
SETTINGS = (*ALLOCATOR, "NCCL_GRAPH_MIXING_SUPPORT")  # those that a command line has
MOST_ON_CPU = 1 << 25  # of what `need_gpu` compares
CLOCKS_EVERY = 10  # minimum seconds between two readings of the clocks


def conditions(device: torch.device, method: str) -> dict[str, str]:
    """The conditions of a figure: device, versions, method."""
    import transformers

    try:
        import triton
    except ImportError:  # Triton is not available for every CPU
        triton = None
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "triton": getattr(triton, "__version__", "none"),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "method": method,
    }


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def clocks(device: torch.device) -> dict:
    """Driver version, and the current SM and memory clock in MHz; empty if nvidia-smi does not report them."""
    if device.type != "cuda":
        return {}
    which = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = ["nvidia-smi", which, "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        driver, sm, memory = (word.strip() for word in said.strip().split(","))
        return {"driver": driver, "sm_mhz": int(sm), "memory_mhz": int(memory)}
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}


def command(prog: str, argv: list[str] | None) -> str:
    """The command line, without the output folder and the time limit."""
    words, typed = [], list(sys.argv[1:] if argv is None else argv)
    while typed:
        word = typed.pop(0)
        if word.partition("=")[0] not in ("--out", "--seconds"):
            words.append(word)
        elif "=" not in word and typed:
            typed.pop(0)
    settings = [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    return shlex.join([*settings, *prog.split(), *words])


def as_text(data: dict) -> str:
    """The JSON of a result. Each row is one line: it takes less space than indented rows, and a new row is one line of a diff."""
    lines = ",\n  ".join(json.dumps(row) for row in data.get("rows", ()))
    head, tail = json.dumps(data | {"rows": []}, indent=1).split('\n "rows": []', 1)
    return f'{head}\n "rows": [\n  {lines}\n ]{tail}\n'


def listed(text: str) -> list[str]:
    """The items of an option like "a,b"."""
    return [item for item in text.split(",") if item]


def check_names(parser: argparse.ArgumentParser, chosen: Iterable[str], known: Iterable[str], what: str) -> None:
    """A command line error for names that are not known. what: what they name, in the plural."""
    if unknown := {*chosen} - {*known}:
        parser.error(f"unknown {what} {', '.join(sorted(unknown))}; known are {', '.join(known)}.")


def _folder(name: str) -> Path:
    try:
        prepare_folder(name)
    except OSError as error:
        raise argparse.ArgumentTypeError(error) from error
    return Path(name)


def add_options(parser: argparse.ArgumentParser, seconds: float) -> None:
    """--out, --seconds and --device, which all benchmarks share."""
    parser.add_argument("--out", type=_folder, default="examples/results", help="folder for the JSON (default: %(default)s)")
    help_ = "what cannot begin in this time is skipped, with a note (default: %(default)s)"
    parser.add_argument("--seconds", type=float, default=seconds, help=help_)
    parser.add_argument("--device", help="default: cuda if available, otherwise cpu")


def need_gpu(
    parser: argparse.ArgumentParser, args: argparse.Namespace, models: Iterable[str] = (), sizes: Mapping[str, int] | None = None
) -> None:
    """A command line error without a GPU, unless --device asks for the CPU and for what fits into its memory.

    models: named shapes with random weights. sizes: by name, rows * q_len * kv_len: references have all scores in memory.
    """
    if args.device is None and not torch.cuda.is_available():
        parser.error(
            "this benchmark needs a CUDA GPU and a torch built for it, and torch.cuda.is_available() is False here. "
            "--device cpu runs a trial of small shapes on the CPU."
        )
    if args.device is None or args.device.startswith("cuda"):
        return
    large = [name for name in models if not name.startswith("tiny")]
    large += [name for name, size in (sizes or {}).items() if size > MOST_ON_CPU]
    if large:
        parser.error(
            f"{large[0]} needs a CUDA GPU. --device cpu is for trials: checkpoints, shapes whose names begin with tiny, and "
            f"prompts with at most {MOST_ON_CPU} pairs of a query and a key."
        )


class Results:
    """`data` is the content of the JSON at `path`. Its "rows" are added one by one, and each is saved immediately.

    command: the command line; head: `conditions` and further fields of the file. `run` is the id of this run, which all its rows
    get; "measured_by" of the file has its command and conditions. device: the GPU whose clocks the conditions have, as the lowest
    and highest value at the times when rows were saved.
    """

    def __init__(self, path: Path, seconds: float, command: str, device: torch.device | None = None, **head):
        self.began = time.perf_counter()
        self.path = path
        self.seconds = seconds
        self.device, self.looked = device, -CLOCKS_EVERY
        self.run = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{uuid.uuid4().hex[:8]}"
        own = {self.run: {"command": command, "version": __version__, "conditions": dict(head.get("conditions", {}))}}
        self.data = {**head, "commands": [command], "measured_by": own, "rows": []}

    def left(self) -> float:
        """Remaining seconds of the run."""
        return self.seconds - (time.perf_counter() - self.began)

    def say(self, text: str) -> None:
        """Print a line of the log, above the progress bar if there is one."""
        tqdm.write(f"[{time.perf_counter() - self.began:5.0f} s] {text}")
        sys.stdout.flush()  # a log file gets it immediately too

    def add(self, row: dict, name: str, said: str, passed: bool = True) -> None:
        """Add a row of this run, or a failure of this name if it has not passed. said: the line of the log."""
        if passed:
            self.data["rows"].append(row | {"run": self.run})
        else:
            self.data["failed"].append({"row": name, "error": said})
        self.say(said)
        self.save()

    def take_over(self, parser: argparse.ArgumentParser) -> None:
        """Continue with the rows of an earlier run in the file; a command line error if its conditions or model differ."""
        if not self.path.exists():
            return
        old = json.loads(self.path.read_text())
        for name in ("conditions", "shape", "layers", "dtype", "share_of"):
            if (theirs := old.get(name)) != (mine := self.data.get(name)):
                parser.error(f"{self.path} was measured under {name} {theirs}, not under {mine}.")
        old["commands"] = list(dict.fromkeys([*old.get("commands", ()), *self.data["commands"]]))
        old["measured_by"] = old.get("measured_by", {}) | self.data["measured_by"]
        self.data = old

    def save(self) -> None:
        """Write the file. If this fails, print the data and raise OSError."""
        if self.device is not None and time.perf_counter() - self.began - self.looked >= CLOCKS_EVERY:
            self.looked = time.perf_counter() - self.began
            at, found = self.data["measured_by"][self.run]["conditions"], clocks(self.device)
            for name in found.keys() & {"sm_mhz", "memory_mhz"}:
                low, high = at.get(name, (found[name], found[name]))
                found[name] = [min(low, found[name]), max(high, found[name])]
            at |= found
        text = as_text(self.data)
        try:
            write_whole(self.path, text)
        except OSError as error:
            self.say(text)
            raise OSError(f"{self.path} was not saved: {error}. Its content is printed above.") from error


def progress(items: Iterable, what: str, unit: str = "row") -> tqdm:
    """A progress bar over the items on a terminal; nothing in a log file."""
    return tqdm(items, desc=what, unit=unit, disable=None, dynamic_ncols=True)
