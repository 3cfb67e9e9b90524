"""Backend "split_kv": Flash-Decoding: FlashAttention-2 prefill, fixed splits over K/V in decode."""

from ..kernels import TritonKernel
from ..registry import Backend, register

backend = register(
    Backend(
        name="split_kv",
        summary="Flash-Decoding: FlashAttention-2 prefill, fixed splits over K/V in decode",
        prefill=TritonKernel("prefill", hopper="prefill_hopper"),
        decode=TritonKernel("split_kv"),
    )
)
