"""The requirements in pyproject.toml, and the README of the package index."""

import ast
import re
import runpy
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_what_is_imported_is_declared():
    requirements = [*PROJECT["dependencies"], "datasets"]  # installed with lm-eval
    for extra in PROJECT["optional-dependencies"].values():
        requirements += extra
    declared = {re.match(r"[\w-]+", requirement)[0].replace("-", "_") for requirement in requirements}
    declared |= {"hf_fastattn_autoload", "hf_fastattn_cli"}  # in the wheel, too
    for path in (ROOT / "hf_fastattn").rglob("*.py"):
        imported = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.partition(".")[0])
        assert imported - sys.stdlib_module_names <= declared, path


def test_badges_are_of_this_project():
    """Of workflows that exist, of its name on the package index, of its licence; the links begin with URLs of pyproject.toml."""
    badges = re.findall(r"\[!\[\w+\]\((.+?)\)\]\((.+?)\)", (ROOT / "README.md").read_text())
    urls = PROJECT["urls"]
    flows = [badge.removeprefix(f"{urls['Repository']}/actions/workflows/") for badge, _ in badges[:2]]
    assert [(ROOT / ".github" / "workflows" / flow.removesuffix("/badge.svg")).is_file() for flow in flows] == [True, True]
    licence = PROJECT["license"].replace("-", "--")
    shields = [f"pypi/v/{PROJECT['name']}", f"badge/license-{licence}-blue"]
    assert [badge for badge, _ in badges[2:]] == [f"https://img.shields.io/{each}" for each in shields]
    known = (urls["Repository"], urls["Documentation"], f"https://pypi.org/project/{PROJECT['name']}/")
    assert all(link.startswith(known) for _, link in badges)


def test_links_of_the_readme_are_absolute_for_the_package_index():
    absolute = runpy.run_path(str(ROOT / "setup.py"))["absolute"]
    readme = (ROOT / "README.md").read_text()
    shown, tag = absolute(readme), f"v{PROJECT['version']}"
    url = re.escape(PROJECT["urls"]["Repository"])
    paths = re.findall(rf"\]\({url}/(?:raw|blob)/{tag}/([^)#]+)", shown)
    assert len(paths) > 9 and all((ROOT / path).is_file() for path in paths)
    text = re.sub(r"(?ms)^```.*?^```|`[^`]*`", "", shown)
    assert re.findall(r"\]\((?!https?://)|(?:src|href|srcset)=\"(?!https?://)", text) == []
    code = "```python\nf[0](x)\n```\n"
    assert absolute(code) == code
    picture = f"{PROJECT['urls']['Repository']}/raw/{tag}/a.png"
    assert absolute("[x](https://y) ![z](a.png)\n" + code) == f"[x](https://y) ![z]({picture})\n{code}"
