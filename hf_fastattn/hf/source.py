"""The source of models."""

from __future__ import annotations

import sys
from pathlib import Path


def modeling_source(config_class: type) -> str:
    """The file with the models of a config class; "" if there is none."""
    own = getattr(sys.modules.get(config_class.__module__), "__file__", None) or ""
    path = Path(own.replace("configuration_", "modeling_"))
    return path.read_text(encoding="utf-8") if path.suffix == ".py" and path.is_file() else ""
