"""One run of a benchmark: its clock, its progress bar, and its JSON, written after every row."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from tqdm import tqdm

from hf_fastattn.machine import find_device as find_device
from hf_fastattn.machine import prepare_folder, write_whole

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # settings that decide what fits


def conditions(device: torch.device, method: str) -> dict[str, str]:
    """What a reader needs to judge a figure: device, versions, method."""
    import transformers

    try:
        import triton
    except ImportError:  # not on every CPU
        triton = None
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "triton": getattr(triton, "__version__", "none"),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "method": method,
    }


def command(prog: str, argv: list[str] | None) -> str:
    """What was typed, without where the results went and how long it might take."""
    words, typed = [], list(sys.argv[1:] if argv is None else argv)
    while typed:
        word = typed.pop(0)
        if word.partition("=")[0] not in ("--out", "--seconds"):
            words.append(word)
        elif "=" not in word and typed:
            typed.pop(0)
    settings = [f"{name}={os.environ[name]}" for name in ALLOCATOR if name in os.environ]
    return shlex.join([*settings, *prog.split(), *words])


def _folder(name: str) -> Path:
    try:
        prepare_folder(name)
    except OSError as error:
        raise argparse.ArgumentTypeError(error) from error
    return Path(name)


def add_options(parser: argparse.ArgumentParser, seconds: float) -> None:
    """--out, --seconds and --device, which all benchmarks share."""
    parser.add_argument("--out", type=_folder, default="examples/results", help="folder for the JSON (default: %(default)s)")
    help_ = "what does not fit into this is left out, with a note (default: %(default)s)"
    parser.add_argument("--seconds", type=float, default=seconds, help=help_)
    parser.add_argument("--device", help="default cuda if there is one, else cpu")


class Results:
    """`data` is what the JSON at `path` holds; its "rows" come one by one, and each is saved at once.

    command: what was typed; `conditions` and further fields of the file as they are.
    """

    def __init__(self, path: Path, seconds: float, command: str, **head):
        self.began = time.perf_counter()
        self.path = path
        self.seconds = seconds
        self.data = {**head, "commands": [command], "rows": []}

    def left(self) -> float:
        """Seconds that the run may still take."""
        return self.seconds - (time.perf_counter() - self.began)

    def say(self, text: str) -> None:
        """A line of the log, above the progress bar where there is one."""
        tqdm.write(f"[{time.perf_counter() - self.began:5.0f} s] {text}")
        sys.stdout.flush()  # into a log, too, as it goes

    def take_over(self, parser: argparse.ArgumentParser) -> None:
        """Go on from what an earlier run left in the file; an error of the command line where its conditions were others."""
        if not self.path.exists():
            return
        old = json.loads(self.path.read_text())
        if old["conditions"] != self.data["conditions"]:
            parser.error(f"{self.path} was measured under {old['conditions']}, and not {self.data['conditions']}.")
        old["commands"] = list(dict.fromkeys([*old.get("commands", ()), *self.data["commands"]]))
        self.data = old

    def save(self) -> None:
        """Raises OSError where that fails, and prints what could not be saved."""
        text = json.dumps(self.data, indent=1) + "\n"
        try:
            write_whole(self.path, text)
        except OSError as error:
            self.say(text)
            raise OSError(f"{self.path} was not saved: {error}. What it would hold is printed above.") from error


def progress(items: Iterable, what: str, unit: str = "row") -> tqdm:
    """A bar over the items on a terminal, nothing in a log file."""
    return tqdm(items, desc=what, unit=unit, disable=None, dynamic_ncols=True)
