"""The source of models."""

from __future__ import annotations

import sys
from pathlib import Path


def modeling_source(config_class: type) -> str:
    """The file with the models of a config class, modeling_*.py beside configuration_*.py; "" if there is none."""
    path = Path(getattr(sys.modules.get(config_class.__module__), "__file__", None) or "")
    path = path.with_name(path.name.replace("configuration_", "modeling_")) if path.name else path
    return path.read_text(encoding="utf-8") if path.suffix == ".py" and path.is_file() else ""
