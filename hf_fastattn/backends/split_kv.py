"""Backend "split_kv": Flash-Decoding: FlashAttention-2 prefill, fixed splits over K/V in decode."""

from ..kernels import TritonKernel, reference
from ..registry import Backend, register

backend = register(
    Backend(
        name="split_kv",
        summary="Flash-Decoding: FlashAttention-2 prefill, fixed splits over K/V in decode",
        prefill=TritonKernel("prefill", hopper="prefill_hopper"),
        decode=TritonKernel("split_kv"),
        packed=True,
        backward=TritonKernel("backward", twin=reference.backward),
        dropout=True,
    )
)
