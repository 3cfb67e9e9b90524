"""Backend "streaming": attention to the first and the last tokens (StreamingLLM), on the kernels of lean."""

from ..kernels import TritonKernel
from ..registry import Backend, register

backend = register(
    Backend(
        name="streaming",
        summary="StreamingLLM on the kernels of lean: the first tokens and a window of the last, for unbounded generation",
        prefill=TritonKernel("prefill", hopper="prefill_hopper", stream_k="lean"),
        decode=TritonKernel("lean"),
        streaming=True,
    )
)
