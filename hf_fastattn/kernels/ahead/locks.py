"""Locks of kernels: one process of a host compiles a kernel, and the others find it in Triton's cache on disk."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

LAUNCHER = "launcher"  # an empty file: the function that launches the kernel is compiled
PATIENCE = 300.0  # seconds; a lock that is held longer is that of a hanging process or a broken file system


def folder() -> Path:
    """Triton's cache."""
    from triton import knobs

    return Path(knobs.cache.dir)


def key_of(digest: object) -> str:
    """The name of the folder of a kernel in Triton's cache, for the hash of what its compilation depends on."""
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        return ""
    return base64.b32encode(bytes.fromhex(digest)).decode().rstrip("=")


def is_compiled(key: str) -> bool:
    """Whether a kernel is in Triton's cache."""
    return any((folder() / key).glob("__grp__*.json"))


def is_there(key: str) -> bool:
    """The same, with the function that launches it."""
    return is_compiled(key) and (not has_launchers() or (folder() / key / LAUNCHER).exists())


@cache
def has_launchers() -> bool:
    """Whether Triton compiles a function in C for each kernel, as before 3.9, and this machine can do it ahead."""
    from triton.backends.nvidia import driver

    with contextlib.suppress(Exception):  # it raises where there is no libcuda
        return hasattr(driver, "make_launcher") and bool(driver.libcuda_dirs())
    return False


@contextmanager
def locked(key: str, wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """A context in which no other process compiles this kernel. wait: called now and then while one does.

    A lock ends with its process. Without a folder to write to there is no lock.
    """
    import fcntl

    file = -1
    try:
        (folder() / key).mkdir(parents=True, exist_ok=True)
        file = os.open(folder() / key / "compiling", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                wait()
                time.sleep(0.01)
    except OSError:
        pass
    try:
        yield
    finally:
        if file >= 0:
            os.close(file)
