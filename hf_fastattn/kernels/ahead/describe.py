"""Descriptions of kernels: everything that a compilation depends on, without tensors, a GPU or a driver.

A description has what Triton derives from a launch before it compiles: types, alignments, constants, options and architecture.
Any process can compile it, and Triton then finds the result on disk at the launch itself, since the key is the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Any

from ..host import gpu, launch
from . import locks

# Seconds of a compilation, measured: the longest are compiled first. Others take less than half a second.
SECONDS = {
    "prefill_hopper_kernel": 4.0,
    "prefill_kernel": 1.5,
    "split_kv_kernel": 1.3,
    "lean_kernel": 1.3,
    "merge_shares_kernel": 0.8,
}
SECONDS |= {"linear_rows_kernel": 0.6, "gate_up_kernel": 0.6, "down_kernel": 0.6}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The description of one compiled variant of a kernel.

    module, name: where the kernel is. arch: compute capability, as `gpu.arch`. signature, constants, attrs, options: those of
    Triton's compiler, in JSON's types (`_plain`).
    """

    module: str
    name: str
    arch: int
    signature: Any
    constants: Any
    attrs: Any
    options: Any

    @property
    def seconds(self) -> float:
        """About how long it takes to compile."""
        return SECONDS.get(self.name, 0.4)

    def source(self) -> tuple[Any, dict[str, Any]]:
        """(the source, the options) for Triton's compiler."""
        kernel = _named(self.module, self.name)
        kind = _source_class(kernel)
        return kind(kernel, _made(self.signature), _made(self.constants), _made(self.attrs)), _made(self.options)

    @cached_property
    def key(self) -> str:
        """The name of its folder in Triton's cache."""
        from triton.compiler.compiler import get_cache_key

        source, options = self.source()
        backend = _backend(self.arch)
        text = get_cache_key(source, backend, backend.parse_options(dict(options)), _environment())
        return locks.key_of(hashlib.sha256(text.encode()).hexdigest())

    def compile(self) -> None:
        """Compile it into Triton's cache, unless it is there, and the function in C by which Triton before 3.9 launches it.

        That function needs libcuda and a C compiler, without which it is compiled at the first launch.
        """
        from triton.backends.nvidia import driver
        from triton.compiler import compile

        source, options = self.source()
        compiled = compile(source, target=target(self.arch), options=options)
        if locks.has_launchers():
            with contextlib.suppress(Exception):
                driver.CudaLauncher(source, compiled.metadata)
                (locks.folder() / self.key / locks.LAUNCHER).touch()

    def as_json(self) -> list[Any]:
        return [getattr(self, field.name) for field in dataclasses.fields(self)]


def describe(
    kernel: Any, args: tuple[Any, ...], named: dict[str, Any], arch: int, known: dict[object, Kernel] | None = None
) -> Kernel:
    """The description of the variant that Triton compiles for a launch with these arguments on a GPU of this architecture.

    known: descriptions of earlier launches, to which it is added."""
    from triton import knobs

    named = {**named, "debug": named.get("debug", kernel.debug) or knobs.runtime.debug}
    for name in ("instrumentation_mode", "fpsan_homomorphic_casts"):  # the second from Triton 3.9 on
        if hasattr(knobs.compilation, name):
            named[name] = getattr(knobs.compilation, name)
    backend = _backend(arch)
    bound, specialisation, options = _binder(kernel, arch)(*args, **named)
    key = kernel, arch, tuple(specialisation), str(options)  # as Triton tells variants apart in a process
    if known is not None and key in known:
        return known[key]
    options, *rest = kernel._pack_args(backend, named, bound, specialisation, options)
    own = {name: value for name, value in vars(options).items() if name != "extern_libs"}  # paths, which Triton adds again
    found = Kernel(kernel.module, kernel.fn.__qualname__, arch, *map(_plain, (*rest, own)))
    if known is not None:
        known[key] = found
    return found


def prepare() -> None:
    """Import and compute what all compilations need, and compile what Triton's driver needs."""
    from triton.backends.nvidia import driver

    launch.import_triton()
    with contextlib.suppress(Exception):  # without libcuda
        driver.CudaUtils()


def hash_code(kernels: Iterable[tuple[str, str]]) -> None:
    """Import kernels, by their modules and names, and compute the hashes of their code, which the first launch of each needs."""
    for module, name in kernels:
        _named(module, name).cache_key  # noqa: B018 (it is kept)


def compile_launchers(kernels: Sequence[Kernel]) -> None:
    """Compile what launches these kernels, which are compiled (`Kernel.compile`): in threads, as C compilers are processes."""
    prepare()
    apart = {str(kernel.signature): kernel for kernel in kernels}  # kernels with one signature share the function in C
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(Kernel.compile, apart.values()))
    for kernel in kernels:
        kernel.compile()


