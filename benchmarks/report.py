"""Tables in Markdown and pictures from the JSON under examples/results.

    python -m benchmarks.report              # print the tables
    python -m benchmarks.report README.md    # write them between the marks in this file, and draw the pictures

<!-- measured NAME: begin --> and <!-- measured NAME: end --> enclose the section of that name; without a name, all sections that
have no marks of their own. A section whose JSON is not there is left out.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path

from .sections import SECTIONS, on

RESULTS = Path("examples/results")
MARKS = re.compile(r"<!-- measured(?: (\w+))?: begin -->\n(.*?)<!-- measured(?: \1)?: end -->", re.DOTALL)


def report(folder: Path, names: Iterable[str] | None = None) -> str:
    """The sections of these names, or all, as far as their JSON has rows; each machine and its versions named once."""
    parts, known = [], []
    for name, file, section in SECTIONS:
        path = folder / file
        if (names is not None and name not in names) or not path.exists():
            continue
        result = json.loads(path.read_text())
        if not (result.get("rows") or result.get("runs")):
            continue
        if "method" in result["conditions"] and on(result) not in known:
            known.append(on(result))
            checked = "Kernels were checked before they were timed, and `patch()` against steps without a graph"
            parts.append(f"{known[-1]}, bfloat16, medians. {checked}; peers in the same run.")
        picture = path.with_suffix(".png")
        parts += [result["note"]] if "note" in result else []
        parts += [section(result), *([f"![{name}]({RESULTS / picture.name})"] if picture.exists() else [])]
    return "\n\n".join(parts)


def rewrite(document: str, folder: Path) -> str:
    """The document with what stands between its marks written anew."""
    named = {match[1] for match in MARKS.finditer(document) if match[1]}
    if unknown := named - {name for name, *_ in SECTIONS}:
        raise ValueError(f"There are no sections {', '.join(sorted(unknown))}; known are {', '.join(n for n, *_ in SECTIONS)}.")

    def fill(match: re.Match) -> str:
        wanted = [match[1]] if match[1] else [name for name, *_ in SECTIONS if name not in named]
        mark = f"<!-- measured{' ' + match[1] if match[1] else ''}"
        return f"{mark}: begin -->\n{report(folder, wanted)}\n{mark}: end -->"

    return MARKS.sub(fill, document)


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.report") -> int:
    """Print the tables, or write them into a document and draw the pictures. Returns 0."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("document", nargs="?", type=Path, help="Markdown file to write the tables into, between its marks")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.document is None:
        if not (text := report(args.results)):
            parser.error(f"{args.results} holds no results; run a benchmark first, or name a folder with --results.")
        print(text)
        return 0
    text = args.document.read_text()
    if not MARKS.search(text):
        parser.error(f"{args.document} has no marks <!-- measured: begin --> and <!-- measured: end -->.")
    try:
        from . import pictures
    except ImportError as error:
        parser.error(f'pictures need matplotlib ({error}); run `pip install "hf-fastattn[bench]"`.')
    for path in pictures.draw(args.results):
        print(path)
    args.document.write_text(rewrite(text, args.results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
