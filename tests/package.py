"""Checks the contents of a folder's sdist and wheel, and runs the README's code with the installed wheel; for .ci/package."""

import os
import re
import runpy
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))

import checkpoint
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parent.parent
OURS = {"hf_fastattn", "hf_fastattn_autoload.py", "hf_fastattn_cli"}


def contents(folder: Path) -> None:
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        _, _, shown = archive.read(metadata).decode().partition("\n\n")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert shown == runpy.run_path(str(ROOT / "setup.py"))["absolute"](readme), "The wheel's README has other links"
    tracked = subprocess.run(["git", "ls-files", *OURS], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert inside == set(tracked), f"{wheel.name} and the repository differ by {sorted(inside ^ set(tracked))}"
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    wanted = {name.partition("/")[0] for name in tracked} - {".github", ".gitignore"}
    made = {"hf_fastattn.egg-info", "PKG-INFO", "setup.cfg"}
    assert inside == wanted | made, f"{sdist.name} and the repository differ by {sorted(inside ^ (wanted | made))}"


@torch.no_grad()
def runs() -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = str(checkpoint.save(Path(folder)))
        model = AutoModelForCausalLM.from_pretrained(saved, attn_implementation="lean")  # hf_fastattn has not been imported
        assert "hf_fastattn" not in sys.modules
        assert model.generate(torch.arange(8)[None], max_new_tokens=4).shape == (1, 12)
        import hf_fastattn

        assert Path(hf_fastattn.__file__).is_relative_to(sys.prefix), hf_fastattn.__file__
        code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
        exec(re.sub(r'"HuggingFaceTB/[^"]*"', repr(saved), code), {})
    subprocess.run(["hf-fastattn", "backends"], check=True)


if __name__ == "__main__":
    contents(Path(sys.argv[1]))
    runs()
