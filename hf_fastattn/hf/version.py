"""The supported versions of Transformers."""

from __future__ import annotations

import re
import warnings

OLDEST, NEWEST = (5, 17), (5, 24)


def number_of(version: str) -> tuple[int, ...]:
    """(major, minor)"""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def check_version(version: str) -> None:
    """Raise ImportError if Transformers is too old; warn if it is newer than the newest tested version."""
    found = number_of(version)
    if found < OLDEST:
        raise ImportError(
            f"hf_fastattn needs transformers >= {OLDEST[0]}.{OLDEST[1]}; found {version}. "
            'Upgrade it with `pip install -U "transformers>=5.17"`.'
        )
    if found > NEWEST:
        warnings.warn(
            f"hf_fastattn was tested with transformers up to {NEWEST[0]}.{NEWEST[1]}; found {version}. "
            'If something looks wrong, compare with attn_implementation="sdpa" and report it.',
            stacklevel=2,
        )
