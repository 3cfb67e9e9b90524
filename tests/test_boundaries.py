"""Imports inside the package go down the list, only hf/ imports Transformers, and the package does not import benchmarks/."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import hf_fastattn
from hf_fastattn.patches.calls.methods import METHODS

ROOT = Path(hf_fastattn.__file__).parent
TESTS = Path(__file__).parent
ORDER = [  # a part only imports parts from later lines
    ("__main__",),
    ("distillation", "evaluation", "explanation"),
    ("patches",),
    ("batch",),
    ("backends", "caches"),
    ("registry", "training"),
    ("attention",),
    ("context_parallel", "streaming"),
    ("hf", "model_shapes", "report", "tasks"),
    ("kernels",),
]
LEVEL = {part: level for level, parts in enumerate(ORDER) for part in parts}
FILES = [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]
COMMANDS = sorted((ROOT.parent / "hf_fastattn_cli").glob("*.py"))
BENCHMARKS = sorted((ROOT.parent / "benchmarks").rglob("*.py"))


def imports(path: Path) -> list[tuple[str, ...]]:
    """The dotted names that a file imports, as tuples; names of the package without its own name."""
    package = path.relative_to(ROOT.parent).parent.parts
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            found += [(*base, alias.name) for alias in node.names]
    return [name[1:] if name[0] == "hf_fastattn" else ("outside", *name) for name in found]


def test_imports_go_down_the_list():
    for path in FILES:
        here = path.relative_to(ROOT).with_suffix("").parts
        assert here[0] in LEVEL, f"{path} has no place in the order of imports: give it one here and in the design"
        for there in imports(path):
            if there[0] == "outside" or not there:
                continue
            assert there[0] in LEVEL or there[0] == "__version__", f"{path} imports {'.'.join(there)} from the package's root"
            if there[0] in LEVEL and there[0] != here[0]:
                assert LEVEL[there[0]] > LEVEL[here[0]], f"{path} imports {'.'.join(there)}, which is not below it"


def test_imports_of_patches_go_down_its_rooms():
    rooms = ["calls", "ranks", "graphs", "fused"]
    for path in FILES:
        here = path.relative_to(ROOT).parts
        if here[0] == "patches" and here[1] in rooms:
            for there in imports(path):
                if there[:1] == ("patches",):
                    assert there[1] in rooms[rooms.index(here[1]) :], f"{path} imports {'.'.join(there)}, which is not below it"
    for folder in {path.parent for path in FILES if "patches" in path.parts}:
        assert len(list(folder.glob("*.py"))) <= 13, f"{folder} has more than a dozen files"


def test_no_name_of_a_package_is_also_one_of_its_modules():
    """Which of the two `package.name` gives would depend on what was imported before."""
    packages = [module for name, module in sys.modules.items() if name.startswith("hf_fastattn") and hasattr(module, "__path__")]
    inside = [(package, name) for package in packages for _, name, _ in pkgutil.iter_modules(package.__path__)]
    assert len(packages) > 10
    assert [(package.__name__, name) for package, name in inside if not inspect.ismodule(getattr(package, name, sys))] == []


def test_files_of_attention_import_each_other_in_no_circle():
    files = [path for path in FILES if path.parent.name == "attention" and path.parent.parent == ROOT]
    needs = {path.stem: {name[1] for name in imports(path) if name[0] == "attention"} for path in files}
    assert needs["function"] > {"backend", "masks", "runners", "training"}
    needs["step"].remove("masks")  # for its type alone
    TopologicalSorter(needs).prepare()  # or CycleError


def test_only_hf_imports_transformers():
    for path in FILES + COMMANDS:
        outside = {name[1] for name in imports(path) if name[0] == "outside"}
        assert "benchmarks" not in outside, f"{path} imports benchmarks, which a wheel does not have"
        if not path.is_relative_to(ROOT / "hf"):
            assert "transformers" not in outside, f"{path} imports transformers; go through hf/"


def test_no_data_is_run_as_code():
    """Reading a pickle, or an object that torch.distributed pickles, runs code that came with the data."""
    unsafe = r"pickle\.(loads?|Unpickler)|(marshal|shelve|dill|cloudpickle|joblib)(\..*)?|(torch|numpy|np)\.load|eval|exec"
    for path in FILES + COMMANDS:
        names = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
        names |= {".".join(name[1:]) for name in imports(path) if name[0] == "outside"}
        assert not [name for name in names if re.fullmatch(rf"{unsafe}|(.*\.)?\w+_object(_list)?", name)], path


def test_one_file_knows_the_methods_of_generate():
    names = set(METHODS) - {"generate", "generate_batch", "init_continuous_batching"}  # public names, and words of docstrings
    knows = [path for path in FILES if any(name in path.read_text() for name in names)]
    assert knows == [ROOT / "hf" / "generation.py"]


def test_benchmarks_import_the_package_by_its_name():
    """They import the package by its name and each other relatively: the command line loads the folder under another name."""
    allowed = {"outside", "__version__", *LEVEL} - {"__main__"}
    for path in BENCHMARKS:
        for there in imports(path):
            assert there[0] in allowed, f"{path} imports {'.'.join(there)}"
        absolute = re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
        assert "benchmarks" not in absolute, f"{path} imports its own folder by a name that may be somebody else's"


def test_kernels_need_torch_and_triton_only():
    allowed = {"torch", "triton", "numpy", "__future__"} | set(__import__("sys").stdlib_module_names)
    files = list((ROOT / "kernels").rglob("*.py"))
    assert {path.parent.name for path in files} > {"kernels"}  # including subfolders
    for path in files:
        assert {name[1] for name in imports(path) if name[0] == "outside"} <= allowed, path.name


def test_heads_of_kernels_have_one_form():
    """The shape of each pointer is behind it, and the file says where values are rounded, the limits and the oracle."""
    kernels = []
    for path in (ROOT / "kernels").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        lines, tree = text.splitlines(), ast.parse(text)
        found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")]
        for kernel in found:
            for arg in kernel.args.args:
                if arg.annotation is None and (arg.arg[0].isupper() or arg.arg.endswith("_desc")):
                    line = lines[arg.lineno - 1].strip()
                    assert re.match(rf"{arg.arg},  # (\(.*\)|of FORM)", line), f"{path}, {kernel.name}: {line}"
        if found and path.parent != ROOT / "kernels":
            said = text + (path.parent / "__init__.py").read_text(encoding="utf-8")
            assert all(re.search(rf"\b{word}:\s", said) for word in ("Rounds", "Limits", "Oracle")), path
        kernels += found
    assert len(kernels) > 25


def test_make_test_interprets_every_file_that_needs_it():
    """Tests that are skipped unless Triton is interpreted would otherwise never run."""
    makefile = (TESTS.parent / "Makefile").read_text()
    (files,) = re.findall(r"^KERNELS := ((?:.*\\\n)*.*)$", makefile, re.MULTILINE)
    runs = [f"$(PYTEST) {of}$(KERNELS)" for of in ('-m "not slow" ', "-m slow ", "")]
    assert re.findall(r"^\tTRITON_INTERPRET=1 (.*)$", makefile, re.MULTILINE) == runs
    skipped = re.compile(r'mark\.skipif\(not INTERPRETED|or TRITON_INTERPRET=[1]"|\bruns_ker[n]els\b|\bRUNN[A]BLE\b')
    needed = {path.name for path in TESTS.glob("test_*.py") if skipped.search(path.read_text())} - {"test_gpu.py"}
    assert "test_exchange_kernels.py" in needed and needed <= set(re.findall(r"tests/(\w+\.py)", files))


# Files of which `make test` runs nothing, beside those for GPUs, whose names end with gpu: all their tests start processes.
SLOW = {"test_ranks_matrix", "test_ranks_meshes", "test_ranks_sums", "test_training_processes", "test_types"}


def test_make_test_runs_tests_of_every_file_and_files_are_short():
    found = set()
    for path in TESTS.glob("test_*.py"):
        body = ast.parse(path.read_text()).body
        marks = [ast.unparse(node.value) for node in body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
        tests = [node for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        quick = [test for test in tests if "pytest.mark.slow" not in map(ast.unparse, test.decorator_list)]
        if not quick or any("mark.slow" in mark for mark in marks):
            found.add(path.stem)
    assert found == SLOW
    long = [str(path) for path in FILES + COMMANDS if len(path.read_text(encoding="utf-8").splitlines()) > 400]
    assert not long, "see The order of imports in CONTRIBUTING.md"
