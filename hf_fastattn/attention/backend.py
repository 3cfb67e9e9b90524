"""The backends by name, the choice between the prefill and the decode kernel of one, and the count of their calls."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .. import hf
from ..kernels import TritonKernel, checks, eight_bits
from ..kernels.host import gpu, tables
from ..kernels.spans import has_rows
from ..kernels.spec import KV, Gradients, Result, Spec, call, is_plain

Kernel = Callable[..., Result]
_DEFAULT = Spec()
OPTIONS = (*Spec._fields, "sink_logits", "inv_freq", "return_lse")
# The fields of `kernels.spec.Spec` in the schema of a custom op.
SPEC = "float? scale, bool causal, SymInt? window, float? softcap, SymInt sinks, bool interleaved, float dropout"


@dataclass(frozen=True, slots=True)
class Backend:
    """An implementation of attention, which users select by its name as `attn_implementation`.

    name: `[a-z0-9_]+`, without "flash", "sdpa" or "flex_attention", because Transformers parses these in names.
    summary: one line. prefill, decode: callables with the signature of `kernels.reference.attention`; decode serves
    calls with at most `max_decode_rows` query rows per KV head (q_len x num_heads / num_kv_heads), prefill the others,
    and all calls if decode is None. max_head_dim, max_value_dim: the largest head_dim of keys and of values, None for any.
    streaming: it sees only the first and the last tokens, whose numbers are in the model's config (`streaming.Settings`), and can
    read a RollingCache. packed: its prefill kernel reads spans with an interval for each query (`kernels.spans`), which separate
    packed sequences; otherwise these use the dense path. backward: a callable with the signature of
    `kernels.reference.backward`, the gradients of prefill; None for the dense path in training. dropout: whether
    prefill and backward support `Spec.dropout`; otherwise the dense path runs. invariant: the bits of a row must not
    depend on its batch, so the prompts of a batch are not read as one row. linear: it is linear attention (`attention.linear`),
    whose layers have weights of their own, and `prefill` only refuses calls without them.
    """

    name: str
    summary: str
    prefill: Kernel
    decode: Kernel | None = None
    max_decode_rows: int = tables.MAX_DECODE_ROWS
    max_head_dim: int | None = checks.MAX_HEAD_DIM
    max_value_dim: int | None = checks.MAX_VALUE_DIM
    dtypes: tuple[torch.dtype, ...] = checks.DTYPES
    streaming: bool = False
    packed: bool = False
    backward: Callable[..., Any] | None = None
    dropout: bool = False
    invariant: bool = False
    linear: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9_]+", self.name):
            raise ValueError(f"A backend's name must match [a-z0-9_]+; got {self.name!r}.")
        for word in ("flash", "sdpa", "flex_attention"):
            if word in self.name:
                raise ValueError(
                    f"A backend's name must not contain {word!r}: Transformers parses it and would load something else. "
                    f"Got {self.name!r}; choose a name without it."
                )
        if self.name in ("eager", "paged"):
            raise ValueError(f"{self.name!r} is Transformers' own name; choose another.")
        if not callable(self.prefill) or not (self.decode is None or callable(self.decode)):
            raise TypeError(f"Backend {self.name!r}: prefill must be callable and decode callable or None.")
        if self.backward is not None and (self.streaming or not callable(self.backward)):
            raise TypeError(f"Backend {self.name!r}: backward must be callable or None, and None for one that streams.")

    @property
    def exact(self) -> bool:
        """Whether it computes the attention of the model."""
        return not (self.streaming or self.linear)

    @property
    def reads_eight_bits(self) -> bool:
        """Whether its decode kernel reads K and V in 8 bits as they are stored, and can be given them: a window has none."""
        return isinstance(self.decode, TritonKernel) and not self.streaming

    def kernel(self, q_len: int, num_heads: int, num_kv_heads: int) -> tuple[str, Kernel]:
        """("decode" or "prefill", kernel) for a call of this shape."""
        if self.decode is not None and q_len * (num_heads // max(num_kv_heads, 1)) <= self.max_decode_rows:
            return "decode", self.decode
        return "prefill", self.prefill

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: torch.Tensor | None = None, **options: Any
    ) -> Result:
        """Attention over plain K and V; options: fields of `kernels.spec.Spec`, and those of `kernels.reference.attention`."""
        if isinstance(k, KV):
            raise TypeError("A backend is called with the tensors q, k and v; its attend() takes q, a KV and a Spec.")
        if others := [type(x).__name__ for x in (q, k, v) if not isinstance(x, torch.Tensor)]:
            raise TypeError(f"A backend is called with the tensors q, k and v; got {', '.join(others)}. Pass torch.as_tensor(x).")
        if unknown := options.keys() - OPTIONS:
            raise TypeError(f"A backend has no option {', '.join(sorted(unknown))}; it has spans, {', '.join(OPTIONS)}.")
        return call(self.attend, q, k, v, spans, **options)

    def attend(self, q: torch.Tensor, kv: KV, spec: Spec = _DEFAULT, spans: torch.Tensor | None = None, **options: Any) -> Result:
        """Run the kernel for these shapes; arguments and result as in `kernels.reference.attention`."""
        phase, kernel = self.kernel(q.shape[2], q.shape[1], kv.k.shape[1])
        if has_rows(spans) or spec.dropout:  # which decode kernels do not support
            phase, kernel = "prefill", self.prefill
        if not is_plain(kv.form) and (phase == "prefill" or not self.reads_eight_bits):
            kv = eight_bits.widened(kv, q.dtype)
        calls[f"{self.name}.{phase}"] += gpu.thread.target is None  # otherwise nothing runs
        return kernel(q, kv, spec, spans, **options)

    def forward(
        self, q: torch.Tensor, kv: KV, spec: Spec, spans: torch.Tensor | None, **given: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) for `gradients`, always by the prefill kernel. given: sink_logits, and the seed of dropout."""
        calls[f"{self.name}.prefill"] += 1
        prefill = self.prefill.unsplit if isinstance(self.prefill, TritonKernel) else self.prefill
        out, lse = prefill(q, kv, spec, spans, return_lse=True, **given)
        return out, lse

    def gradients(self, q: torch.Tensor, kv: KV, spec: Spec, spans: torch.Tensor | None, **given: Any) -> Gradients:
        """The gradients of `forward`; arguments and result as in `kernels.reference.backward`."""
        assert self.backward is not None
        calls[f"{self.name}.backward"] += 1
        found: Gradients = self.backward(q, kv, spec, spans, **given)
        return found

    def why_not(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cuda",
        value_dim: int | None = None,
    ) -> str | None:
        """The reason why this backend cannot serve a model of this shape; None if it can. value_dim: None for head_dim."""
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            return f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads."
        if self.max_head_dim is not None and head_dim > self.max_head_dim:
            return f"head_dim {head_dim} is above {self.max_head_dim}, the largest {self.name!r} holds."
        value_dim = head_dim if value_dim is None else value_dim
        if self.max_value_dim is not None and value_dim > self.max_value_dim:
            return f"the values' head_dim {value_dim} is above {self.max_value_dim}, the largest {self.name!r} holds."
        if dtype not in self.dtypes:
            return f"{dtype} is not among {', '.join(str(d) for d in self.dtypes)}."
        where = getattr(self.prefill, "where", None)
        if where is not None:
            try:
                where(device)
            except RuntimeError as error:
                return str(error)
        return None


