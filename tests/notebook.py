"""Runs the notebooks of examples/. `python tests/notebook.py FILE` writes its outputs into it; test_examples.py compares them."""

import ast
import contextlib
import io
import json
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def cells_of(name: str) -> list[dict]:
    """The cells of examples/<name>.ipynb."""
    return json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]


def run(cells: list[dict]) -> list[str]:
    """What each cell of code prints, and its last expression if it has one."""
    names: dict = {}
    said = []
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        tree, out = ast.parse("".join(cell["source"])), io.StringIO()
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(out):
            exec(compile(tree, "cell", "exec"), names)
            value = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        said.append(out.getvalue() + ("" if value is None else f"{value!r}\n"))
    return said


def shown(cells: list[dict]) -> list[str]:
    """The committed outputs of the cells of code."""
    return ["".join(line for out in cell["outputs"] for line in out["text"]) for cell in cells if cell["cell_type"] == "code"]


if __name__ == "__main__":
    file = Path(sys.argv[1])
    notebook = json.loads(file.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, text) in enumerate(zip(code, run(notebook["cells"]), strict=True), 1):
        output = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell |= {"execution_count": number, "outputs": [output] if text else []}
    file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
