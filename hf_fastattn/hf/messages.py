"""Warnings at the line of the user."""

import functools
import os
import sys
import warnings
from pathlib import Path
from types import FrameType


def warn(text: str) -> None:
    """Warn at the innermost line that is not of this package, Transformers or torch."""
    files = (getattr(sys.modules.get(name), "__file__", None) for name in ("hf_fastattn", "transformers", "torch"))
    folders = tuple(f"{Path(file).parent}{os.sep}" for file in files if file)
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(folders):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


@functools.cache
def warn_once(text: str) -> None:
    warn(text)
