"""Schedule: which program of `lean` has which tiles of K and V, as the device finds it out and as far as the host can know it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..device.visibility import block_bounds, load_spans
from ..host import gpu, tables
from ..spec import KV, Spec

# Tiles of a share up to which it is better kept within one head, at the price of up to three tenths of the programs: starting
# another head costs about one or two tiles.
SHORT = 90
# Blocks of queries, of all rows of a batch, up to which the kernels find their shares by themselves.
MAX_ITEMS = 512
# Rows of a block where K and V are not cut, and what a merge costs, in products of a row and a key that an SM does meanwhile.
ROWS, MERGE = 128, 120_000
# Where the Hopper kernel cuts such a block: keys that each share costs besides its own, and has at least; keys that the merge
# costs; shares of a block, and waves of them; and by how much, times their square, shares read K and V at more places at once.
BEGIN, MIN_SHARE, SHARES_MERGE, MOST_SPLITS, MOST_WAVES, APART = 400, 512, 300, 16, 8, 0.0035
MARGIN = 1.15  # an estimated gain of less is none: blocks that are not cut are balanced a little by their order


@triton.jit
def num_tiles(
    span_ptrs, first, last, q_len, kv_len, window,
    C: tl.constexpr,
):  # fmt: skip
    """Tiles that the queries first..last of one row see in a KV head, or of each row of a block; at least one, for sinks."""
    q_start, kv_start, kv_stop, window, causal, _ = load_spans(span_ptrs, q_len, kv_len, window, C.HAS_SPANS, C.IS_CAUSAL)
    lo, hi, _, _ = block_bounds(q_start + first, q_start + last, kv_start + C.SINKS, kv_stop, window, causal)
    return tl.maximum((hi - lo + C.BLOCK_N - 1) // C.BLOCK_N, 1)


@triton.jit
def owner(t, share, extra):
    """Which member of a crew has tile t of its line in its share."""
    longer = extra * (share + 1)
    return tl.where(t < longer, t // (share + 1), extra + (t - longer) // share)


@triton.jit
def queries_of(block, q_len, C: tl.constexpr):
    """(first, last) query of a block of BLOCK_M packed rows."""
    BLOCK_M: tl.constexpr = C.BLOCK_M
    GROUP: tl.constexpr = C.GROUP
    return block * BLOCK_M // GROUP, tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP, q_len - 1)


@triton.jit
def deal(
    Spans, stride_sb, batch, blocks, kv_heads, q_len, kv_len, window, programs, spread,
    BLOCK_B: tl.constexpr,
    MIN_TILES: tl.constexpr,
    C: tl.constexpr,
    SHORT: tl.constexpr = SHORT,
):  # fmt: skip
    """Who has which tiles: (tiles_b, line_b, lines, line_tiles, crew, share, extra).

    tiles_b, line_b [BLOCK_B]: tiles of one KV head and of all KV heads of each item, a block of queries of a row; numbers where
    BLOCK_B is 1, as items are alike. There are `lines` lines of `line_tiles` tiles, each dealt to a crew of `crew` programs:
    `share` tiles to every member and one more to each of the first `extra`.
    """
    items = batch * blocks
    if BLOCK_B > 1:
        offs_b = tl.arange(0, BLOCK_B)
        item = tl.minimum(offs_b, items - 1)
        row = item // blocks
        first, last = queries_of(item - row * blocks, q_len, C)
        tiles_b = num_tiles(Spans + row.to(tl.int64) * stride_sb, first, last, q_len, kv_len, window, C)
        line_b = tl.where(offs_b < items, tiles_b * kv_heads, 0)
        total = tl.sum(line_b, 0)
        alike = tl.max(line_b, 0) * items == total
    else:
        tiles_b = num_tiles(Spans, 0, q_len - 1, q_len, kv_len, window, C)
        line_b = tiles_b * kv_heads
        total = line_b * items
        alike = tl.full([], True, tl.int1)

    # Fewer programs than there are when there is little work, so that a share is worth its merge.
    programs = tl.minimum(programs, tl.maximum(total // MIN_TILES, tl.minimum(total, spread)))
    # Where rows are alike each head may have a line and a crew of its own, so that no share goes on to a second head. That is
    # worth it where few programs are left over for it, or not many and shares are SHORT.
    heads = items * kv_heads
    in_crews = programs // heads * heads
    short = (in_crews * 10 >= programs * 7) & (total <= programs * SHORT)
    own = alike & (in_crews > 0) & ((in_crews * 16 >= programs * 15) | short)
    lines = tl.where(own, heads, 1)
    line_tiles = total // lines
    crew = programs // lines
    longest = (line_tiles + crew - 1) // crew
    crew = (line_tiles + longest - 1) // longest  # more programs would not shorten the longest share
    share = line_tiles // crew  # this form stays in 32 bits, where dividing is cheap
    return tiles_b, line_b, lines, line_tiles, crew, share, line_tiles - share * crew


def shares_within_heads(device: torch.device, config: tables.Config, heads: int, kv_len: int) -> bool:
    """Whether programs of their own serve `heads` KV heads of rows that are alike better than one line of tiles.

    As `deal` decides on the device, but that this does not count how many programs little work needs, and that with more than
    two heads an SM it prefers a program for each, where a head is soon done. config: the programs' own; kv_len: most in sight.
    """
    sms, tiles = gpu.num_sms(device), triton.cdiv(kv_len, config.BLOCK_N)
    programs = config.programs_per_sm * sms
    if heads > 2 * sms:  # beginning a head costs a line more, if others run beside it here and the last wave is full enough
        soon_done = tiles <= 16 * config.programs_per_sm
        return config.programs_per_sm > 1 and soon_done and 5 * (-heads % programs) <= 3 * programs
    of_heads = programs // heads * heads
    return of_heads > 0 and (
        16 * of_heads >= 15 * programs or (10 * of_heads >= 7 * programs and heads * tiles <= programs * SHORT)
    )


def _in_sight(q: torch.Tensor, kv: KV, spec: Spec) -> int:
    """Keys that a block of queries visits at most."""
    kv_len = kv.k.shape[2]
    return kv_len if spec.window is None else min(kv_len, spec.sinks + spec.window + q.shape[2] - 1)


def splits_of(q: torch.Tensor, kv: KV, spec: Spec) -> tuple[int, float]:
    """(into how many shares the Hopper kernel cuts the keys of each block of ROWS queries of a head, the estimated cost of it).

    The cost is in products of a row and a key. Blocks are cut where they leave much of the GPU idle: less than a wave of them, or
    a last wave that is nearly empty.
    """
    batch, num_heads, q_len, _ = q.shape
    sms = gpu.num_sms(q.device)
    blocks, keys = batch * num_heads * triton.cdiv(q_len, ROWS), _in_sight(q, kv, spec)

    def cost(splits: int) -> float:
        waves: int = triton.cdiv(blocks * splits, sms)
        if splits == 1:
            return waves * ROWS * keys
        return ROWS * (waves * (keys / splits * (1 + APART * splits**2) + BEGIN) + SHARES_MERGE)

    most = min(MOST_SPLITS, keys // MIN_SHARE, MOST_WAVES * sms // blocks)
    best = min(range(1, max(most, 1) + 1), key=cost)
    if MARGIN * cost(best) >= cost(1):
        best = 1
    return best, cost(best)


def pays(q: torch.Tensor, kv: KV, spec: Spec, speed: float, splits: bool = False) -> bool:
    """Whether `lean`'s shares are estimated to be faster than the kernel that computes blocks of queries of a head.

    speed: how many products of a row and a key that kernel computes in the time in which `lean` computes one. splits: it cuts K
    and V itself (`splits_of`). It is False where blocks of many rows take more registers than there are.
    """
    batch, num_heads, q_len, head_dim = q.shape
    kv_heads = max(kv.k.shape[1], 1)
    rows = q_len * num_heads // kv_heads
    arch, width = gpu.arch(q.device), max(head_dim, kv.v.shape[3])
    if arch == 0 or q.dtype.itemsize > 2 or rows == 0 or width > (128 if spec.sinks and arch < 90 else 256):
        return False
    config, sms = tables.many_rows(q.device, q.dtype, width, rows, spec.sinks > 0), gpu.num_sms(q.device)
    blocks = batch * triton.cdiv(rows, config.BLOCK_M)
    keys = _in_sight(q, kv, spec)
    shared = kv_heads * blocks * config.BLOCK_M * keys / sms + MERGE
    if splits:
        others = splits_of(q, kv, spec)[1]
    else:
        others = triton.cdiv(batch * num_heads * triton.cdiv(q_len, ROWS), sms) * ROWS * keys
    return bool(blocks <= MAX_ITEMS and MARGIN * shared * speed < others)


def choose(
    device: torch.device, dtype: torch.dtype, head_dim: int, rows: int, heads: int, kv_len: int, alike: bool
) -> tuple[tables.Config, bool]:
    """(`lean`'s launch, whether programs of their own serve the heads); rows, heads as in `tables.decode`, kv_len: most in sight.

    alike: whether the host knows that batch rows are.
    """
    if alike:
        config = tables.decode(device, dtype, head_dim, rows, heads)
        if shares_within_heads(device, config, heads, kv_len):
            return config, True
    return line_config(device, dtype, head_dim, rows, heads, alike), False


def line_config(device: torch.device, dtype: torch.dtype, head_dim: int, rows: int, heads: int, alike: bool) -> tables.Config:
    """`lean`'s launch for a line of tiles; arguments as in `choose`."""
    return tables.decode(device, dtype, head_dim, rows, heads if alike and heads <= gpu.num_sms(device) else None)
