"""Tile sizes, warps and pipeline stages for each architecture and shape, and grid sizes.

The tables are fixed: nothing is tuned at run time and nothing is compiled for a length. A number of keys selects one of at most
three kernels and of three merges, a number of queries one of a few, by powers of two. `tests/test_lengths.py` counts them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import gcd

import torch

from . import gpu

MAX_DECODE_ROWS = 64  # query rows (q_len x query heads per KV head) that a decode kernel packs into one block
MAX_SPLITS = 128
SINGLE_TILES = 32  # splits of one tile of keys, see `num_splits`
BRIEF_BYTES = 16 << 20  # of K and V, up to which decode at head_dim 64 has launches of its own on Hopper (see `fixed`)


@dataclass(frozen=True, slots=True)
class Config:
    """One launch: block sizes in rows and keys, warps, pipeline stages.

    Decode only: programs_per_sm; MIN_TILES, the least number of tiles in a share of `lean`; registers, the limit for each thread
    if the launch begins early (see `overlap`; 0: no limit), and sink_registers, the limit if it also scores sinks; whole_keys, up
    to how many keys a head is not split; split_tiles, the least number of tiles in a split, and short_splits, up to how many
    splits these are enough. Backward only: split, whether dK and dV are computed by separate programs
    (`attention.backward.dkdv`).
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    MIN_TILES: int = 1
    registers: int = 0
    sink_registers: int = 0
    whole_keys: int = 0
    short_splits: int = MAX_SPLITS
    split_tiles: int = 2
    split: bool = False


