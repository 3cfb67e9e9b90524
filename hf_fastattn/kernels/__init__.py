"""The attention kernels and their reference in PyTorch. They need PyTorch and Triton, not Transformers.

`reference.attention` and the kernels in attention/ share one signature and one contract: attention(q, kv, spec, spans). spec.py
defines K and V and the static arguments of a call, spans.py defines which keys are visible.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from functools import cache, cached_property, partial
from types import ModuleType
from typing import Any

import torch

from . import checks, reference
from .host import gpu, launch
from .host.gpu import HAS_TRITON, INTERPRETED
from .spans import has_rows
from .spec import KV, Result, Spec

__all__ = ["HAS_TRITON", "INTERPRETED", "reference"]


REFERENCE = "the PyTorch reference"


class TritonKernel:
    """The launcher `hf_fastattn.kernels.attention.<name>.<name>`, imported at the first call; for CPU tensors the reference.

    hopper: a module of the same kind that runs instead on compute capability 9.0 if its `why_not` returns None. stream_k: a
    module that splits K and V. It runs where these are short (`attention.schedule.is_brief`), and where the Hopper kernel does
    not and blocks of queries alone leave much of the GPU idle (`attention.schedule.pays`); the Hopper kernel may then split K and
    V too. Spans with an interval for each query need a kernel that supports them: `name` and `hopper` must.
    twin: the reference. fixed: arguments of the launcher that the reference does not take.
    Under TRITON_INTERPRET=1 CPU tensors run the Triton kernel in the interpreter. This is for tests.
    """

    def __init__(
        self,
        name: str,
        hopper: str | None = None,
        stream_k: str | None = None,
        twin: Callable[..., Any] = reference.attention,
        **fixed: Any,
    ) -> None:
        self.name = name
        self.hopper = hopper
        self.stream_k = stream_k
        self.twin = twin
        self.fixed = fixed
        self._launch: Callable[..., Result] | None = None

    def __repr__(self) -> str:
        return f"TritonKernel({self.name!r})"

    @cached_property
    def unsplit(self) -> TritonKernel:
        """The same kernel without stream_k, for training: the number of keys selects no other kernel, which would have to be
        compiled."""
        unsplit = copy.copy(self)  # also of a subclass
        unsplit.stream_k = None
        return unsplit

    def where(self, device: torch.device | str) -> str:
        """A description of what a call on this device runs. Raises RuntimeError if nothing can run there."""
        device = torch.device(device) if isinstance(device, str) else device
        if device.type == "cpu":
            return "the Triton kernel, interpreted" if INTERPRETED and HAS_TRITON else REFERENCE
        if device.type != "cuda" and not gpu.on_gpu(device):
            raise RuntimeError(
                f"The {self.name} kernel runs on CUDA devices (and its PyTorch reference on the CPU); "
                f"got a tensor on {device.type!r}. "
                'Use attn_implementation="sdpa" there.'
            )
        if torch.cuda.is_available():  # without a GPU: what a machine with a GPU would run
            gpu.arch(device)
        if not HAS_TRITON:
            raise RuntimeError(
                f"The {self.name} kernel needs Triton, which is not installed. Install it with `pip install triton` (Linux), "
                'or use attn_implementation="reference" or "sdpa".'
            )
        return "the Triton kernel"

    def __call__(
        self,
        q: torch.Tensor,
        kv: KV,
        spec: Spec = Spec(),  # noqa: B008 (a tuple)
        spans: torch.Tensor | None = None,
        **options: Any,
    ) -> Result:
        if self._launch is None or not q.is_cuda:
            if self.where(q.device) == REFERENCE:
                checks.check_widths(q, kv)
                return self.twin(q, kv, spec, spans, **options)
            if gpu.thread.calls is not None:
                gpu.thread.calls.append((q, kv, spec, spans, options))
            if INTERPRETED and q.dtype == torch.bfloat16:
                raise TypeError(
                    "Triton's interpreter computes bfloat16 wrongly; use float32 or float16 under TRITON_INTERPRET=1."
                )
            launcher: Callable[..., Result] = getattr(_module(self.name), self.name)
            self._launch = partial(launcher, **self.fixed) if self.fixed else launcher
        with launch.unseen(q, *kv.tensors, spans, *options.values()):
            return self._choose(self._launch, q, kv, spec, spans)(q, kv, spec, spans, **options)

    def choice(self, q: torch.Tensor, kv: KV, spec: Spec, rows: bool = False) -> tuple[str, str | None]:
        """(module whose kernel runs on a GPU for these inputs, reason why the Hopper kernel does not run or None).

        rows: whether the spans have an interval for each query.
        """
        name, why_not = self.name, None
        shares = self.stream_k is not None
        if self.hopper is not None and (why_not := _module(self.hopper).why_not(q, kv, spec.sinks, shares)) is None:
            name = self.hopper
        if self.stream_k is not None and not rows:
            schedule = _module("schedule")
            if schedule.is_brief(q, kv, spec) or (name == self.name and schedule.pays(q, kv, spec)):
                name = self.stream_k
        return name, why_not

    def _choose(
        self, portable: Callable[..., Result], q: torch.Tensor, kv: KV, spec: Spec, spans: torch.Tensor | None
    ) -> Callable[..., Result]:
        if spec.dropout > 0.0:
            return portable
        rows = has_rows(spans)
        if (self.stream_k is None or rows) and (self.hopper is None or gpu.arch(q.device) != 90):
            return portable
        name, _ = self.choice(q, kv, spec, rows)
        if name == self.name:
            return portable
        module = _module(name)
        if name == self.hopper:
            return partial(module.prefill, shares=self.stream_k is not None)
        chosen: Callable[..., Result] = getattr(module, name)
        return chosen


@cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.attention.{name}")
