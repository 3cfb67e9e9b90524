"""Devices and folders for commands: finding an available device, writing results."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import torch


def find_device(name: torch.device | str | None, planned: bool = False) -> torch.device:
    """The device of that name; by default the current GPU, or else the CPU. Raises ValueError if it is not available.

    planned: whether a CUDA device is accepted on a machine without a GPU.
    """
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name is None else name)
    except RuntimeError as error:
        raise ValueError(f"Unknown device {name!r}; name cpu, cuda, or one GPU of several as in cuda:1.") from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if planned and not count:
            return device
        if not count:
            raise ValueError(f"There is no device {name!r} here: torch finds no CUDA GPU. Name the device cpu.")
        if device.index is not None and device.index >= count:
            raise ValueError(f"There is no device {name!r} here; the last of {count} is cuda:{count - 1}.")
        return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # a backend of torch that was not built
        reason = re.split(r"\.\s|\n", str(error))[0].removesuffix(".")  # torch goes on with a list of its backends
        raise ValueError(f"There is no device {name!r} here: {reason}. Name the device cpu.") from error
    if device.type == "meta":
        raise ValueError("The device 'meta' holds no numbers. Name the device cpu.")
    return device


def prepare_folder(folder: str | Path) -> None:
    """Create the folder and check that it is writable, before long work. Raises OSError with the reason if it is not."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\n")
    except OSError as error:
        raise OSError(f"Results cannot be written into {folder}: {error.strerror or error}. Name another folder.") from error


def write_whole(path: Path, text: str) -> None:
    """Replace the file atomically, so that an interrupted write keeps the previous file. Creates the folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(f".{path.name}.partial")
    whole.write_text(text, encoding="utf-8")
    whole.replace(path)
