"""Backend "lean": LeanAttention: FlashAttention-2 prefill, stream-K over equal K/V shares in decode."""

from ..kernels import TritonKernel
from ..registry import Backend, register

backend = register(
    Backend(
        name="lean",
        summary="LeanAttention: FlashAttention-2 prefill, stream-K over equal K/V shares in decode",
        prefill=TritonKernel("prefill", hopper="prefill_hopper"),
        decode=TritonKernel("lean"),
    )
)
