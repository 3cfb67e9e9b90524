"""The compile-time constants of a kernel, as one argument."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Output:
    """What a merge of partial results reads of `Constants`: other differences between kernels make no variants of their merge.

    GROUP: query heads per KV head. VALUE_DIM: dimensions of values; BLOCK_DV: rounded up to a power of two. BLOCK_N: keys of a
    tile, 0 for a merge that does not count tiles. SINKS: number of first tokens that are visible whatever the window. IS_CAUSAL:
    see `visibility.load_spans`.
    """

    GROUP: int
    VALUE_DIM: int
    BLOCK_DV: int
    BLOCK_N: int
    HAS_SINK_LOGITS: bool
    WRITE_LSE: bool
    SINKS: int
    IS_CAUSAL: bool


@dataclass(frozen=True, slots=True)
class Constants(Output):
    """Compile-time constants that the attention kernels share.

    HEAD_DIM: dimensions of keys. BLOCK_M: rows of a tile. BLOCK_D: dimensions of K in one load; all of them
    unless HEAD_DIM is above BLOCK_D (see `wide`). HAS_WORDS: the key mask of spans is read, always if heads are packed. PAIRS:
    pairs of dimensions that the kernel rotates to re-rotate the queries that score sinks; 0 if it does not re-rotate. FEW_ROWS:
    one block holds all packed rows of a KV head (`lean`). FULL_TAIL: see `attend`. ROWS: the spans have an interval for each
    query. DROPOUT: whether weights are dropped (prefill and backward). ALIGN: a power of two that divides the strides (see
    `tile.aligned_strides`). TILE_ALIGN: the power of two of `tile.begin_of`.
    """

    HEAD_DIM: int
    BLOCK_M: int
    BLOCK_D: int
    HAS_WORDS: bool
    HAS_SOFTCAP: bool
    IEEE: bool
    PAIRS: int = 0
    INTERLEAVED: bool = False
    ONE_QUERY: bool = False
    FEW_ROWS: bool = False
    FULL_TAIL: bool = False
    ROWS: bool = False
    DROPOUT: bool = False
    ALIGN: int = 16
    TILE_ALIGN: int = 1
