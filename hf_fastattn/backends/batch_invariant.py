"""Backend "batch_invariant": Flash-Decoding whose rows do not feel one another: decoded alone or in any batch, the same bits."""

from ..kernels import TritonKernel
from ..registry import Backend, register

SPLITS = 32  # enough for one row of 8 KV heads to fill a GPU of 132 SMs

backend = register(
    Backend(
        name="batch_invariant",
        summary="Flash-Decoding with a constant number of splits: in decode, a row's bits do not depend on its batch",
        prefill=TritonKernel("prefill", hopper="prefill_hopper"),
        decode=TritonKernel("split_kv", splits=SPLITS),
    )
)
