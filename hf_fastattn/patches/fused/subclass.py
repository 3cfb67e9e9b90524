"""A module's class, replaced by a subclass with a fused forward().

A method on the instance would refer to the instance: its weights would stay on the GPU after the model is deleted, until Python's
cycle collection runs, and all replicas of a DataParallel would run the method of the first.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex

import torch

from ... import hf
from ...kernels import INTERPRETED
from ...kernels.host import gpu

_MARK = "_hf_fastattn_fused"
_CODE = ("torch.", "transformers.", "hf_fastattn.", "bitsandbytes.nn.modules")  # modules of functions whose launches are seen

Forward = Callable[..., Any]  # of a module's class, with the module as its first argument
Fuse = Callable[[types.FunctionType], Forward]  # returns the fused version of one


def replace(module: torch.nn.Module, fused: Fuse) -> None:
    """Let a module run the forward() that `fused` returns."""
    own = hf.inner_forward(module)
    if own is None:
        module.__class__ = _subclass(type(module), fused)
    else:  # tensor parallelism has already given the instance a method, which refers to the instance
        replace_forward(module, lambda forward: hf.with_inner(forward, functools.partial(fused(own), module)))


def replace_forward(module: torch.nn.Module, change: Callable[[types.FunctionType], Forward]) -> None:
    """Let a module that has its own forward() run the one that `change` returns for it."""
    before: Any = vars(module)["forward"]
    after = vars(module)["forward"] = change(before)
    vars(after)[_MARK] = getattr(before, _MARK, before)


def runs_forward_of_ranks(module: torch.nn.Module) -> bool:
    """Whether a module's own forward() is that of tensor parallelism, fused or not."""
    return hf.inner_forward(module) is not None or hasattr(vars(module).get("forward"), _MARK)


def is_fused(module: torch.nn.Module) -> bool:
    return hasattr(type(module), _MARK)


def runs_fused(module: torch.nn.Module) -> bool:
    """Whether the class has a fused forward(), and nobody has replaced that or the one below it since."""
    *fused, stock = forwards_of(type(module))
    return bool(fused) and all(ours.__wrapped__ is below for ours, below in zip(fused, [*fused[1:], stock], strict=True))


def forwards_of(cls: type[torch.nn.Module]) -> list[Any]:
    """The fused forwards of a class, the last first, and the one that it has without them."""
    found = []
    for each in cls.__mro__:
        if "forward" in vars(each):
            found.append(vars(each)["forward"])
            if _MARK not in vars(each):
                break
    return found


def run_known_code(modules: Iterable[torch.nn.Module], packages: frozenset[str] = frozenset()) -> bool:
    """Whether forward() of the modules' classes, its wrappers and the functions that they call by their names are those of torch,
    Transformers and this package: no other has replaced one, whose kernels would not be seen. packages: others that may."""
    waiting = [forward for cls in dict.fromkeys(map(type, modules)) for forward in forwards_of(cls)]
    for each in waiting:
        if not isinstance(each, types.FunctionType):
            return False
        name = hf.module_of(each)
        if not name.startswith(_CODE) and name.partition(".")[0] not in {*packages, *sys.stdlib_module_names}:
            return False
        found = [*hf.called(each).values()] if name.startswith("transformers.models.") else []
        waiting += [one for one in (*found, getattr(each, "__wrapped__", each)) if one not in waiting]
    return True


def fuses_of(cls: type[torch.nn.Module]) -> tuple[Fuse, ...]:
    """What has been fused in a class, the last first."""
    return tuple(itertools.chain(*(vars(each).get(_MARK, ()) for each in cls.__mro__)))


def is_fused_part(module: torch.nn.Module) -> bool:
    """Whether the fused forward() of a shared layer computes the layer's result on this rank, and no more."""
    return hasattr(vars(module).get("forward"), _MARK) and hf.computes_part(module)


def restore(modules: list[torch.nn.Module]) -> None:
    """Undo replace(), except for modules whose class or forward() others have changed since."""
    for module in modules:
        if is_fused(module):
            module.__class__ = stock(type(module))
        if (before := getattr(vars(module).get("forward"), _MARK, None)) is not None:
            vars(module)["forward"] = before


def stock(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A class without our forward(). One that others have derived from ours (FSDP2) is derived from the stock class instead."""
    if not hasattr(cls, _MARK):
        return cls
    if _MARK in vars(cls):
        return stock(cls.__bases__[0])
    own = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls.__name__, tuple(map(stock, cls.__bases__)), own)


def _subclass(cls: type[torch.nn.Module], fused: Fuse) -> type[torch.nn.Module]:
    """A subclass of `cls` with the same name and the forward() that `fused` returns."""
    return _fused_subclass(cls, fused, cls.forward)  # type: ignore[arg-type]  # a class is hashable


@functools.cache
def _fused_subclass(cls: type[torch.nn.Module], fused: Fuse, forward: types.FunctionType) -> type[torch.nn.Module]:
    ours = fused(forward)

    @functools.wraps(forward)
    def run(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:  # the class may have another forward() since
        return (ours if cls.forward is forward else cls.forward)(self, *args, **kwargs)

    base, fuses = cls, (fused,)
    while _MARK in vars(base):
        base, fuses = base.__bases__[0], (*vars(base)[_MARK], *fuses)

    def reduce(
        self: torch.nn.Module, protocol: SupportsIndex
    ) -> tuple[Any, ...]:  # pickle finds a class by its name, which fused classes share with their base
        return _new, (base, fuses), *base.__reduce_ex__(self, protocol)[2:]

    members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, _MARK: (fused,)}
    return type(cls.__name__, (cls,), {**members, "__reduce_ex__": reduce, "forward": run})


def _new(cls: type[torch.nn.Module], fuses: tuple[Fuse, ...]) -> torch.nn.Module:
    for fused in fuses:
        cls = _subclass(cls, fused)
    return cls.__new__(cls)


def runs_kernels(device: torch.device) -> bool:
    """Whether our kernels run on this device."""
    return INTERPRETED or gpu.on_gpu(device)


def has_kernels(tensor: torch.Tensor) -> bool:
    """Whether our kernels may run on this tensor now."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):  # a DTensor has no address
        return False
    return (gpu.holds(tensor) or INTERPRETED) and not torch.compiler.is_compiling()


def is_autocast(tensor: torch.Tensor) -> bool:
    """Whether torch's autocast changes the dtypes of operations on this device."""
    return torch.is_autocast_enabled(gpu.autocast_type(tensor.device))