def with_bias(kv: KV, bias: torch.Tensor | None) -> KV:
    """K and V with a bias of keys (`kernels.biased`), if there is one."""
    if bias is None:
        return kv
    from ..kernels.biased import biased  # with Triton

    return biased(kv, bias)


_backends: dict[str, Backend] = {}
calls: Counter[str] = Counter()  # by "<backend>.<phase>"


@contextmanager
def count_calls() -> Iterator[Counter[str]]:
    """Count the kernel calls of this process inside the block, by "<backend>.<phase>"; the counter is filled at its end.

    "<backend>.backward" counts backward passes, "<backend>.dense" calls of the dense path, for a mask, gradients or dropout that
    the backend does not support.
    The capture of a CUDA graph is counted once. Its replays are not counted: they launch kernels without running this code.
    """
    before = Counter(calls)
    counted: Counter[str] = Counter()
    try:
        yield counted
    finally:
        counted.update(calls - before)


def get(name: str) -> Backend:
    """The backend of that name; ValueError names the known ones."""
    backend = _backends.get(name)
    if backend is None and name in hf.attention_names():
        raise ValueError(f"{name!r} is no backend of hf_fastattn, but other attention. Its backends: {', '.join(names())}.")
    if backend is None:
        raise ValueError(f"Unknown attention backend {name!r}; known backends: {', '.join(names())}.")
    return backend


def names() -> tuple[str, ...]:
    """Names of all registered backends, in order of registration."""
    return tuple(_backends)
