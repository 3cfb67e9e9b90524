"""dK and dV on Hopper: the launcher and the supported inputs. kernel.py has the consumers, tile.py their common code."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....host import gpu
from ....spans import WORDS, has_rows
from ...plan import Call
from .kernel import dkdv_hopper_kernel

MAX_HEAD_DIM = 256
MIN_KV_LEN = 65  # with fewer keys at least half of a block of 128 is empty


@dataclass(frozen=True, slots=True)
class Config:
    """The constants of a compiled kernel: queries and keys of a tile, tiles of Q and dO in flight, dimensions of keys and values.

    wide: both consumers have the same keys and divide the products between them.
    """

    BLOCK_M: int
    BLOCK_N: int
    stages: int
    head_dim: int
    value_dim: int
    wide: bool = False


def columns(head_dim: int) -> int:
    """Columns of the buffers for this head_dim."""
    return max(64, 1 << (head_dim - 1).bit_length())


def config(head_dim: int, value_dim: int, softcap: bool) -> Config:
    """The configuration for these widths of keys and values."""
    if max(head_dim, value_dim) > 128:
        return Config(64, 64, 2, head_dim, value_dim, wide=True)
    if max(head_dim, value_dim) > 64:
        return Config(64, 128, 3, head_dim, value_dim)
    if softcap:  # needs more registers
        return Config(64, 128, 4, head_dim, value_dim)
    return Config(128, 128, 2, head_dim, value_dim)


def supports(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> bool:
    """Whether the kernel supports these inputs. Of other arguments it supports the same as `dkdv`."""
    if gpu.arch(q.device) != 90 or q.dtype not in (torch.float16, torch.bfloat16) or k.shape[2] < MIN_KV_LEN:
        return False
    if any(width > MAX_HEAD_DIM or width % 8 for width in (q.shape[3], v.shape[3])):
        return False
    return all(
        x.data_ptr() % 16 == 0
        and all(size == 1 or (stride > 0 and stride % 8 == 0) for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True))
        for x in (q, k, v, dout)
    )


@cache
def _layout(rows: int, width: int, dtype: torch.dtype):
    element = gl.float16 if dtype == torch.float16 else gl.bfloat16
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], element)


def _descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """TMA descriptor of x (batch, heads, length, head_dim) in boxes of `rows` rows of one head."""
    head_dim, width = x.shape[3], columns(x.shape[3])
    # The stride of a dimension of size 1 has no meaning, and may be one that TMA does not allow.
    strides = [head_dim if size == 1 else stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, width], _layout(rows, width, x.dtype))


def launch(
    C: Config, call: Call, dout: torch.Tensor, stats: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, splits: int
) -> None:
    """Write dk and dv, (splits, batch, kv_len, num_kv_heads, head_dim)."""
    _, k, v = call.tensors[:3]
    assert k is not None and v is not None
    arguments, spans = call.arguments(), call.spans
    dkdv_hopper_kernel[(-(-call.kv_len // C.BLOCK_N) * call.num_kv_heads * splits * call.batch,)](
        _descriptor(call.q, C.BLOCK_M),
        _descriptor(k, 64),
        _descriptor(v, 64),
        _descriptor(dout, C.BLOCK_M),
        stats,
        call.q if spans is None else spans,
        dk,
        dv,
        arguments["stride_sb"],
        call.batch,
        call.num_kv_heads,
        call.q_len,
        call.kv_len,
        call.window,
        call.scale,
        arguments["scale_log2"],
        arguments["cap_log2"],
        C=C,
        GROUP=call.group,
        SPLITS=splits,
        HAS_SPANS=spans is not None,
        HAS_WORDS=spans is not None and not has_rows(spans) and spans.shape[3] > WORDS,
        HAS_ROWS=has_rows(spans),
        IS_CAUSAL=call.spec.causal,
        HAS_SOFTCAP=call.spec.softcap is not None,
        num_warps=4,
    )
