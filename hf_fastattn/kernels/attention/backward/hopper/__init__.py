"""dK and dV on Hopper: the launcher and the supported inputs. kernel.py has the consumers, tile.py their common code."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....host import gpu
from ....host.descriptors import describe, reads
from ....host.launch import Launch
from ....spans import has_rows, has_words
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


def supports(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the kernel supports these inputs. Of other arguments it supports the same as `dkdv`."""
    if gpu.arch(q.device) != 90 or q.dtype not in (torch.float16, torch.bfloat16) or k.shape[2] < MIN_KV_LEN:
        return False
    if any(width > MAX_HEAD_DIM or width % 8 for width in (q.shape[3], v.shape[3])):
        return False
    return all(map(reads, (q, k, v)))


def launch(C: Config, call: Call, dout: torch.Tensor, splits: int) -> Launch:
    """The launch that writes dk and dv, (splits, batch, kv_len, num_kv_heads, head_dim); its tensors are q, k, v, dout, lse,
    delta, spans, dk and dv."""
    q, k, v, *_ = call.tensors
    assert q is not None and k is not None and v is not None
    arguments, spans = call.arguments(), call.spans
    boxes = (q, C.BLOCK_M), (k, 64), (v, 64), (dout, C.BLOCK_M)
    return Launch(
        dkdv_hopper_kernel,
        (-(-call.kv_len // C.BLOCK_N) * call.num_kv_heads * splits * call.batch,),
        None,
        tuple(describe(x, (1, 1, rows, columns(x.shape[3]))) for x, rows in boxes),
        stride_sb=arguments["stride_sb"],
        batch=call.batch,
        num_kv_heads=call.num_kv_heads,
        splits=splits,
        q_len=call.q_len,
        kv_len=call.kv_len,
        window=call.window,
        scale=call.scale,
        scale_log2=arguments["scale_log2"],
        cap_log2=arguments["cap_log2"],
        C=C,
        GROUP=call.group,
        HAS_WORDS=has_words(spans),
        HAS_ROWS=has_rows(spans),
        IS_CAUSAL=call.is_causal,
        HAS_SOFTCAP=call.spec.softcap is not None,
        num_warps=4,
    )
