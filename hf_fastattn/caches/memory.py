"""The memory of buffers: how much is free, whether they fit, and all of it from the driver at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import torch


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated at most; None if unknown. On a GPU they include unused memory that torch has reserved."""
    if device.type == "cpu":  # all of its memory; more than a process can address if that is unknown
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 1 << 46
    if device.type != "cuda":
        return None
    free, idle, _ = _of_gpu(device)
    return free + idle


def _of_gpu(device: torch.device) -> tuple[int, int, int]:
    """(bytes that the driver has left, bytes that torch has and does not use, size of blocks that torch does not split or -1)"""
    free, stats = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_stats_as_nested_dict(device)
    idle = stats["reserved_bytes"]["all"]["current"] - stats["allocated_bytes"]["all"]["current"]
    return int(free), int(idle), int(stats.get("max_split_size", -1))


def refuse_unless_fits(
    tokens: int, bytes_per_token: int, device: torch.device, held: int = 0, release: Callable[[], None] | None = None
) -> None:
    """Raise MemoryError if buffers of `tokens` tokens do not fit. held: bytes of the buffers that they replace. release: what
    frees memory."""
    needed, free = tokens * bytes_per_token, free_bytes(device)
    if free is not None and needed > free + held and release is not None:
        release()
        free = free_bytes(device)
    if free is not None and needed > free + held:
        raise MemoryError(
            f"A cache of {tokens} tokens needs {needed} bytes ({needed / 2**30:.2f} GiB) on {device}, and at most {free + held} "
            f"({(free + held) / 2**30:.2f} GiB) are free. Ask for fewer tokens (max_new_tokens, capacity or window), fewer rows "
            "or a shorter prompt."
        )


def reserve(total: int, count: int, device: torch.device) -> None:
    """Have torch get the memory of so many buffers at once, from which it then allocates each of them: the driver takes up to a
    millisecond for every piece. total: bytes of all. It does nothing for buffers of 1 MiB and less, which are of another pool of
    torch, or if torch has as much unused memory, or the driver has less."""
    if device.type != "cuda" or count == 1 or total <= count << 20:
        return
    total += count << 9  # each begins at a multiple of 512 bytes
    free, idle, whole = _of_gpu(device)
    if idle < total <= free and not 0 <= whole <= total:
        with contextlib.suppress(torch.OutOfMemoryError):  # of a limit of the process, or as another one was faster
            torch.empty(total, dtype=torch.uint8, device=device)
