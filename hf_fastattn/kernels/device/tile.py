"""Loading a tile of K and V. A form of K and V (`spec.Form`) may have functions of its own for this, of these signatures:

    load_k, load_v(base, strides, first, offs_n, offs_d, mask, indices, extra) -> tile, or a pair of tiles
    weights(strides, slots, indices, extra) -> (factor, shift, inverse)
    queries(q, indices, extra, HEAD_DIM) -> (q, or a pair, in the dtype of K's tiles; factor; shift)
    store(k, v, bases, strides, slot, mask, indices, extra, HEAD_DIM, VALUE_DIM)

load_k, load_v: see `load_plain`. With two parts, the half of offs_d and of the mask that belongs to one of them is given.

weights: of the tokens in `slots` [slots], which may lie past the end; strides are those of K. All three results are [slots]: the
scores of a token are multiplied by `factor`, and its values by exp2(shift). inverse is exp2(-shift). So a scale of V costs
nothing for each element, and weights stay below 1.

queries: q [rows, BLOCK_D] with 0 from HEAD_DIM on -> q as it is multiplied with K, and a factor and a shift for the products of
each row, [rows, 1]. A centre c that is subtracted from K has the shift q c.

store: one token k, v [heads, BLOCK_D] in the model's dtype, 0 outside of the widths, of the heads in mask [heads, 1]. bases,
strides: pairs, for K and V; the KV head in `indices` is [heads, 1], and so are the bases.
"""

import triton
import triton.language as tl


@triton.jit
def aligned_strides(stride_b, stride_h, stride_n, ALIGN: tl.constexpr):
    """These strides, which ALIGN divides: the compiler knows it from here on.

    By itself it only knows which strides are multiples of 16. So 16 bytes are loaded at once, and ahead, at a head_dim of 72, 88,
    104 or 120 too.
    """
    if ALIGN < 16:
        stride_b = stride_b // ALIGN * ALIGN
        stride_h = stride_h // ALIGN * ALIGN
        stride_n = stride_n // ALIGN * ALIGN
    return stride_b, stride_h, stride_n


@triton.jit
def head_of(base, strides, indices, FORM: tl.constexpr):
    """The pointer to slot 0 of a KV head, in page 0 if the form has pages."""
    if not FORM.paged:
        base += indices[0] * strides[0]
    return base + indices[1] * strides[1]


@triton.jit
def begin_of(lo, align):
    """The slot at which tiles that contain the keys from `lo` on begin: a multiple of `align`, a power of two.

    Tiles of pages begin at multiples of their size: the compiler then knows which of their slots are in one page. With dropout
    they begin where a group of random numbers does.
    """
    return lo & -align


@triton.jit
def tiles_in(lo, hi, C: tl.constexpr):
    """Tiles that contain the keys [lo, hi), none if there are none."""
    tiles = tl.cdiv(hi - begin_of(lo, C.TILE_ALIGN), C.BLOCK_N)
    if C.TILE_ALIGN > 1:
        tiles = tl.where(hi > lo, tiles, 0)
    return tiles


@triton.jit
def words_end(lo, hi, holes, kv_len, C: tl.constexpr):
    """The slot at which the bit mask ends for tiles from `lo` on: without holes none of its words is read."""
    if C.TILE_ALIGN > 1:  # tiles that have no key, too
        hi = tl.minimum(hi, kv_len)
    return tl.where(holes, hi, lo)


@triton.jit
def live_slots(slots, lo, hi, C: tl.constexpr):
    """Which slots of a tile are in [lo, hi): the first tile may begin before lo, see `begin_of`."""
    found = slots < hi
    if C.TILE_ALIGN > 1:
        found = found & (slots >= lo)
    return found


@triton.jit
def ends_of(lo, hi, kv_len):
    """The first and the last of the slots [lo, hi), for `load_plain`; a slot of the buffer if there are none."""
    last = tl.minimum(tl.maximum(hi - 1, lo), kv_len - 1)
    return tl.minimum(lo, last), last


@triton.jit
def load_plain(base, strides, first, offs_n, offs_d, mask, indices, extra):
    """Load the slots first + offs_n and dimensions offs_d of one KV head, [slots, dimensions] in the queries' dtype.

    base: the result of `head_of`. strides: elements between two rows (pages), heads and slots. mask: 0 is returned outside of it;
    None: no mask. indices: (batch row, KV head, num_kv_heads, kv_len). extra: (Scales, Centre, Pages), the further tensors of a
    form, None here; with pages then the two `ends_of` the live slots.
    """
    ptrs = base + first.to(tl.int64) * strides[2] + (offs_n[:, None] * strides[2] + offs_d[None, :])
    if mask is None:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def load_tile(kv, first, offs_n, slot_mask, dims, live, FORM: tl.constexpr):
    """(k, v) of the slots first + offs_n: the parts of a tile. With `FORM.weights`, then factor and shift in k, inverse in v.

    kv: see `attend`. slot_mask: [slots, 1] or None. dims: (offs_d, their mask or None, offs_v, their mask or None), of one part.
    live: (lo, hi), outside of which slots are not read from pages.
    """
    k_base, v_base, k_strides, v_strides, indices, extra = kv
    if FORM.paged:
        extra += ends_of(live[0], live[1], indices[3])
    offs_d, d_mask, offs_v, v_mask = dims
    if slot_mask is not None:
        d_mask = slot_mask if d_mask is None else slot_mask & d_mask
        v_mask = slot_mask if v_mask is None else slot_mask & v_mask
    k = FORM.load_k(k_base, k_strides, first, offs_n, offs_d, d_mask, indices, extra)
    v = FORM.load_v(v_base, v_strides, first, offs_n, offs_v, v_mask, indices, extra)
    if FORM.parts == 1:
        k, v = (k,), (v,)
    if FORM.weights is not None:
        factor, shift, inverse = FORM.weights(k_strides, first + offs_n, indices, extra)
        k += (factor, shift)
        v += (inverse,)
    return k, v


@triton.jit
def queries_of(q, kv, scale, HEAD_DIM: tl.constexpr, FORM: tl.constexpr):
    """(parts of the queries q, factor and shift of their products with K), with the scale of the scores."""
    if FORM.queries is None:
        return (q,), scale, 0.0
    else:
        turned, factor, shift = FORM.queries(q, kv[4], kv[5], HEAD_DIM)
        if FORM.parts == 1:
            turned = (turned,)
        return turned, factor * scale, shift * scale
