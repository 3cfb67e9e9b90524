"""The compile-time constants of a kernel, as one argument."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constants:
    """Compile-time constants that the attention kernels share.

    GROUP: query heads per KV head. WORKSPACE_M: packed query rows, rounded up to a power of two (kernels with packed rows only).
    HEAD_DIM, VALUE_DIM: dimensions of keys and of values. BLOCK_M, BLOCK_N: rows and keys of a tile. BLOCK_D, BLOCK_DV:
    dimensions of K and V in one load; all of them unless HEAD_DIM is above BLOCK_D (see `wide`). SINKS: number of first tokens
    that are visible whatever the window. PAIRS: pairs of dimensions that the kernel rotates to re-rotate the queries that score
    sinks; 0 if it does not re-rotate. FEW_ROWS: one block holds all packed rows of a KV head. FULL_TAIL: see `attend`. ROWS: the
    spans have an interval for each query. DROPOUT: whether weights are dropped (prefill and backward). ALIGN: a power of two that
    divides the strides (see `tile.aligned_strides`).
    """

    GROUP: int
    HEAD_DIM: int
    VALUE_DIM: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int
    BLOCK_DV: int
    HAS_SPANS: bool
    IS_CAUSAL: bool
    HAS_SOFTCAP: bool
    HAS_SINK_LOGITS: bool
    WRITE_LSE: bool
    IEEE: bool
    SINKS: int = 0
    PAIRS: int = 0
    INTERLEAVED: bool = False
    WORKSPACE_M: int = 0
    ONE_QUERY: bool = False
    FEW_ROWS: bool = False
    FULL_TAIL: bool = False
    ROWS: bool = False
    DROPOUT: bool = False
    ALIGN: int = 16
