"""Loading a tile of K or V, from plain tensors. Another form of K and V (`spec.Form`) brings functions like this one."""

import triton
import triton.language as tl


@triton.jit
def load_plain(base, stride, first, offs_n, offs_d, mask, place, extra):
    """The slots first + offs_n of one KV head, dimensions offs_d, as [slots, dimensions] in the queries' dtype; 0 outside `mask`.

    base: where slot 0 of the head is. stride: elements from one slot to the next. mask: None where all is there. place: (batch
    row, KV head, num_kv_heads, kv_len). extra: (Scales, Centre, Pages), what a form reads besides, None here.
    """
    ptrs = base + first.to(tl.int64) * stride + (offs_n[:, None] * stride + offs_d[None, :])
    if mask is None:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=mask, other=0.0)
