"""The README as the package index shows it. Everything else is in pyproject.toml."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^][]*)\]\((?![a-z]+:)([^)\s]+)\)")


def absolute(text: str) -> str:
    """Markdown whose links into this repository name its URL in pyproject.toml, at the tag of this version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def link(found: re.Match) -> str:
        picture, words, path = found.groups()
        path = f"README.md{path}" if path.startswith("#") else path
        return f"{picture}[{words}]({project['urls']['Repository']}/{'raw' if picture else 'blob'}/v{project['version']}/{path})"

    blocks = re.split(r"(^```.*?^```)", text, flags=re.DOTALL | re.MULTILINE)  # code is at the odd places
    return "".join(block if i % 2 else LINK.sub(link, block) for i, block in enumerate(blocks))


if __name__ == "__main__":
    from setuptools import setup

    readme = absolute((ROOT / "README.md").read_text(encoding="utf-8"))
    setup(long_description=readme, long_description_content_type="text/markdown")
