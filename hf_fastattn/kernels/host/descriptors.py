"""TMA descriptors of tensors in boxes of rows, prepared once and repeated with other addresses."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@cache
def _layout(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    element = gl.float16 if dtype == torch.float16 else gl.bfloat16
    return gl.NVMMASharedLayout.get_default_for(list(box), element)


def reads(x: torch.Tensor) -> bool:
    """Whether TMA can read a tensor (batch, heads, length, head_dim) of 16-bit elements, at an address divisible by 16."""
    return all(size == 1 or (stride > 0 and stride % 8 == 0) for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True))


def describe(x: torch.Tensor, box: tuple[int, ...]) -> Callable[[torch.Tensor], TensorDescriptor]:
    """A function that makes the descriptor of a tensor like x in every respect but its address; box: rows and columns of a tile.

    A descriptor of x itself checks its shape and strides, once.
    """
    # The stride of a dimension of size 1 has no meaning, and may be one that TMA does not allow.
    strides = [x.shape[-1] if size == 1 else stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    checked = TensorDescriptor(x, list(x.shape), [*strides, 1], list(box), _layout(box, x.dtype))
    fields = vars(checked) | {"base": None}  # prepared launches outlive their tensors

    def of(like: torch.Tensor) -> TensorDescriptor:
        made = object.__new__(TensorDescriptor)
        vars(made).update(fields, base=like)
        return made

    return of
