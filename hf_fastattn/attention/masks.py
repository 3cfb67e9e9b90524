"""The masks that a model passes to its layers: tensors with the shape of a mask that contain spans and refuse most operations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Self

import torch
from torch._ops import OpOverload

from ..kernels import reference, spans

Sizes = tuple[int, int, int]  # batch, q_len, kv_len
Names = tuple[str, str]  # of the backend and the model, for messages


class Mask(torch.Tensor):
    """The result of the mask function. For the model it is a bool mask (batch, 1, q_len, kv_len), True where attended.

    It can be moved between devices and sliced along the batch and the queries. Any other operation that reads or changes an entry
    raises ValueError, with the reason: a model that adds its mask to its own scores cannot run a registered attention function,
    and the mask would silently have another meaning there.

    content: the data, see the subclasses. chunk_size: the size of its chunks, counted from the beginning of the row; in packed
    sequences (`packed`) they restart.
    """

    # All operations arrive at __torch_dispatch__.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, content: torch.Tensor, sizes: Sizes, *_: Any) -> Self:
        batch, q_len, kv_len = sizes
        return torch.Tensor._make_wrapper_subclass(cls, (batch, 1, q_len, kv_len), dtype=torch.bool, device=content.device)

    def __init__(self, content: torch.Tensor, sizes: Sizes, made_for: Names, chunk_size: int | None = None):
        self.content = content
        self.sizes = sizes  # without the 1; attention compares them at every layer
        self.made_for = made_for
        self.chunk_size = chunk_size
        self.separated: Mask | None = None  # this mask with packed sequences separated, for the other layers (`packed`)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's own has an internal argument
        return f"{type(self).__name__}{tuple(self.shape)} on {self.device}"

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """The dimensions that a model sees. FalconModel adds its bias to masks of 4, and passes others on, with the bias."""
        return 3 if self.made_for[1] == "Falcon" else super().ndim

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["content"], (self.made_for, self.chunk_size)

    @classmethod
    def __tensor_unflatten__(
        cls, content: dict[str, torch.Tensor], rest: tuple[Any, ...], size: Sequence[int], stride: object
    ) -> Self:
        return cls(content["content"], (size[0], size[-2], size[-1]), *rest)

    @property
    def given(self) -> torch.Tensor | None:
        """The argument for attention: spans, a bool mask, or None for lower-right causal."""
        return self.content

    def dense(self) -> torch.Tensor:
        """The dense mask: bool (batch, 1, q_len, kv_len), True where attended."""
        raise NotImplementedError

    def queries(self, start: int, stop: int) -> Mask:
        """Queries [start, stop) of every row."""
        raise NotImplementedError

    def around(self, content: torch.Tensor, batch: int | None = None) -> Mask:
        """The same mask with other content, which may be of some rows of the batch."""
        sizes = self.sizes if batch is None else (batch, *self.sizes[1:])
        return type(self)(content, sizes, self.made_for, self.chunk_size)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # a C function in torch
        cls, function: OpOverload[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function.namespace == "hf_fastattn":  # a custom op of this package in a compiled graph
            return function(*(arg.given if isinstance(arg, Mask) else arg for arg in args), **kwargs)
        mask = args[0]
        if isinstance(mask, Mask):
            if function in _SAME:
                return mask.around(function(mask.content))
            if function is _aten._to_copy.default and kwargs.get("dtype") in (None, torch.bool):
                return mask.around(mask.content.to(kwargs.get("device"), non_blocking=kwargs.get("non_blocking", False)))
            if function is _aten.empty_like.default:
                return mask.around(torch.empty_like(mask.content, memory_format=torch.contiguous_format))
            if function is _aten.copy_.default and type(args[1]) is type(mask) and args[1].sizes == mask.sizes:
                mask.content.copy_(args[1].content)
                return mask
            if function is _aten.slice.Tensor and (cut := _cut(mask, *args[1:])) is not None:
                return cut
            if function is _aten.repeat.default or (function in _SHAPED and isinstance(mask, RepeatedMask)):
                return RepeatedMask(function(mask.dense(), *args[1:], **kwargs), mask.sizes, mask.made_for)
            if function is _aten.where.self and isinstance(mask, RepeatedMask):
                return function(mask.dense(), *args[1:])
        # Under inference_mode composite ops arrive without having been decomposed.
        if (decomposed := function.decompose(*args, **kwargs)) is not NotImplemented:
            return decomposed
        name, model = next(x.made_for for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Mask))
        raise ValueError(
            f"attn_implementation={name!r} cannot be used here: {model} computes attention in its own code ({function} on the "
            "mask), where no registered backend can run. Load this model without attn_implementation."
        )


class SpansMask(Mask):
    """content: the spans, int32 (batch, 1, 1, 6 or more), see `kernels.spans`."""

    def dense(self) -> torch.Tensor:
        _, q_len, kv_len = self.sizes
        return reference.visible(q_len, kv_len, self.device, self.content, False, None)[:, None]

    def queries(self, start: int, stop: int) -> Mask:
        batch, _, kv_len = self.sizes
        rows = self.content[:1] if self.content.stride(0) == 0 else self.content  # a uniform batch stays uniform
        rows = rows.clone()
        rows[..., spans.Q_START] += start
        rows[..., spans.FLAGS] &= (1 << spans.PADDING) - 1  # the last queries are others
        return SpansMask(rows.expand(batch, -1, -1, -1), (batch, stop - start, kv_len), self.made_for)


class RunsMask(SpansMask):
    """content: spans of the second form, with an interval for each query, for example for sequences packed into one row."""

    def queries(self, start: int, stop: int) -> Mask:
        batch, _, kv_len = self.sizes
        rows = torch.cat([self.content[..., : spans.WORDS], self.content[..., spans.WORDS + start : spans.WORDS + stop]], -1)
        rows[..., spans.Q_START] += start
        return RunsMask(rows, (batch, stop - start, kv_len), self.made_for)


class PlainMask(Mask):
    """Plain lower-right causal: query i sees the keys up to kv_len - q_len + i. content: an empty tensor.

    It replaces None, with which each attention module would select the pattern, and some select another one.
    """

    @property
    def given(self) -> None:
        return None

    def dense(self) -> torch.Tensor:
        batch, q_len, kv_len = self.sizes
        return reference.visible(q_len, kv_len, self.device, None, True, None)[:, None].expand(batch, -1, -1, -1)

    def queries(self, start: int, stop: int) -> Mask:
        batch, q_len, kv_len = self.sizes
        if stop == q_len:
            return PlainMask(self.content, (batch, stop - start, kv_len), self.made_for)
        written = spans.build_spans(batch, q_len, kv_len, self.device, q_offset=kv_len - q_len)
        return SpansMask(written, self.sizes, self.made_for).queries(start, stop)


class DenseMask(Mask):
    """A mask that spans cannot express. content: the bool mask, (batch, 1, q_len, kv_len)."""

    def dense(self) -> torch.Tensor:
        return self.content

    def queries(self, start: int, stop: int) -> Mask:
        return of_bools(self.content[:, :, start:stop], self.made_for)


class RepeatedMask(DenseMask):
    """A mask that a model has repeated, for its own attention of images (Siglip 2). content: the entries, bool of any shape.

    It can be a condition of torch.where, which says that True is attended, and reshaped.
    """

    def __new__(cls, content: torch.Tensor, *_: Any) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, content.shape, dtype=torch.bool, device=content.device)


def plain(sizes: Sizes, device: torch.device | str, made_for: Names) -> PlainMask:
    """The mask of lower-right causal attention."""
    return PlainMask(_nothing(device), sizes, made_for)


@cache
def _nothing(device: torch.device | str) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.int32, device=device)


def of_spans(ints: torch.Tensor, sizes: Sizes, made_for: Names) -> SpansMask:
    """The mask that these spans describe."""
    return SpansMask(ints, sizes, made_for)


def of_runs(ints: torch.Tensor, sizes: Sizes, made_for: Names, chunk_size: int | None = None) -> RunsMask:
    """The same, where they have an interval for each query."""
    return RunsMask(ints, sizes, made_for, chunk_size)


def of_bools(mask: torch.Tensor, made_for: Names) -> DenseMask:
    """The mask with these entries, bool (batch, 1, q_len, kv_len)."""
    return DenseMask(mask, (mask.shape[0], mask.shape[2], mask.shape[3]), made_for)


def broadcast(mask: Mask, sizes: Sizes) -> Mask:
    """The mask for more rows, queries or keys where it has one, as in torch's sdpa."""
    batch, q_len, kv_len = sizes
    entries = mask.dense().expand(batch, -1, q_len, kv_len)
    if q_len > 1:
        return of_bools(entries, mask.made_for)
    written = spans.build_spans(batch, 1, kv_len, mask.device, causal=False, attention_mask=entries[:, 0, 0])
    return of_spans(written, sizes, mask.made_for)


def dense(mask: Mask) -> torch.Tensor:
    """`mask.dense()`, in compiled graphs too."""
    return mask.dense()


# A compiled graph may contain tensors of these classes, but cannot create them by calling the class.
torch.compiler.allow_in_graph([of_spans, of_runs, of_bools, broadcast, dense])


_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default, _aten.clone.default)
_SHAPED = (_aten.view.default, _aten._unsafe_view.default)


def _cut(mask: Mask, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Mask | None:
    """mask[start:stop] along `dim`, or None if the result is not a mask of some rows or some queries."""
    size = mask.shape[dim]
    start, stop, step = slice(start, stop, step).indices(size)
    if (start, stop, step) == (0, size, 1):
        return mask.around(mask.content)
    if dim % 4 not in (0, 2) or step != 1 or start >= stop:
        return None
    return mask.around(mask.content[start:stop], stop - start) if dim % 4 == 0 else mask.queries(start, stop)
