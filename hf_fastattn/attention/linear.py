"""Linear attention of a model: the map of its configuration, the weights of its layers, and what is refused.

It is no softmax, and is therefore never chosen by default. `kernels.linear_attention` has the formula.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from .. import hf
from ..kernels import linear_attention, reference
from ..kernels.host import gpu
from ..kernels.linear_attention import MAPS, features
from ..kernels.spec import KV, Form, Spec
from . import masks
from . import step as steps
from .backend import calls

NAME = "linear"
USE = f'hf_fastattn.patch(model, "{NAME}")'


def _no_tokens(kv: KV) -> Any:
    raise ValueError(f"A LinearCache has the sums of linear attention and no tokens. Use {USE}.")


STATE = Form("linear state", unpack=_no_tokens)  # k, v: of the new tokens; scales, centre: U and z


class LinearMap(torch.nn.Module):
    """The learned map "hedgehog" of a layer: query (num_heads, head_dim, head_dim), key (num_kv_heads, head_dim, head_dim)."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int):
        super().__init__()
        one = torch.eye(head_dim)
        self.query = torch.nn.Parameter(one.repeat(num_heads, 1, 1))
        self.key = torch.nn.Parameter(one.repeat(num_kv_heads, 1, 1))


def map_of(config: hf.PreTrainedConfig) -> str:
    """The map in the configuration of a model, `linear_map`: "elu" if there is none. Raises ValueError for an unknown one."""
    found: str = getattr(config.get_text_config(decoder=True), "linear_map", "elu")
    if found not in MAPS:
        raise ValueError(f"linear_map of a model's configuration must be one of {', '.join(MAPS)}; got {found!r}.")
    return found


def check_pattern(config: hf.PreTrainedConfig | None, pattern: tuple[bool, int | None] | None) -> None:
    """Raise ValueError for a mask that linear attention cannot have. pattern: (causal, window), None for any other."""
    if pattern != (True, None):
        model = "This model" if config is None else type(config).__name__.removesuffix("Config")
        what = "is not plainly causal" if pattern is None or not pattern[0] else f"has a window of {pattern[1]} tokens"
        raise ValueError(
            f"{model} requests a mask that {what}, and the sums of attn_implementation={NAME!r} have every token before a query. "
            "Use another backend."
        )


class _Thread(threading.local):
    teach: Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, float], None] | None = None


_thread = _Thread()


@contextmanager
def teaching(teach: Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, float], None]) -> Iterator[None]:
    """A context in which attention is the softmax, and `teach` gets each module with its queries, its keys and their scale."""
    _thread.teach = teach
    try:
        yield
    finally:
        _thread.teach = None


def forward(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    is_causal: bool | None,
    refused: Mapping[str, object],
) -> torch.Tensor:
    """Attention of a layer, as `function.attention_forward` is given it: (batch, q_len, num_heads, value_dim).

    refused: arguments that the sums cannot have, None where the model passes none. Raises ValueError or RuntimeError with the
    reason.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(f"attn_implementation={NAME!r} does not run under torch.compile. {USE} captures its steps.")
    for name, value in refused.items():
        if value is not None:
            raise ValueError(f"{type(module).__name__} passes {name}, which attn_implementation={NAME!r} has not. Use another.")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kv = steps.kv_of(k, v)
    state = _state(kv, module, q, k)
    live = _live(module, mask, q, is_causal)
    if _thread.teach is not None:
        _thread.teach(module, q, k, scale)
        spans = mask.content if isinstance(mask, masks.SpansMask) else None
        out: torch.Tensor = reference.attention(q, KV(k, v), Spec(scale), spans)
        return out.transpose(1, 2)
    name, of_layer = map_of(module.config), getattr(module, "linear_map", None)  # type: ignore[arg-type]
    if name == "hedgehog" and of_layer is None:
        raise ValueError(
            f"This {type(module).__name__} has no weights of the map {name!r}. hf_fastattn.distill(model, texts) learns them, "
            "and hf_fastattn.load_distilled(folder) reads those of a saved model; from_pretrained() drops them."
        )
    hf.warn_once(
        f"attn_implementation={NAME!r} is not the model's softmax attention: the map {name!r} replaces it, and every output "
        "differs. docs/backends/linear.md says by how much."
    )
    learned = name == "hedgehog"

    def phi(x: torch.Tensor, of_queries: bool) -> torch.Tensor:
        weight = (of_layer.query if of_queries else of_layer.key) if learned else None  # type: ignore[union-attr]
        return features(name, x, scale, weight, of_queries)

    one = state is not None and q.shape[2] == 1
    calls[f"{NAME}.{'decode' if one else 'prefill'}"] += 1
    device_type = gpu.autocast_type(q.device)
    with torch.autocast(device_type, enabled=False):
        if state is not None and one and gpu.on_gpu(q.device) and q.dtype == v.dtype:
            from ..kernels.decode.linear_state import MOST_HEADS, linear_state  # with Triton

            if q.shape[1] <= MOST_HEADS * k.shape[1] and state[0].dtype == torch.float32:
                fk, new = phi(k, False)[:, :, 0], v[:, :, 0]
                if live is not None:
                    fk, new = torch.where(live[:, None], fk, 0), torch.where(live[:, None], new, 0)
                return linear_state(phi(q, True)[:, :, 0].contiguous(), fk.contiguous(), new, *state)[:, None]
        return linear_attention.attend(q, k, v, phi, state, live).transpose(1, 2)


def _state(kv: KV, module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """U and z of the layer's LinearCache; None if there is no cache and nothing precedes the tokens."""
    if kv.scales is not None and kv.centre is not None and kv.form is STATE:
        return kv.scales, kv.centre
    step = steps.innermost()
    if step is not None and step.kv is not None and step.kv.form is STATE:
        raise ValueError(f"{type(module).__name__} changes K and V after its cache has them, which a LinearCache cannot follow.")
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"attn_implementation={NAME!r} was given {q.shape[2]} queries and {k.shape[2]} keys: a cache that keeps tokens, "
            f"which would be read again for each new one. Use {USE}, whose LinearCache keeps their sums, or pass use_cache=False."
        )
    return None


def _live(module: torch.nn.Module, mask: torch.Tensor | None, q: torch.Tensor, is_causal: bool | None) -> torch.Tensor | None:
    """Which of the tokens are no padding, bool (batch, tokens); None if all are. Raises ValueError for another mask."""
    batch, _, tokens, _ = q.shape
    if mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if not causal and tokens > 1:
            check_pattern(None, None)
        return None
    if type(mask) not in (masks.PlainMask, masks.SpansMask) or mask.sizes[1:] != (tokens, tokens):  # type: ignore[attr-defined]
        raise ValueError(
            f"attn_implementation={NAME!r} takes a 2-D attention_mask, and was given another one (4-D, packed sequences, or of "
            f"other lengths than {tokens} tokens). Pass (rows, all tokens so far), or use another backend."
        )
    if not isinstance(mask, masks.SpansMask):
        return None
    last = reference.visible(tokens, tokens, q.device, mask.content, False, None, some=range(tokens - 1, tokens))
    return last[:, 0].expand(batch, -1)  # the last query sees all but padding
