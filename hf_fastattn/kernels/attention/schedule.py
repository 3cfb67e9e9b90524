"""The schedule of `lean`: which program computes which tiles of K and V, on the device, and what the host can predict of it."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from ..device.tile import begin_of
from ..device.visibility import block_bounds, load_spans
from ..host import gpu, tables
from ..spec import KV, Spec

# Average tiles per program up to which a share should not cross from one head to the next, even if up to three tenths of the
# programs stay idle: the start of another head costs about as much as one or two tiles.
SHORT = 90
MAX_BATCH = 512  # rows of a batch for which the kernels compute the schedule of several blocks of queries
# Query rows of a block whose keys are not split; and the cost of a merge, in products of a query row and a key on one SM.
ROWS, MERGE = 128, 120_000
# The most programs of a team; and the query rows whose products with a key take as long as reading it from memory, on all SMs.
MAX_TEAM, READ = 16, 150
HALF = 0.6  # the cost of a block of the Hopper kernel that has rows for only one of the two consumers
# An estimate of the Hopper kernel, by its columns: keys that a block of ROWS rows visits in a microsecond on an H200, and the
# average over all SMs of a GPU that is fully used, where its power limits it. In microseconds: the start of a block or split; if
# blocks are split, the merge, what each partial result of 128 dimensions adds to it, and what each split of a block adds.
KEYS_PER_US = {64: 117, 128: 88, 256: 42}
SUSTAINED = {64: 117, 128: 80, 256: 42}
START_US, MERGE_US, PARTIAL_US, SPLIT_US = 2.7, 3.5, 0.034, 0.03
MIN_SPLIT, MAX_SPLITS, MAX_WAVES = 128, 64, 8  # keys of a split; splits of a block; waves of splits
# By head_dim, for short K and V: packed rows of a block; the most bytes of K and V that all blocks read, mostly from L2; the most
# keys, as merging the partial results of one or two blocks over more keys takes longer than the splits save. The bytes are those
# of a GPU with BRIEF_SMS SMs: the bandwidth of L2 grows with the number of SMs, and what fewer rows in a block save does not.
BRIEF_SMS = 132
BRIEF = {64: ((64, 64 << 20, 1 << 30),), 128: ((16, 8 << 20, 1 << 30), (64, 64 << 20, 8 << 10))}
MARGIN = 1.15  # a smaller estimated gain of `lean` is ignored: the order of blocks also balances them a little
GAIN = 1.05  # likewise of splits and of smaller teams, whose estimates are closer


@triton.jit
def seen_keys(
    span_ptrs, first, last, q_len, kv_len, window,
    C: tl.constexpr, MAY_PAD: tl.constexpr = False,
):  # fmt: skip
    """The keys [lo, hi) that queries first..last of a row see, without sinks, for one row or a tensor of rows.

    MAY_PAD: whether all of them may be padding.
    """
    # Merges read spans before their wait, so past the L1 cache (see `overlap`).
    q_start, kv_start, kv_stop, window, causal, _, live_stop = load_spans(
        span_ptrs, q_len, kv_len, window, C.IS_CAUSAL, PAST_L1=True
    )  # fmt: skip
    if not MAY_PAD:
        live_stop = None
    lo, hi, _, _ = block_bounds(q_start + first, q_start + last, live_stop, kv_start + C.SINKS, kv_stop, window, causal)
    return lo, hi


@triton.jit
def tiles_of(lo, hi, align, C: tl.constexpr):
    """Tiles of the keys [lo, hi); at least one, for sinks. align: see `begin_of`."""
    return tl.maximum((hi - begin_of(lo, align) + C.BLOCK_N - 1) // C.BLOCK_N, 1)


@triton.jit
def num_tiles(
    span_ptrs, first, last, q_len, kv_len, window, align,
    C: tl.constexpr,
):  # fmt: skip
    """Tiles that queries first..last of a row visit in one KV head, for one row or a tensor of rows."""
    lo, hi = seen_keys(span_ptrs, first, last, q_len, kv_len, window, C)
    return tiles_of(lo, hi, align, C)


@triton.jit
def program_of(t, share, extra):
    """The program, counted within its range, that computes tile t of the range."""
    longer = extra * (share + 1)
    return tl.where(t < longer, t // (share + 1), extra + (t - longer) // share)


@triton.jit
def queries_of(block, q_len, C: tl.constexpr):
    """(first, last) query of a block of BLOCK_M packed rows."""
    BLOCK_M: tl.constexpr = C.BLOCK_M
    GROUP: tl.constexpr = C.GROUP
    return block * BLOCK_M // GROUP, tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP, q_len - 1)


@triton.jit
def assign_tiles(
    Spans, stride_sb, batch, kv_heads, q_len, kv_len, window, programs, num_sms, align,
    BLOCK_B: tl.constexpr, MIN_TILES: tl.constexpr, C: tl.constexpr, SHORT: tl.constexpr = SHORT,
):  # fmt: skip
    """The schedule: (head_tiles, row_tiles, num_ranges, range_tiles, range_programs, share, extra).

    head_tiles, row_tiles [BLOCK_B]: the tiles of each batch row in one KV head and in all; scalars if BLOCK_B is 1, where all
    rows have the same number. The tiles of all rows are divided into num_ranges ranges of range_tiles tiles, with range_programs
    programs each. A program computes `share` tiles, and one more if it is among the first `extra` of its range.

    If the queries of a KV head take several blocks, a program here is a team of programs, one for each of `team_size` blocks, a
    KV head counts once for each team that its blocks need, and num_sms is divided by the size. The members of a team read the
    same tiles at the same time, so they read memory once. align: see `begin_of`.
    """
    if BLOCK_B > 1:
        offs_b = tl.arange(0, BLOCK_B)
        row = tl.minimum(offs_b, batch - 1)
        head_tiles = num_tiles(Spans + row.to(tl.int64) * stride_sb, 0, q_len - 1, q_len, kv_len, window, align, C)
        row_tiles = tl.where(offs_b < batch, head_tiles * kv_heads, 0)
        total = tl.sum(row_tiles, 0)
        uniform = tl.max(row_tiles, 0) * batch == total
    else:
        head_tiles = num_tiles(Spans, 0, q_len - 1, q_len, kv_len, window, align, C)
        row_tiles = head_tiles * kv_heads
        total = row_tiles * batch
        uniform = tl.full([], True, tl.int1)

    # With little work fewer programs run, so that each share is worth its merge.
    programs = tl.minimum(programs, tl.maximum(total // MIN_TILES, tl.minimum(total, num_sms)))
    # In a uniform batch each head may be a range, so that no share crosses into a second head. That is faster if few programs
    # stay idle, or if more do but shares are SHORT.
    heads = batch * kv_heads
    used = programs // heads * heads
    short = (used * 10 >= programs * 7) & (total <= programs * SHORT)
    per_head = uniform & (used > 0) & ((used * 16 >= programs * 15) | short)
    num_ranges = tl.where(per_head, heads, 1)
    range_tiles = total // num_ranges
    range_programs = programs // num_ranges
    longest = (range_tiles + range_programs - 1) // range_programs
    range_programs = (range_tiles + longest - 1) // longest  # more programs would not shorten the longest share
    share = range_tiles // range_programs  # this form stays in 32 bits, where dividing is cheap
    return head_tiles, row_tiles, num_ranges, range_tiles, range_programs, share, range_tiles - share * range_programs


def shares_within_heads(device: torch.device, config: tables.Config, heads: int, kv_len: int) -> bool:
    """Whether, in a uniform batch, fixed splits of each of `heads` KV heads are faster than stream-K over all of them.

    The condition is that of `assign_tiles` with three differences: the number of programs is not reduced for little work; with
    more than two heads per SM one program for each head is preferred if heads are short, or up to twice as long if all run at
    once and every SM has about as many; and shares of one program per SM may be four times as long. config: that of fixed
    splits; kv_len: the most keys that a query sees.
    """
    sms, tiles = gpu.num_sms(device), triton.cdiv(kv_len, config.BLOCK_N)
    programs = config.programs_per_sm * sms
    if heads > 2 * sms:
        # Another program of the SM hides the start of a head, which stream-K cannot. The last wave must be full enough.
        even = heads <= programs and 16 * heads >= 15 * sms * triton.cdiv(heads, sms)
        short = tiles <= (32 if even else 16) * config.programs_per_sm
        return config.programs_per_sm > 1 and short and 5 * (-heads % programs) <= 3 * programs
    used = programs // heads * heads
    # Most programs of `tables.one_per_sm` alone use all the bandwidth of memory, so idle SMs cost less.
    short = 4 * SHORT if config.programs_per_sm == 1 and config.BLOCK_N == 128 else SHORT
    return used > 0 and (16 * used >= 15 * programs or (10 * used >= 7 * programs and heads * tiles <= programs * short))


def visible_keys(kv_len: int, q_len: int, spec: Spec) -> int:
    """The most keys that a block of queries visits."""
    return kv_len if spec.window is None else min(kv_len, spec.sinks + spec.window + q_len - 1)


@cache
def team_size(blocks: int, rows: int, programs: int) -> tuple[int, float]:
    """(programs of a team for `blocks` blocks of `rows` query rows of a KV head, its cost), for so many programs in all.

    cost: the query rows whose products with all keys would take as long if all programs had equal parts of them. A larger team
    reads memory less often.
    """
    sizes = range(min(blocks, programs, MAX_TEAM), 0, -1)
    costs = [triton.cdiv(blocks, size) * max(rows * programs / (programs // size), READ) for size in sizes]
    return next((size, cost) for size, cost in zip(sizes, costs, strict=True) if cost <= GAIN * min(costs))


@cache
def pack_of(q_len: int, group: int, words: bool = False) -> int:
    """How many heads of a KV head share a block of the Hopper kernel: the largest power of two with the fewest empty rows.

    A pack of one head has no empty head, but more empty rows if there are few queries. Where heads fill packs of several, these
    are best for any number of queries, which then selects no kernel: a block of fewer queries visits fewer keys that some of them
    do not see. With a key mask (`words`) packs of one head are faster.
    """
    most = min(1 << (group - 1).bit_length(), ROWS // 2)
    pack = min((1 << i for i in range(most.bit_length() - 1, 0, -1)), key=lambda heads: -group % heads, default=1)

    def cost(pack: int) -> float:
        halves = triton.cdiv(q_len * pack, ROWS // 2)
        return float(triton.cdiv(group, pack) * (halves // 2 + HALF * (halves % 2)))

    return pack if group % pack == 0 and not words else min(1, pack, key=cost)


def splits_of(q: torch.Tensor, kv: KV, spec: Spec, pack: int, columns: int) -> tuple[int, int]:
    """(number of blocks of ROWS query rows whose keys are not split, splits of each of the others) in the Hopper kernel.

    The blocks that fill the GPU are not split, and the others are if they leave much of it idle. pack: heads in a block; columns:
    of the buffers of K and V.
    """
    batch, num_heads, q_len, _ = q.shape
    _, kv_heads, kv_len, _, _ = kv.sizes
    blocks = batch * kv_heads * triton.cdiv(num_heads // kv_heads, pack) * triton.cdiv(q_len * pack, ROWS)
    # The keys that every block visits. Those that only later queries see are balanced by the order of blocks.
    keys = max(kv_len - q_len, 0) if spec.causal else kv_len
    keys = keys if spec.window is None else min(keys, spec.window)
    return _splits(blocks, keys, q_len // 2 if spec.causal else 0, columns, gpu.num_sms(q.device))


def _splits(blocks: int, keys: int, more_keys: int, columns: int, sms: int) -> tuple[int, int]:
    """`splits_of` by estimated time. keys: that a block visits; more_keys: what blocks visit besides, on average."""
    whole = blocks // sms * sms
    cut = blocks - whole
    if cut == 0:
        return blocks, 1
    keys_us, partial_us = keys / KEYS_PER_US[columns], cut * PARTIAL_US * columns / 128 + SPLIT_US
    first = whole / sms * (keys_us + START_US)
    least = blocks / sms * keys / SUSTAINED[columns]
    balanced = blocks / sms * more_keys / SUSTAINED[columns]

    def us(splits: int) -> float:
        last = -(-cut * splits // sms) * (keys_us / splits + START_US)
        merge = MERGE_US + splits * partial_us if splits > 1 else 0.0
        return balanced + max(first + last, least) + merge

    max_splits = min(MAX_SPLITS, keys // MIN_SPLIT, MAX_WAVES * sms // cut)
    best = min(range(1, max(max_splits, 1) + 1), key=us)
    return (whole, best) if GAIN * us(best) < us(1) else (blocks, 1)


def pays(q: torch.Tensor, kv: KV, spec: Spec) -> bool:
    """Whether stream-K is estimated to be faster than the portable kernel, with one program for each block of queries of a head.

    The result is False if blocks of many rows need more registers than there are.
    """
    batch, num_heads, q_len, head_dim = q.shape
    sizes = kv.sizes
    kv_heads = max(sizes.num_kv_heads, 1)
    rows = q_len * num_heads // kv_heads
    arch, width = gpu.arch(q.device), max(head_dim, sizes.value_dim)
    if arch == 0 or q.dtype.itemsize > 2 or rows == 0 or width > (128 if spec.sinks and arch < 90 else 256):
        return False
    config, sms = tables.many_rows(q.device, q.dtype, width, rows, spec.sinks > 0), gpu.num_sms(q.device)
    keys = visible_keys(sizes.kv_len, q_len, spec)
    _, cost = team_size(triton.cdiv(rows, config.BLOCK_M), config.BLOCK_M, config.programs_per_sm * sms)
    stream_k = batch * kv_heads * keys * cost / sms + MERGE
    alone = triton.cdiv(batch * num_heads * triton.cdiv(q_len, ROWS), sms) * ROWS * keys
    return bool(batch <= MAX_BATCH and MARGIN * stream_k < alone)


def brief(device: torch.device, dtype: torch.dtype, head_dim: int, rows: int, heads: int, kv_len: int) -> tables.Config | None:
    """The configuration of fixed splits of several blocks of packed rows if K and V are short; otherwise None.

    The time of such a call is mostly that of the start and the end of its programs, which are short for small blocks. But each
    block reads all K and V of its head. The GPU must have room for two splits of each. Arguments as in `choose`.
    """
    if gpu.arch(device) == 0 or dtype.itemsize != 2:
        return None
    sms = gpu.num_sms(device)
    for block, most_bytes, most_keys in BRIEF.get(max(64, tables.block_d(head_dim)), ()):
        blocks = heads * triton.cdiv(rows, block)
        read = blocks * kv_len * 2 * head_dim * dtype.itemsize
        fits = read * BRIEF_SMS <= most_bytes * sms and kv_len <= most_keys
        if rows > block and fits and 0 < 2 * blocks <= sms:
            return tables.decode(device, dtype, head_dim, block, blocks)
    return None


def is_brief(q: torch.Tensor, kv: KV, spec: Spec) -> bool:
    """Whether `brief` has a configuration for these tensors."""
    batch, num_heads, q_len, head_dim = q.shape
    sizes = kv.sizes
    kv_heads = max(sizes.num_kv_heads, 1)
    rows, width = q_len * num_heads // kv_heads, max(head_dim, sizes.value_dim)
    return brief(q.device, q.dtype, width, rows, batch * kv_heads, visible_keys(sizes.kv_len, q_len, spec)) is not None


def choose(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    rows: int,
    heads: int,
    kv_len: int,
    uniform: bool,
    sinks: bool = False,
    page: int = 0,
) -> tuple[tables.Config, bool]:
    """(configuration of `lean`'s launch, whether it is one of fixed splits).

    rows, heads: as in `tables.decode`; kv_len: the most keys that a query sees; uniform: as in `Call.uniform`; sinks: as in
    `tables.many_rows`; page: as in `tables.fixed`.
    """
    config = brief(device, dtype, head_dim, rows, heads, kv_len)
    if config is not None:
        return config, True
    if rows > tables.MAX_DECODE_ROWS:
        return tables.many_rows(device, dtype, head_dim, rows, sinks), False
    if uniform:
        config = tables.fixed(device, dtype, head_dim, rows, heads, kv_len, page)
        if shares_within_heads(device, config, heads, kv_len):
            return config, True
    return stream_k_config(device, dtype, head_dim, rows, heads, uniform), False


def stream_k_config(
    device: torch.device, dtype: torch.dtype, head_dim: int, rows: int, heads: int, uniform: bool
) -> tables.Config:
    """The configuration of a stream-K launch; arguments as in `choose`."""
    return tables.decode(device, dtype, head_dim, rows, heads if uniform and heads <= gpu.num_sms(device) else None)
