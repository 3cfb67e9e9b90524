"""Launches that are prepared once and repeated with other tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar, TypeVarTuple

import torch

from . import gpu

driver: Any = None  # Triton's, which is imported with the first kernel
knobs: Any = None
MAX_GRID = 65535  # programs in the second and in the third dimension of a launch


class _Thread(threading.local):
    before: Callable[[tuple[Any, ...]], None] | None = None  # called before each launch with its tensors
    watched: bool = False  # whether a mode of this package, and no other, sees all operations of torch; it has set `before`
    describe: Callable[[Any, tuple[Any, ...], dict[str, Any]], object] | None = None  # called with a kernel and its arguments,
    # instead of its launch, while tensors without memory stand for those of a GPU (`gpu.thread`)


thread = _Thread()
# A context in which a kernel, given with its arguments, may be compiled, while others compile kernels ahead (`kernels.ahead`).
compiling: list[Callable[[Any, tuple[Any, ...], dict[str, Any]], AbstractContextManager[object]]] = []
Tensors = TypeVar("Tensors", bound=tuple[torch.Tensor | None, ...])
Options = TypeVarTuple("Options")
Made = TypeVar("Made")


def unseen(*tensors: object) -> AbstractContextManager[object]:
    """A context for operations of torch that read these tensors alone, or none, as allocations do. What computes the tensors is
    launched first. The mode that watches the operations of a decode graph does not see them, which takes some 8 us for each. Nor
    do subclasses of tensors: it is for code of this package on plain tensors."""
    if tensors and thread.before is not None:
        thread.before(tensors)
    return torch._C._DisableTorchDispatch() if thread.watched else nullcontext()


def warps_of(elements: int) -> int:
    """Warps of a program that changes so many elements in place: each has one thread, as others would read what that writes."""
    return max(1, min(4, elements // 32))


class Launch:
    """One launch of a Triton kernel, or a chain of launches, which is repeated with tensors that differ only in their addresses.

    Triton inspects every argument at every call to find the compiled variant. A Launch stores it. Compilation depends on an
    address only through its divisibility by 16.
    """

    __slots__ = ("_compiled", "describe", "grid", "kernel", "meta", "rest", "takes", "then")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        then: Launch | None = None,
        describe: tuple[Callable[[torch.Tensor], Any], ...] = (),
        /,
        **named: Any,
    ) -> None:
        """named: the kernel's arguments after its tensors, including constants, and Triton's options, such as num_warps.

        then: the next launch of the chain. It takes the last of the same tensors. describe: for the first tensors, which the
        kernel reads by TMA, the functions that make their descriptors (`descriptors.describe`); not of a launch in a chain.
        """
        if driver is None:
            import_triton()
        self.kernel, self.grid, self.then = kernel, (*grid, 1, 1)[:3], then
        if max(self.grid[1:]) > MAX_GRID:
            raise ValueError(
                f"{kernel.fn.__name__} needs a grid of {self.grid}, and a GPU has at most {MAX_GRID} in the last two dimensions "
                '(heads, batch). Pass the batch in parts, or use attn_implementation="sdpa".'
            )
        self.describe = describe
        self.rest = tuple(named.pop(name) for name in kernel.arg_names if name in named)
        self.takes = len(kernel.arg_names) - len(self.rest)
        self.meta = {"enable_fp_fusion": True} | named  # Triton's default depends on its version, and bits on the option
        self._compiled: Any = None

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        if thread.before is not None:
            thread.before(tensors)
        first, bits = tensors[0], 0
        addresses: list[Any] = []
        for tensor in tensors:
            address = None if tensor is None else tensor.data_ptr()
            addresses.append(address)
            bits |= address or 0
        aligned = bits % 16 == 0
        if self._compiled is None or not aligned or first is None or first.device.index != driver.active.get_current_device():
            self._compile(tensors, aligned)
            return
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        profiled = getattr(enter, "calls", True) or getattr(leave, "calls", True)
        for i, make in enumerate(self.describe):
            addresses[i] = make(tensors[i])  # type: ignore[arg-type]
        stream = driver.active.get_current_stream(first.device.index)
        step: Launch | None = self
        while step is not None:
            compiled, own = step._compiled, addresses[-step.takes :]
            if profiled:
                compiled[step.grid](*own, *step.rest)
            else:  # the same launch without the metadata for hooks
                compiled.run(*step.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *own, *step.rest)
            step = step.then

    def _compile(self, tensors: tuple[torch.Tensor | None, ...], aligned: bool) -> None:
        """Launch through Triton, and store the variant that it compiled for aligned tensors."""
        first = tensors[0]
        if len(tensors) != self.takes or first is None:  # a stored variant is launched with all arguments
            raise TypeError(
                f"{self.kernel.fn.__name__} takes {self.takes} tensors here; got {len(tensors)}. The first must not be None."
            )
        own = [make(x) for make, x in zip(self.describe, tensors, strict=False)]  # type: ignore[arg-type]
        compiled = start(self.kernel, self.grid, *own, *tensors[len(own) :], *self.rest, **self.meta)
        if self.then is not None:
            self.then(*tensors[-self.then.takes :])
        if aligned and first.is_cuda:
            self._compiled = compiled  # None if the interpreter ran it


def start(kernel: Any, grid: tuple[int, ...], /, *args: Any, **named: Any) -> Any:
    """Launch a kernel through Triton, on the device of the first tensor. Returns what Triton has compiled, now or before."""
    if thread.describe is not None:
        thread.describe(kernel, args, named)
        return None
    first = getattr(args[0], "base", args[0])  # of a descriptor
    with torch.cuda.device_of(first), compiling[0](kernel, args, named) if compiling else nullcontext():
        return kernel[grid](*args, **named)


_importing = threading.Lock()


def import_triton() -> None:
    """Import what launches need, and compute the hash of Triton's files. A second thread waits for it and does not repeat it."""
    global driver, knobs
    with _importing:
        if driver is None:
            from triton import knobs
            from triton.runtime.cache import triton_key

            if not gpu.INTERPRETED:
                triton_key()
            from triton.runtime import driver


def remember(make: Callable[[Tensors, *Options], Made]) -> Callable[[Tensors, *Options], Made]:
    """Cache the result of make(tensors, *options) by everything except the tensors' addresses and contents.

    tensors: a tuple of tensors and None. In decode the key is the same for every layer and changes when K/V has grown. The cache
    is therefore cleared when it is full.
    """
    known: dict[object, tuple[Made]] = {}  # tuples, because make() may return None

    @wraps(make)
    def remembered(tensors: Tensors, *options: *Options) -> Made:
        layouts = [None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors]
        # Tensors that require grad are refused only in grad mode.
        key = (torch.is_grad_enabled(), gpu.thread.target, *layouts, options)
        found = known.get(key)
        if found is None:
            found = (make(tensors, *options),)
            if len(known) >= 64:
                known.clear()
            known[key] = found
        return found[0]

    return remembered
