"""Backend "fa2": FlashAttention-2: one Triton kernel for prefill and decode alike."""

from ..kernels import TritonKernel, reference
from ..registry import Backend, register

backend = register(
    Backend(
        name="fa2",
        summary="FlashAttention-2: one Triton kernel for prefill and decode alike",
        prefill=TritonKernel("prefill", hopper="prefill_hopper"),
        packed=True,
        backward=TritonKernel("backward", twin=reference.backward),
    )
)
