"""Tables in Markdown and pictures from the JSON under examples/results.

    python -m benchmarks.report                                                  # print the tables
    python -m benchmarks.report README.md docs/results.md docs/results/*.md      # write them, and draw the pictures

<!-- measured NAME: begin --> and <!-- measured NAME: end --> enclose the section with this name; without a name, all sections
without marks. A section without a JSON file is omitted. The commands of a page's runs are footnotes, before its last mark.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from .provenance import older
from .sections import HEADLINE, SECTIONS
from .sections_steps import families_headline, first_tokens_of_chats
from .words import on

RESULTS = Path("examples/results")
MORE = {"families_h100.json": families_headline, "first_tokens_8b.json": first_tokens_of_chats}  # of the headline
FOOTNOTE = re.compile(r"\[\^(`.+?`[^]]*)\]")
MARKS = re.compile(r"<!-- measured(?: (\w+))?: begin -->\n(.*?)<!-- measured(?: \1)?: end -->", re.DOTALL)


def report(folder: Path, names: Iterable[str] | None = None, pictures: str = "") -> str:
    """The sections with these names, or all, if their JSON has rows; each machine with its versions is named once.

    pictures: the folder, relative to the document.
    """
    parts, known = [], []
    for name, file, section in SECTIONS:
        path = folder / file
        if (name == HEADLINE if names is None else name not in names) or not path.exists():
            continue
        result = json.loads(path.read_text())
        if not (result.get("rows") or result.get("runs") or result.get("samples")):
            continue
        if name == HEADLINE:
            parts.append(section(result))
            parts += [text(json.loads((folder / other).read_text())) for other, text in MORE.items() if (folder / other).exists()]
            continue
        if "method" in result.get("conditions", ()) and on(result) not in known:
            known.append(on(result))
            parts.append(f"{known[-1]}.")
        picture = path.with_suffix(".png")
        parts += [f"A note in the JSON: {result['note']}"] if "note" in result else []
        parts += filter(None, [older(result)])
        parts += [section(result), *([f"![{name}]({pictures or folder}/{picture.name})"] if picture.exists() else [])]
    return "\n\n".join(parts)


def rewrite(document: str, folder: Path, pictures: str = "") -> str:
    """The document with new text between its marks."""
    named = {match[1] for match in MARKS.finditer(document) if match[1]}
    if unknown := named - {name for name, *_ in SECTIONS}:
        raise ValueError(f"There are no sections {', '.join(sorted(unknown))}; known are {', '.join(n for n, *_ in SECTIONS)}.")

    def fill(match: re.Match) -> str:
        wanted = [match[1]] if match[1] else [name for name, *_ in SECTIONS if name not in {*named, HEADLINE}]
        mark = f"<!-- measured{' ' + match[1] if match[1] else ''}"
        return f"{mark}: begin -->\n{report(folder, wanted, pictures)}\n{mark}: end -->"

    text, notes = numbered(MARKS.sub(fill, document))
    if not notes:
        return text
    end = text.rindex("<!-- measured")
    return f"{text[:end]}\n{notes}\n{text[end:]}"


def numbered(text: str) -> tuple[str, str]:
    """The text with the numbers of its footnotes, and their definitions. Equal ones have one number."""
    notes: dict[str, int] = {}
    text = FOOTNOTE.sub(lambda match: f"[^{notes.setdefault(match[1], len(notes) + 1)}]", text)
    return text, "\n".join(f"[^{number}]: {note}" for note, number in notes.items())


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.report") -> int:
    """Print the tables, or write them into a document and draw the pictures. Returns 0."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("documents", nargs="*", type=Path, help="Markdown files in which to write the tables between the marks")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON (default: %(default)s)")
    args = parser.parse_args(argv)
    if not args.documents:
        if not (text := report(args.results)):
            parser.error(f"{args.results} has no results; run a benchmark first, or name a folder with --results.")
        print("\n\n".join(numbered(text)))
        return 0
    for document in args.documents:
        if not document.is_file():
            parser.error(f"there is no file {document}.")
        if not MARKS.search(document.read_text()):
            parser.error(f"{document} has no marks <!-- measured: begin --> and <!-- measured: end -->.")
    try:
        from . import pictures
    except ImportError as error:
        parser.error(f'pictures need matplotlib ({error}); run `pip install "hf-fastattn[bench]"`.')
    for path in pictures.draw(args.results):
        print(path)
    for document in args.documents:
        document.write_text(rewrite(document.read_text(), args.results, relative(args.results, document)))
    return 0


def relative(folder: Path, document: Path) -> str:
    """The path of the folder for a link in the document."""
    return Path(os.path.relpath(folder, document.parent)).as_posix()


if __name__ == "__main__":
    raise SystemExit(main())
