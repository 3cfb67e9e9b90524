"""Backend "batch_invariant": Flash-Decoding in which a row has the same bits alone and in any batch."""

from ..kernels import TritonKernel, reference
from ..registry import Backend, register

SPLITS = 32  # enough for one row of 8 KV heads to fill a GPU of 132 SMs

backend = register(
    Backend(
        name="batch_invariant",
        summary="Flash-Decoding with a constant number of splits: in decode, a row's bits do not depend on its batch",
        prefill=TritonKernel("prefill", hopper="prefill_hopper"),
        decode=TritonKernel("split_kv", splits=SPLITS),
        packed=True,
        backward=TritonKernel("backward", twin=reference.backward),
        dropout=True,
        invariant=True,
    )
)
