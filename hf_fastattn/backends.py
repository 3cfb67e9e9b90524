"""The backends of the package. Importing this file registers them."""

from typing import Any, NoReturn

from .kernels import TritonKernel, reference
from .registry import Backend, register

PREFILL = TritonKernel("prefill", hopper="prefill_hopper")
STREAM_K = TritonKernel("prefill", hopper="prefill_hopper", stream_k="lean")
LEAN = TritonKernel("lean")
TRAINED: dict[str, Any] = {"packed": True, "backward": TritonKernel("backward", twin=reference.backward), "dropout": True}


def _of_layers(*args: object, **options: object) -> NoReturn:
    raise ValueError('"linear" has a map for each layer of a model; it runs as attn_implementation="linear" alone.')


ALL = [
    Backend(
        "batch_invariant",
        "Flash-Decoding with a constant number of splits: in decode, a row's bits do not depend on its batch",
        PREFILL,
        TritonKernel("split_kv", splits=32),  # enough for one row of 8 KV heads to fill a GPU of 132 SMs
        invariant=True,
        **TRAINED,
    ),
    Backend("fa2", "FlashAttention-2: the same Triton kernel for prefill and decode", PREFILL, **TRAINED),
    Backend(
        "lean",
        "LeanAttention: equal shares of K/V wherever queries alone do not fill the GPU, else FlashAttention-2",
        STREAM_K,
        LEAN,
        **TRAINED,
    ),
    Backend(
        "linear",
        "linear attention, NOT the model's softmax: sums of constant size in place of K and V, after distill() or by a fixed map",
        _of_layers,
        linear=True,
    ),
    Backend(
        "reference",
        "plain torch in fp32: the specification the kernels are tested against",
        reference.attention,
        max_head_dim=None,
        max_value_dim=None,
        **{**TRAINED, "backward": reference.backward},
    ),
    Backend(
        "split_kv",
        "Flash-Decoding: FlashAttention-2 prefill, fixed splits over K/V in decode",
        PREFILL,
        TritonKernel("split_kv"),
        **TRAINED,
    ),
    Backend(
        "streaming",
        "StreamingLLM on the kernels of lean: the first tokens and a window of the last, for unbounded generation",
        STREAM_K,
        LEAN,
        streaming=True,
    ),
]

for _backend in ALL:
    register(_backend)