@contextmanager
def describing(target: gpu.Target, before: Callable[[], None] | None = None) -> Iterator[dict[object, Kernel]]:
    """A context in which this thread's launches of tensors without memory (meta) are described, for a GPU of this kind.

    Nothing is launched, kernels of other packages neither: their pointers would be null. Yields the descriptions. before: called
    before each of them.
    """
    _skip_others()
    found: dict[object, Kernel] = {}

    def note(kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if before is not None:
            before()
        describe(kernel, args, named, target.arch, found)

    outer = gpu.thread.target, launch.thread.describe
    gpu.thread.target, launch.thread.describe = target, note
    try:
        yield found
    finally:
        gpu.thread.target, launch.thread.describe = outer


@cache
def _skip_others() -> None:
    """From now on a kernel of Triton that a thread calls while its launches are described does nothing. It would end the work of
    the process on the GPU, and an autotuner would keep what it measures. All forms of kernels are called by this method."""
    from triton.runtime.jit import KernelInterface

    inner = KernelInterface.__getitem__

    @functools.wraps(inner)
    def run(self: Any, grid: Any) -> Any:
        return inner(self, grid) if launch.thread.describe is None else _nothing

    KernelInterface.__getitem__ = run


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


@cache
def target(arch: int) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", arch, 32)


@cache
def _backend(arch: int) -> Any:
    from triton.compiler.compiler import make_backend

    return make_backend(target(arch))


@cache
def _binder(kernel: Any, arch: int) -> Any:
    from triton.runtime.jit import create_function_from_signature

    return create_function_from_signature(kernel.signature, kernel.params, _backend(arch))


def _source_class(kernel: Any) -> Any:
    from triton.compiler import ASTSource

    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    return ASTSource


def _environment() -> dict[str, str]:
    from triton._C.libtriton import get_cache_invalidating_env_vars

    found: dict[str, str] = get_cache_invalidating_env_vars()
    return found


# Constants are numbers, strings, types, kernels, layouts, and tuples and classes of them. JSON has the first two. The others are
# lists that begin with a word.


def _plain(value: Any) -> Any:
    """A value in JSON's types."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(function := getattr(value, "fn", value), types.FunctionType):
        return ["function", function.__module__, function.__qualname__]
    if isinstance(value, dict):
        return ["dict", *([_plain(key), _plain(each)] for key, each in value.items())]
    kind = type(value)
    if dataclasses.is_dataclass(kind):
        return [
            "object",
            kind.__module__,
            kind.__qualname__,
            [[f.name, _plain(getattr(value, f.name))] for f in dataclasses.fields(kind)],
        ]
    if isinstance(value, (tuple, list)):
        if hasattr(kind, "_fields"):
            return ["named", kind.__module__, kind.__qualname__, *map(_plain, value)]
        return [kind.__name__, *map(_plain, value)]
    if kind.__module__.startswith("triton.") and kind.__name__ == "dtype":
        return ["dtype", value.name]
    if kind.__name__ == "constexpr":
        return ["constexpr", _plain(value.value)]
    raise TypeError(f"A constant of a kernel is {value!r}, and a description has no form for a {kind.__name__}.")


def _made(plain: Any) -> Any:
    """The value of `_plain`."""
    if not isinstance(plain, list):
        return plain
    word, *rest = plain
    if word in ("tuple", "list"):
        return (tuple if word == "tuple" else list)(map(_made, rest))
    if word == "dict":
        return {_made(key): _made(value) for key, value in rest}
    if word in ("dtype", "constexpr"):
        import triton.language as tl

        return tl.dtype(rest[0]) if word == "dtype" else tl.constexpr(_made(rest[0]))
    named = _named(*rest[:2])
    if word == "function":
        return named
    if word == "named" and issubclass(named, tuple):
        return named(*map(_made, rest[2:]))
    if word != "object" or not dataclasses.is_dataclass(named):
        raise ValueError(f"A description names {rest[0]}.{rest[1]} as a {word}, which it is not.")
    made: Any = object.__new__(named)  # type: ignore[arg-type]
    for name, value in rest[2]:
        object.__setattr__(made, name, _made(value))
    return made


def _named(module: str, name: str) -> Any:
    """A kernel, a device function or a class of constants, of the kernels of this package or of Triton."""
    if not isinstance(module, str) or not re.fullmatch(r"(hf_fastattn\.kernels|triton)(\.\w+)*", module):
        raise ValueError(f"A description names {module}.{name}, which is neither of hf_fastattn.kernels nor of triton.")
    return getattr(importlib.import_module(module), name)
