"""The processes of torchrun that run benchmarks/ranks.py: what they agree on, and how they wait."""

from __future__ import annotations

import faulthandler
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .results import Results, find_device


def join(name: str | None) -> torch.device:
    """Create the process group, as Transformers does, unless there is one. Returns the device of this process. name: see
    `find_device`."""
    device = find_device(name)
    if cuda := device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    return device


class Group:
    """The processes. device: of this one. results: of the first one, None in the others.

    They meet over gloo: a collective of NCCL would keep the GPU of a waiting process busy.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.results: Results | None = None
        self.size, self.first = dist.get_world_size(), dist.get_rank() == 0
        self.hosts = dist.new_group(backend="gloo")

    def begin(self, parser: ArgumentParser, args: Namespace, name: str, typed: str, head: dict, again: Callable) -> None:
        """Create the results of the first process, with --keep with the rows of the JSON that are not measured again(row)."""
        if self.first:
            self.results = Results(args.out / f"{name}.json", args.seconds, typed, self.device, **head)
            if args.keep:
                self.results.take_over(parser)
                self.results.data["rows"] = [row for row in self.results.data["rows"] if not again(row)]

    def gather(self, mine: Any) -> list[Any]:
        """The values of all processes, which wait for each other."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self.hosts)
        return found

    def attempt(self, action: Callable[[], Any]) -> tuple[Any, str | None]:
        """(result of the action, None), or (None, the first line of the error) if it raises in any process."""
        result, reason = None, None
        try:
            result = action()
        except Exception as error:  # any error: the other rivals are still timed
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
        reason = next(filter(None, self.gather(reason)), None)
        return (result, None) if reason is None else (None, reason)

    def has(self, seconds: float) -> bool:
        """Whether the first process has so much time left."""
        return self.gather(self.results is not None and self.results.left() > seconds)[0]

    def say(self, text: str) -> None:
        if self.results is not None:
            self.results.say(text)

    def save(self, row: dict) -> None:
        """Write a row of this run. An earlier row of the same case and number of GPUs stays if it has a rival that this one has
        not."""
        if self.results is None:
            return
        row, rows = row | {"run": self.results.run}, self.results.data["rows"]
        same = [old for old in rows if (old["case"], old["ranks"]) == (row["case"], row["ranks"])]
        mine = next((old for old in same if old["run"] == row["run"]), None)
        gone = [old for old in same if old is not mine and old["rivals"].keys() <= row["rivals"].keys()]
        kept = [row if old is mine else old for old in rows if all(old is not other for other in gone)]
        self.results.data["rows"] = kept if mine is not None else [*kept, row]
        self.results.save()


def end_after(seconds: float | None) -> None:
    """End this process after so many seconds, unless it is called again: a process may wait forever for one that has failed."""
    if seconds is None:
        faulthandler.cancel_dump_traceback_later()
        return
    faulthandler.dump_traceback_later(seconds, exit=True)


def leave(seconds: float) -> None:
    """Destroy the process group, or end this process after so many seconds."""
    end_after(seconds)
    dist.destroy_process_group()
    end_after(None)
