"""Backend "lean": LeanAttention: stream-K over equal K/V shares wherever queries alone do not fill the GPU."""

from ..kernels import TritonKernel, reference
from ..registry import Backend, register

backend = register(
    Backend(
        name="lean",
        summary="LeanAttention: equal shares of K/V wherever queries alone do not fill the GPU, else FlashAttention-2",
        prefill=TritonKernel("prefill", hopper="prefill_hopper", stream_k="lean"),
        decode=TritonKernel("lean"),
        packed=True,
        backward=TritonKernel("backward", twin=reference.backward),
        dropout=True,
    )
)
