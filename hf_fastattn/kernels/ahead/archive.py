"""Compiled kernels in one file, for other machines with the same kind of GPU and the same versions.

A zip file: `manifest.json`, and for each kernel the folder of its key in Triton's cache with its code and Triton's description of
it. The import reads and checks everything before it writes anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import warnings
import zipfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from . import locks
from .describe import Kernel

VARIABLE = "HF_FASTATTN_KERNELS"
MANIFEST, SUFFIXES, LIMIT, MOST = "manifest.json", ("cubin", "json"), 64 << 20, 1 << 30  # bytes of a member, of all


@cache
def sources() -> str:
    """A hash of the code of all kernels."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def versions() -> dict[str, str]:
    """What compiled kernels depend on, besides their architecture: the key of Triton's cache changes with each."""
    import triton
    from triton.runtime.cache import triton_key

    build = hashlib.sha256(triton_key().encode()).hexdigest()
    return {"triton": triton.__version__, "the build of triton": build, "the kernels of hf_fastattn": sources()}


def note(name: str, kernels: Sequence[Kernel]) -> None:
    """Write the file of this name in Triton's cache, which says that these kernels are those of one model."""
    with contextlib.suppress(OSError):
        locks.folder().mkdir(parents=True, exist_ok=True)
        functions = [*dict.fromkeys((kernel.module, kernel.name) for kernel in kernels)]
        held = {"keys": [kernel.key for kernel in kernels], "functions": functions}
        part = locks.folder() / f"{name}.part{os.getpid()}"
        part.write_text(json.dumps(held))
        os.replace(part, locks.folder() / name)


def export(kernels: Iterable[Kernel], file: str | os.PathLike[str], about: dict[str, Any]) -> int:
    """Write these compiled kernels to a file; returns their number. about: further facts, which the manifest shows; of them
    "known" is the name for `note`, if they are all kernels of a model.

    Raises ValueError if one is not compiled.
    """
    members: dict[str, bytes] = {}
    kernels = [*kernels]
    for kernel in kernels:
        folder = locks.folder() / kernel.key
        for suffix in SUFFIXES:
            path = folder / f"{kernel.name}.{suffix}"
            if not path.is_file():
                raise ValueError(f"{kernel.name} is not compiled: there is no {path}. Compile the kernels first.")
            members[f"{kernel.key}/{path.name}"] = path.read_bytes()
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in members.items()}
    arches = sorted({kernel.arch for kernel in kernels})
    manifest = {"hf_fastattn kernels": 1, "versions": versions(), "architectures": arches, **about, "members": sums}
    manifest["kernels"] = [kernel.as_json() for kernel in kernels]
    part = Path(f"{os.fspath(file)}.part")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr(MANIFEST, json.dumps(manifest, indent=1))
        for name, data in members.items():
            made.writestr(name, data)
    os.replace(part, file)
    return len(kernels)


def import_(file: str | os.PathLike[str]) -> list[Kernel]:
    """Copy the kernels of a file into Triton's cache; returns their descriptions.

    Raises ValueError, before it writes anything, for a file of other versions or another architecture, or one that is not as
    export() has written it.
    """
    kernels, members, known = _read(file)
    for kernel in kernels:
        with locks.locked(kernel.key):
            if not locks.is_compiled(kernel.key):
                own = {f"{kernel.name}.{suffix}": members[f"{kernel.key}/{kernel.name}.{suffix}"] for suffix in SUFFIXES}
                _write(locks.folder() / kernel.key, own)
    if known is not None:
        note(known, kernels)
    return kernels


def _read(file: str | os.PathLike[str]) -> tuple[list[Kernel], dict[str, bytes], str | None]:
    """The kernels of a file, its members, by their names, and the name for `note`, checked."""
    try:
        with zipfile.ZipFile(file) as opened:
            infos = opened.infolist()
            whole = sum(info.file_size for info in infos) <= MOST and len(infos) <= 10_000
            if not whole or any(info.file_size > LIMIT or info.external_attr >> 28 == 0xA for info in infos):
                raise ValueError("it has a link, a member of more than 64 MiB, more than 1 GiB in all, or too many members")
            data = {info.filename: opened.read(info) for info in infos}
        manifest = json.loads(data.pop(MANIFEST))
        form, sums = manifest["hf_fastattn kernels"], dict(manifest["members"])
        theirs, arches, described = dict(manifest["versions"]), [*manifest["architectures"]], [*manifest["kernels"]]
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"{file} is no whole file of `hf-fastattn warm --export` ({type(error).__name__}: {error}).") from None
    if form != 1 or len(infos) != len(data) + 1 or data.keys() != sums.keys():
        raise ValueError(f"{file} does not have the members that its manifest lists. Export it again.")
    ours = versions()
    if theirs != ours:
        name = next(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
        raise ValueError(
            f"{file} was exported with another version of {name}, {theirs.get(name)!r}; here it is {ours.get(name)!r}. Export it "
            "again with the versions of this environment."
        )
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if 10 * major + minor not in arches:
            raise ValueError(
                f"{file} has kernels for compute capability {', '.join(str(arch / 10) for arch in arches)}, and this GPU has "
                f"{major}.{minor}. Export it with --arch {10 * major + minor}."
            )
    for name, content in data.items():
        if hashlib.sha256(content).hexdigest() != sums[name]:
            raise ValueError(f"{file} is damaged: {name} is not what was exported. Copy or export it again.")
    try:
        kernels = [Kernel(*each) for each in described]
        names = {f"{kernel.key}/{kernel.name}.{suffix}" for kernel in kernels for suffix in SUFFIXES}
        hashes = {locks.key_of(json.loads(data[f"{kernel.key}/{kernel.name}.json"])["hash"]) for kernel in kernels}
        whole = names == data.keys() and hashes == {kernel.key for kernel in kernels}
    except Exception:  # whatever a foreign file may contain
        whole = False
    if not whole:
        raise ValueError(f"{file} has members that are not the kernels it describes. Do not use it; export it again.")
    known = str(manifest.get("known"))
    return kernels, data, known if re.fullmatch(r"hf_fastattn-[0-9a-f]{32}\.json", known) else None


def _write(folder: Path, files: dict[str, bytes]) -> None:
    """Write the files of a kernel, and last the list of them, whose presence says that all are there: Triton's own form."""
    group = {name: str(folder / name) for name in files}
    listed = next(name for name in files if name.endswith(".json"))
    for name, content in {**files, f"__grp__{listed}": json.dumps({"child_paths": group}).encode()}.items():
        part = folder / f"{name}.part{os.getpid()}"
        part.write_bytes(content)
        os.replace(part, folder / name)


_imported: set[str] = set()


def import_of_environment() -> None:
    """Import the file that HF_FASTATTN_KERNELS names, once. One that is refused is reported as a warning."""
    file = os.environ.get(VARIABLE)
    if not file or file in _imported:
        return
    _imported.add(file)
    try:
        import_(file)
    except (OSError, ValueError) as error:
        warnings.warn(f"{VARIABLE}: {error} Kernels are compiled anew.", stacklevel=5)