def block_d(head_dim: int) -> int:
    """head_dim rounded up to a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def part_d(head_dim: int) -> int:
    """Dimensions of K in one load of a tile: all, rounded up, or a part of them for wide heads (see `device.wide`)."""
    return block_d(head_dim) if head_dim <= 256 else 64


def alignment(*tensors: torch.Tensor | None) -> int:
    """The largest power of two up to 16 that divides all strides but the last (see `device.tile.aligned_strides`)."""
    return gcd(16, *(stride for tensor in tensors if tensor is not None for stride in tensor.stride()[:-1]))


def prefill(device: torch.device, dtype: torch.dtype, head_dim: int, q_len: int) -> Config:
    """The launch of the prefill kernel. head_dim: the larger of K's and V's. q_len only selects the block for few queries."""
    return prefill_config(gpu.arch(device), dtype.itemsize, block_d(head_dim), min(128, max(16, 1 << (q_len - 1).bit_length())))


@cache
def prefill_config(arch: int, itemsize: int, block_d: int, rows: int) -> Config:
    """The table of the prefill kernel; `rows` is q_len rounded up to a power of two, from 16 to 128."""
    if arch == 0:
        return Config(min(rows, 32), 32, 4, 1)
    if block_d > 256:  # the output takes most registers
        return Config(16, 16, 4, 2) if itemsize == 4 else Config(min(rows, 32), 32, 4, 2)
    if itemsize == 4:  # IEEE dots run on CUDA cores; registers are the limit
        return Config(min(rows, 32), 32, 4, 2 if block_d <= 128 else 1)
    if rows == 32 and arch == 90 and block_d in (64, 128):
        rows = 64  # the matrix instruction of Hopper has 64 rows, and is the faster one with half of them empty too
    if rows <= 32:  # short inputs: one small query block, bound by memory bandwidth
        return Config(rows, 64 if block_d <= 128 else 32, 4, 3 if block_d <= 128 else 2)
    if block_d <= 64:  # three programs per SM hide each other's softmax
        return Config(64, 64, 4, 3)
    warps = 4 if rows == 64 else 8  # one warpgroup per 64 rows
    if arch == 90:
        return Config(rows, 64, warps, 3 if block_d == 128 else 2)
    if block_d == 128:
        return Config(rows, 64, warps, 3) if arch == 80 else Config(rows, 32, warps, 2)
    return Config(min(rows, 64), 32, 4, 2)


def backward_dq(device: torch.device, dtype: torch.dtype, head_dim: int, q_len: int) -> Config:
    """The launch for dQ and delta, and that of the prefill kernel with dropout; arguments as in `prefill`."""
    rows = min(128, max(16, 1 << (q_len - 1).bit_length()))
    return backward_dq_config(gpu.arch(device), dtype.itemsize, block_d(head_dim), rows)


@cache
def backward_dq_config(arch: int, itemsize: int, block_d: int, rows: int) -> Config:
    """The table for `backward_dq`; `rows` is q_len rounded up to a power of two, from 16 to 128."""
    if arch == 0:
        return Config(min(rows, 32), 32, 4, 1)
    if itemsize == 4:  # IEEE dots run on CUDA cores; registers are the limit
        return Config(min(rows, 32 if block_d <= 64 else 16), 32 if block_d <= 64 else 16, 4, 1)
    if rows <= 32:
        return Config(rows, 32, 4, 2)
    if block_d <= 64:
        return Config(64, 64, 4, 3 if arch == 90 else 2)
    warps = 4 if rows == 64 else 8  # one warpgroup per 64 rows
    if block_d == 128:
        return Config(rows, 64, warps, 3) if arch == 90 else Config(rows if arch == 80 else 64, 32, warps if arch == 80 else 4, 2)
    return Config(rows, 32, warps, 2) if arch == 90 else Config(32, 32, 4, 2)


def backward_dkdv(device: torch.device, dtype: torch.dtype, head_dim: int, kv_len: int, dropout: bool) -> Config:
    """The launch for dK and dV: a program has BLOCK_N keys and loops over blocks of BLOCK_M queries.

    dropout: whether a tile needs registers for it.
    """
    keys = min(128, max(16, 1 << (kv_len - 1).bit_length()))
    return backward_dkdv_config(gpu.arch(device), dtype.itemsize, block_d(head_dim), keys, dropout)


@cache
def backward_dkdv_config(arch: int, itemsize: int, block_d: int, keys: int, dropout: bool) -> Config:
    """The table for `backward_dkdv`; `keys` is kv_len rounded up to a power of two, from 16 to 128."""
    if arch == 0:
        return Config(32, min(keys, 32), 4, 1)
    if itemsize == 4:
        return Config(32 if block_d <= 64 else 16, min(keys, 32 if block_d <= 64 else 16), 4, 1)
    if keys <= 32:
        return Config(32, keys, 4, 2)
    stages = 3 if arch == 90 else 2
    if block_d <= 64:
        return Config(32 if dropout else 64, 64, 4, stages)
    if block_d == 128:
        return Config(32, 64, 4, stages)
    if arch == 90:  # both sums do not fit into registers
        return Config(32, keys, 4 if keys == 64 else 8, 2, split=True)
    return Config(32, 32, 4, 2)


def group_splits(device: torch.device, programs: int, group: int) -> int:
    """Programs that share the query heads of a KV head in the gradients of K and V: several if there are too few programs."""
    splits = 1
    while group % (2 * splits) == 0 and programs * splits <= gpu.num_sms(device):
        splits *= 2
    return splits


def decode(device: torch.device, dtype: torch.dtype, head_dim: int, rows: int, heads: int | None) -> Config:
    """The launch of the decode kernels for `rows` packed query rows in each KV head.

    head_dim: the larger of K's and V's. heads: number of KV heads over all batch rows if every program stays within one of them;
    None if it may not.
    """
    sms, load = gpu.num_sms(device), None
    if heads is not None and heads <= sms and 20 * (sms // heads * heads) >= 19 * sms and head_dim == block_d(head_dim):
        # One program per SM leaves few SMs idle and loads whole tiles; "one" if that is one program for each head.
        load = "one" if 2 * heads > sms else "few"
    elif heads is not None and heads > 2 * sms and -heads % (4 * sms) <= 2 * sms:  # the last wave of four is half full
        load = "many"  # enough for four programs on most SMs
    return _launch("decode", gpu.arch(device), dtype.itemsize, block_d(head_dim), max(16, 1 << (rows - 1).bit_length()), load)


def fixed(
    device: torch.device, dtype: torch.dtype, head_dim: int, rows: int, heads: int, kv_len: int | None = None, page: int = 0
) -> Config:
    """The launch of fixed splits, in which every program stays within one KV head; arguments as in `decode`.

    kv_len: keys of a head; None if the launch must not depend on it. page: tokens of a page of K and V; 0: they are plain.
    """
    if gpu.arch(device) != 90 or dtype.itemsize != 2:
        return decode(device, dtype, head_dim, rows, heads)
    sms, size = gpu.num_sms(device), block_d(head_dim)
    if size == 64 and rows <= 16 and kv_len is not None and 2 * heads <= sms:
        read = heads * kv_len * 4 * head_dim
        if 2 * read <= BRIEF_BYTES:  # smaller tiles arrive earlier
            return Config(16, 64, 4, 4, programs_per_sm=2, sink_registers=168)
        if read <= BRIEF_BYTES:  # one program per SM has fewer splits, and a shorter merge
            return replace(decode(device, dtype, head_dim, rows, heads), programs_per_sm=1)
    if size == 64 and 16 < rows <= 32:
        rows = 64  # as in `prefill_config`
    if 0 < page < 64 and 8 * heads <= sms:  # one program waits for the numbers of pages while another one computes
        return decode(device, dtype, head_dim, rows, None)
    config = decode(device, dtype, head_dim, rows, heads)
    return config if kv_len is None else one_per_sm(config, sms, head_dim, heads, kv_len)


def one_per_sm(config: Config, sms: int, head_dim: int, heads: int, kv_len: int) -> Config:
    """The launch of `fixed` on Hopper with one program per SM where that is faster, otherwise `config`; arguments as there.

    While programs of the previous launch still occupy SMs, two programs that fit on one SM are both placed on one that is free,
    and others stay idle. So a program has 128 KB of tiles in flight, or 192: two do not fit. At other head_dims than multiples of
    16, lengths select two kernels as it is, by alignment.
    """
    if head_dim % 16:
        return config
    size, splits = block_d(head_dim), sms // heads
    busy = heads * splits / sms
    if config.BLOCK_M == 64 and size == 128 and 2 <= splits <= 16 and busy >= 0.7:
        return replace(config, num_stages=5, programs_per_sm=1)
    wide = Config(16, 128, 4, 3, split_tiles=1)
    if config.BLOCK_M == 16 and size == 128 and config.programs_per_sm == 1:
        return wide
    if config.BLOCK_M != 16 or splits > 11:
        return config
    if size == 64 and busy >= 0.95 and heads * kv_len * 4 * head_dim >= 4 * BRIEF_BYTES:
        return replace(config, num_stages=5, programs_per_sm=1, sink_registers=0)
    if size == 128 and head_dim > 80 and busy >= 0.7 and heads * kv_len >= 256 * sms:
        return wide
    return config


# Lines of (arch, itemsize, the most of block_d, the most rows, load, launch), None for any. The first that fits counts. BLOCK_M
# is that of the launch, but at most the number of rows.
Line = tuple[int | None, int | None, int | None, int | None, tuple[str, ...] | None, Config]
_TABLES: dict[str, tuple[Line, ...]] = {
    # As a rule 64 to 128 KB of K/V in flight per multiprocessor.
    "decode": (
        (0, None, None, None, None, Config(64, 16, 4, 1, 2)),
        # Codes of 8 bits: as many bytes in flight. Converted tiles of 64 rows and more keys spill.
        (90, 1, 64, 16, None, Config(16, 256, 4, 3, 2)),
        (90, 1, 128, 16, None, Config(16, 128, 4, 3, 2)),
        (90, 1, 256, 16, None, Config(16, 64, 4, 3, 2)),
        (80, 1, 64, 16, None, Config(16, 128, 2, 3, 4)),
        (80, 1, 128, 16, None, Config(16, 128, 4, 3, 2)),
        (80, 1, 256, 16, None, Config(16, 64, 4, 3, 2)),
        (None, 1, 64, 16, None, Config(16, 128, 4, 3, 2)),
        (None, 1, 128, 16, None, Config(16, 64, 4, 3, 2)),
        (None, 1, 256, 16, None, Config(16, 32, 4, 3, 2)),
        (None, 1, 64, None, None, Config(64, 64, 4, 3, 1)),
        (90, 1, 128, 32, None, Config(32, 128, 4, 3, 2)),
        (90, 1, 256, 32, None, Config(32, 64, 4, 3, 2)),
        (90, 1, 128, None, None, Config(64, 64, 4, 3, 2)),
        (None, 1, 128, None, None, Config(64, 64, 4, 3, 1)),
        (None, 1, None, None, None, Config(64, 32, 4, 3, 1)),
        (None, 4, 128, None, None, Config(64, 32, 4, 2, 2)),
        (None, 4, 256, None, None, Config(64, 16, 4, 2, 2)),
        (None, 4, None, 32, None, Config(32, 16, 4, 2, 2)),
        (None, 4, None, None, None, Config(64, 16, 8, 2)),
        # Four programs per SM hide each other's start and end if each has one short head. With more rows, sinks spill.
        (90, 2, 64, 16, ("many",), Config(16, 64, 4, 3, 4, registers=128)),
        # Three programs fit with 168 registers; without a limit the code for sinks takes 250.
        (90, 2, 64, 16, None, Config(16, 128, 4, 3, 2, 2, sink_registers=168)),
        (90, 2, 64, None, None, Config(64, 128, 4, 3, 2, 2)),
        (None, 2, 64, 32, None, Config(32, 128, 4, 3, 2, 2)),
        (None, 2, 64, None, None, Config(64, 32, 4, 3, 2, 2)),  # larger tiles or fewer warps spill in the loop over tiles
        (90, 2, 128, 16, ("many",), Config(16, 32, 2, 3, 4)),
        # One program per SM with a deeper pipeline halves the merge; two programs hide each other's change of heads.
        (90, 2, 128, 16, ("few", "one"), Config(16, 64, 4, 4, 1, sink_registers=168)),
        (90, 2, 128, 16, None, Config(16, 64, 4, 3, 2, sink_registers=168)),
        (None, 2, 128, 32, None, Config(32, 64, 4, 3, 2)),
        # With few keys, storing and merging the partial results of two splits takes longer than splits save. So do those of more
        # than 32 splits of a few tiles.
        (90, 2, 128, None, ("one",), Config(64, 64, 4, 3, 2, whole_keys=16 << 10, short_splits=32)),
        (90, 2, 128, None, None, Config(64, 64, 4, 3, 2, short_splits=32)),
        (None, 2, 128, None, None, Config(64, 64, 8, 3, 1, 2)),  # larger tiles or fewer warps spill
        (90, 2, 256, None, None, Config(64, 64, 8, 3, 1, 2)),
        (80, 2, 256, None, None, Config(64, 32, 4, 3, 1, 4)),
        (None, 2, 256, None, None, Config(64, 32, 4, 2, 1, 4)),
        (None, 2, None, 32, None, Config(32, 32, 4, 2, 2)),
        (None, 2, None, None, None, Config(64, 32, 8, 2)),
    ),
    # For blocks of 64 or 128 rows. Larger tiles or fewer warps spill in the loop over tiles.
    "many rows": (
        (0, None, None, None, None, Config(32, 32, 4, 1, 2)),
        (90, 2, 64, None, ("sinks",), Config(64, 64, 4, 3, 2, 2)),
        (90, 2, 64, None, None, Config(64, 128, 4, 3, 2, 2)),
        (90, 2, 128, 64, ("no sinks",), Config(64, 64, 4, 3, 2, 2)),
        (90, 2, 128, None, None, Config(128, 64, 8, 3, 1, 2)),
        (90, 2, 256, None, None, Config(64, 32, 8, 3, 1, 4)),
        (None, 2, 64, None, None, Config(64, 64, 4, 3, 1, 2)),
        (80, 2, 128, None, None, Config(64, 32, 4, 3, 2, 2)),
        (None, 2, 128, None, None, Config(64, 32, 4, 2, 2, 2)),
        (None, 2, 256, None, None, Config(64, 32, 8, 2, 1, 4)),
        (None, 4, 128, None, None, Config(32, 32, 4, 2, 1, 2)),
        (None, 4, 256, None, None, Config(32, 32, 4, 1, 1, 2)),
        (None, 4, None, None, None, Config(16, 16, 4, 2, 1, 2)),
        (None, 2, None, None, None, Config(32, 32, 4, 2, 1, 2)),
    ),
}


@cache
def _launch(table: str, arch: int, itemsize: int, block_d: int, rows: int, load: str | None) -> Config:
    config = next(
        each
        for of_arch, of_size, most_d, most_rows, loads, each in _TABLES[table]
        if of_arch in (None, arch) and of_size in (None, itemsize) and (loads is None or load in loads)
        if block_d <= (most_d or block_d) and rows <= (most_rows or rows)
    )
    return replace(config, BLOCK_M=min(rows, config.BLOCK_M))


def many_rows(device: torch.device, dtype: torch.dtype, head_dim: int, rows: int, sinks: bool) -> Config:
    """The launch of `lean` for more packed rows in each KV head than MAX_DECODE_ROWS.

    head_dim: the larger of K's and V's. sinks: whether the launch scores sinks.
    """
    # Blocks of 128 rows read K and V half as often; those of 64 leave fewer rows empty.
    few = rows <= 256 or (rows < 640 and 0 < rows % 128 <= 64)
    load = "sinks" if sinks else "no sinks"
    return _launch("many rows", gpu.arch(device), max(dtype.itemsize, 2), block_d(head_dim), 64 if few else 128, load)


def merge(device: torch.device, block_dv: int, rows: int, partials: int) -> dict[str, int]:
    """The form of a merge of `rows` rows with about `partials` results each, of `block_dv` floats.

    It says the rows of a program, one, or four of many rows, which have few results; the results in one load; and the warps.
    """
    many = rows >= 8 * gpu.num_sms(device)
    each, size, partials = (2048, 4 * block_dv, 8) if many else (4096 if block_dv == 128 else 2048, block_dv, partials)
    # Results occupy 64 registers of each thread, or 128: fewer warps need fewer barriers.
    warps = next((w for w in (1, 2, 4) if each * w >= partials * size), 8)
    return {"ROWS": 4 if many else 1, "CHUNK": max(1, each * warps // size), "num_warps": warps}


def merge_of_shares(device: torch.device, block_dv: int, rows: int) -> dict[str, int]:
    """The same for the merge of shares, of which rows have up to MAX_SPLITS."""
    if rows >= 16 * gpu.num_sms(device):
        return {"ROWS": max(1, min(8, 1024 // block_dv)), "CHUNK": 8, "num_warps": 2}
    return {"ROWS": 1, "CHUNK": max(1, min(32, 4096 // block_dv)), "num_warps": 1}


def most_splits(device: torch.device, config: Config, heads: int, kv_len: int) -> int:
    """The most splits per KV head if all heads get the same number; 0 if there are more heads than programs."""
    return 1 if kv_len <= config.whole_keys else config.programs_per_sm * gpu.num_sms(device) // heads


def num_splits(device: torch.device, config: Config, heads: int, kv_len: int, block_dv: int, rows: int = 1) -> int:
    """Flash-Decoding's splits per KV head: enough programs for one wave, at most MAX_SPLITS.

    A split has at least `split_tiles` tiles, and 16 if there are more than `short_splits`. In decode on Hopper, over more than
    128 keys, it may have one tile if there are few splits, or if all of them run on half of the SMs: reading a second tile takes
    longer than merging another result. block_dv: floats of a result. rows: packed query rows of a KV head.
    """
    tiles = -(-kv_len // config.BLOCK_N)
    most = -(-tiles // config.split_tiles)
    if gpu.arch(device) == 90 and config.BLOCK_N >= 64 and rows <= MAX_DECODE_ROWS and kv_len > 128:
        few = SINGLE_TILES if block_dv <= 128 else SINGLE_TILES // 2
        most = tiles if 2 * heads * tiles <= gpu.num_sms(device) else max(most, min(tiles, few))
    most = min(most, max(config.short_splits, tiles // 16), MAX_SPLITS)
    splits = max(1, min(most_splits(device, config, heads, kv_len), most))
    return -(-tiles // -(-tiles // splits))  # a split that does not shorten the longest one only adds work to the merge
