"""The kernels of a patched model, compiled before their first launch: after patch(), while the process goes on, or by warm()."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.metadata
import json
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Sequence

from .. import hf
from ..kernels.ahead import archive, describe, locks, server
from ..kernels.ahead.describe import Kernel
from . import warm


class Ahead:
    """The work of one patched model. A thread lists its kernels, and another process compiles them (`kernels.ahead.server`).

    reason: why kernels are compiled at their first launch after all; None if they are not.
    """

    def __init__(self, recipe: warm.Recipe):
        self.recipe = recipe
        self.reason: str | None = None
        self.closed = False
        self.server: server.Server | None = None
        self.thread = threading.Thread(target=self._run, name="hf_fastattn: kernels", daemon=True)
        self.thread.start()
        _begun.add(self)

    def _run(self) -> None:
        time.sleep(0.01)  # patch() returns first: it would wait for the interpreter's lock
        # What a launch would do otherwise. One of these threads reads files, and the other runs Python.
        reads = threading.Thread(target=describe.prepare, daemon=True)
        try:
            known = Known(self.recipe)
            if not known.are_there():
                self.server = server.Server()
            reads.start()
            describe.hash_code(known.functions)
            if self.server is None or self.closed:
                return
            kernels = warm.listed(self.recipe, stop=self._stop)
            self.server.run(kernels)
            if self.server.failed and not self.closed:
                self.reason = f"{len(self.server.failed)} did not compile ahead: {next(iter(self.server.failed.values()))}"
            elif self.server.done == len(kernels):
                archive.note(known.name, kernels)
            elif not self.closed:
                self.reason = "the process that compiled them has ended"
        except Exception as error:  # a model of which no small copy can be made; a full disk
            self.reason = None if self.closed else f"{type(error).__name__}: {error}"
        finally:
            if self.server is not None:
                self.server.close()
            if reads.ident is not None:
                reads.join()

    def _stop(self) -> None:
        if self.closed:
            raise InterruptedError

    def close(self) -> None:
        """End the work."""
        self.closed = True
        if self.server is not None:
            self.server.close()


_begun: weakref.WeakSet[Ahead] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    """Wait for the threads: the end of the interpreter would end them within torch's code, which ends the process by a signal."""
    for each in [*_begun]:
        each.close()
        each.thread.join()


def begin(model: hf.PreTrainedModel, lazily: bool, page: int = 0) -> Ahead | None:
    """Compile what a patched model on a GPU will launch. None if that is not possible; a reason that a user can remove is said.

    lazily: compile nothing, and only import the kernels that the environment names. page: see `warm.Recipe`.
    """
    if model.device.type != "cuda":
        return None
    archive.import_of_environment()
    if lazily:
        return None
    if (reason := server.why_not()) is not None:
        hf.warn_once(f"Kernels are compiled at their first launch, as {reason}.")
        return None
    try:
        recipe = warm.Recipe.of(model, batch=page)
    except (ValueError, RuntimeError):  # no kernels that are known ahead, or no GPU that runs them
        return None
    made = Ahead(recipe)
    weakref.finalize(model, made.close)
    return made


_VOLATILE = {
    "_name_or_path",
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "use_cache",
    "_attn_implementation",
}


class Known:
    """A file in Triton's cache with the keys of a recipe's kernels, so that nothing needs to be listed again."""

    def __init__(self, recipe: warm.Recipe):
        triton, config = importlib.metadata.version("triton"), recipe.config.to_dict()
        own = {name: value for name, value in config.items() if name not in _VOLATILE and not name.endswith("token_id")}
        facts = [recipe.cls.__qualname__, own, *map(str, recipe[2:]), triton, archive.sources()]
        text = json.dumps(facts, sort_keys=True, default=str)
        self.name = f"hf_fastattn-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
        self.functions: list[tuple[str, str]] = []

    def are_there(self) -> bool:
        """Whether it exists and all of these kernels are compiled. Then it has their modules and names."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            held = json.loads((locks.folder() / self.name).read_text())
            self.functions = [(module, name) for module, name in held["functions"]]
            return all(map(locks.is_there, held["keys"]))
        return False


def compile_all(kernels: Sequence[Kernel]) -> str:
    """Compile kernels into Triton's cache, in other processes. Returns a sentence with their number and the time. Raises
    RuntimeError if one does not compile, and OSError if there can be no process."""
    began, missing = time.perf_counter(), [kernel for kernel in kernels if not locks.is_there(kernel.key)]
    if missing and (reason := server.why_not()) is not None:
        raise RuntimeError(f"Kernels cannot be compiled ahead: {reason}.")
    if missing:
        _compile(missing)
    seconds = time.perf_counter() - began
    return f"{len(missing)} kernels compiled in {seconds:.1f} s, {len(kernels) - len(missing)} were there."


def _compile(kernels: Sequence[Kernel]) -> None:
    process = server.Server()
    work = threading.Thread(target=process.run, args=(kernels,), daemon=True)
    work.start()
    try:
        while work.is_alive():
            _show(f"{process.done} of {len(kernels)} kernels compiled")
            work.join(0.1)
    finally:
        process.close()
        _show("")
    for name, error in process.failed.items():
        raise RuntimeError(f"{name} does not compile: {error}")
    if process.done < len(kernels):
        raise RuntimeError("The process that compiles kernels has ended; they are compiled at their first launch.")


def _show(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def warm_up(recipe: warm.Recipe, rows: Iterable[int] | None, tokens: int) -> str:
    """Compile what a recipe launches; arguments as in `warm.listed`. Returns the sentence of `compile_all`."""
    kernels = warm.listed(recipe, rows, tokens)
    said = compile_all(kernels)
    if is_whole(rows, tokens):
        archive.note(Known(recipe).name, kernels)
    return said


def is_whole(rows: Iterable[int] | None, tokens: int) -> bool:
    """Whether these arguments give the list of kernels that is compiled ahead."""
    return rows is None and tokens == warm.LONGEST
