"""Refusals as a user of the command line reads them: with its options instead of parameters, and with the corrected call."""

import difflib
import inspect
import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from typer.models import OptionInfo

UNKNOWN = re.compile(r"Unknown [\w ]*'(.+?)'(?:; known[\w ]*:|\. Near it:) ([^.]+)\.")
MISSING = re.compile(r"needs (--[\w-]+), .* for example (\w+)\.")
FIRST = re.compile(r"(?:\w+(?:, | and ))*\w+(?= (?:must|counts?|is|are)\b)")  # the subject of the sentence


def as_options(text: str, command: Callable[..., Any]) -> str:
    """The text with options in place of this command's parameters, where they are the subject, or have an underscore or a "=".
    Arguments of a function stay."""
    subject = FIRST.match(text)
    first, rest = text[: subject.end() if subject else 0], text[subject.end() if subject else 0 :]
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        for about in getattr(parameter.annotation, "__metadata__", ()):
            if isinstance(about, OptionInfo):
                named = about.default  # what Option() got first, inside of Annotated
                option = named if isinstance(named, str) else f"--{name.replace('_', '-')}"
                first = re.sub(rf"(?<![\w-]){name}\b", option, first)
                rest = re.sub(rf"(?<![\w-]){name}=(?=[\s,;.])", option, rest)
                rest = re.sub(rf"(?<![\w(,-])(?<!, ){name}=(?:'(\w+)'|(\d+))", rf"{option} \1\2", rest)
                if "_" in name:
                    rest = re.sub(rf"(?<![\w-]){name}(?![\w=])(?![^(]*\))", option, rest)
    return first + rest


def corrected(arguments: Sequence[str], text: str) -> str:
    """ " Try: ..." with the nearest known name, or with the option that is missing; "" if there is none."""
    words = list(arguments)
    if found := UNKNOWN.search(text):
        near = difflib.get_close_matches(found[1], found[2].split(", "), 1)
        words = [",".join(near[0] if near and part == found[1] else part for part in word.split(",")) for word in words]
    elif found := MISSING.search(text):
        words += [found[1], found[2]]
    return f" Try: hf-fastattn {shlex.join(words)}" if words != list(arguments) else ""
