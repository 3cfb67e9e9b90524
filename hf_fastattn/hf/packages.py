"""Whose code it is: that of packages which are trusted to read only the model and their own files, or the user's."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

# `transformers_modules` has the code of models that was loaded with trust_remote_code=True.
PACKAGES = frozenset(
    {"torch", "transformers", "transformers_modules", "triton", "hf_fastattn", "hf_fastattn_autoload", *sys.stdlib_module_names}
)
_INSTALLED = frozenset({"site-packages", "dist-packages"})  # folders


def is_trusted(name: Any) -> bool:
    """Whether the Python module of this name is that of a package that is installed, or code that Transformers has loaded.

    A class that is written in C may have anything as the name of its module; an object without one is no code of the user's.
    """
    if not isinstance(name, str):
        return name is not None
    return name.partition(".")[0] in PACKAGES or _is_installed(getattr(sys.modules.get(name), "__file__", None))


@functools.lru_cache(4096)
def _is_installed(file: object) -> bool:
    return isinstance(file, str) and not _INSTALLED.isdisjoint(Path(file).parts)
