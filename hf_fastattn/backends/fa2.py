"""Backend "fa2": FlashAttention-2: the same Triton kernel for prefill and decode."""

from ..kernels import TritonKernel, reference
from ..registry import Backend, register

backend = register(
    Backend(
        name="fa2",
        summary="FlashAttention-2: the same Triton kernel for prefill and decode",
        prefill=TritonKernel("prefill", hopper="prefill_hopper"),
        packed=True,
        backward=TritonKernel("backward", twin=reference.backward),
        dropout=True,
    )
)
