"""Models that compute attention in their own code, which patch() replaces: Bloom, MPT and Falcon.

The positions of Bloom, of MPT and of some Falcon models are ALiBi's, a bias of each key and head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .caches import CACHE, cache_in
from .llama import module_of

__all__ = ["OwnAttention", "counts_without_mask", "has_alibi", "own_attention", "why_not_own_attention"]

_REPLACED = ("forward", "_reshape", "_split_heads", "_merge_heads")  # methods of attention whose part patch() computes itself
Attend = Callable[..., tuple[torch.Tensor, Any]]  # of a backend: (module, query, key, value, mask, scaling=, key_bias=, dropout=)
Forward = Callable[..., Any]


class OwnAttention(NamedTuple):
    """The attention of a model. layer, attention: the names of the classes of its layers and of their attention, which may have
    subclasses. forward: attend -> a forward of the latter that returns no weights of attention."""

    layer: str
    attention: str
    forward: Callable[[Attend], Forward]


def own_attention(model: PreTrainedModel) -> OwnAttention | None:
    """That of this model; None if it asks Transformers' attention interface, or if its code may be another."""
    found = _MODELS.get(model.config.model_type)
    return found if found and type(model).__module__.startswith("transformers.models.") else None


def has_alibi(config: PreTrainedConfig) -> bool:
    """Whether the positions of a model are a bias of keys, by its configuration alone."""
    return config.model_type in _MODELS and bool(getattr(config, "alibi", True))  # only Falcon has others too


def why_not_own_attention(model: PreTrainedModel) -> str | None:
    """The reason why the attention of such a model cannot be replaced; None if it can."""
    config = model.config
    if config.model_type == "falcon" and config.alibi and config._attn_implementation == "eager":
        return 'its bias (ALiBi) is added twice by the code of "eager". Load it with attn_implementation="sdpa".'
    if (found := own_attention(model)) is None:
        return None
    for module in model.modules():
        known = any(each.__name__ == found.attention for each in type(module).__mro__)
        for name in _REPLACED if known else ():
            its: Any = getattr(type(module) if name == "forward" else module, name, None)  # its own forward() runs in any case
            its = getattr(its, "__func__", its)
            while module_of(its).startswith("hf_fastattn."):
                its = its.__wrapped__
            if its is not None and not module_of(its).startswith("transformers."):
                return f"the {name}() of its {type(module).__name__} is not that of Transformers, which patch() would replace."
    return None


def counts_without_mask(config: PreTrainedConfig) -> bool:
    """Whether the bias of a model counts tokens on the host if the model is given no mask."""
    return has_alibi(config) and (config.model_type == "falcon" or (config.model_type == "bloom" and CACHE != "cache"))


def _bloom(attend: Attend) -> Forward:
    def run(
        self: Any, hidden_states: torch.Tensor, residual: torch.Tensor, alibi: torch.Tensor, attention_mask: Any, **given: Any
    ) -> Any:
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if (cache := given.get("layer_past")) is not None:
            key, value = cache.update(key, value, self.layer_idx)
        options = {"scaling": self.inv_norm_factor, "dropout": self.attention_dropout.p}
        bias = alibi.view(len(query), self.num_heads, -1)
        bias = bias if self.beta == 1 else bias * self.beta
        x = attend(self, query, key, value, attention_mask, key_bias=bias, **options)[0].flatten(2)
        if self.pretraining_tp > 1 and self.slow_but_exact:  # a product in parts, without the bias of the layer
            parts = zip(x.chunk(self.pretraining_tp, -1), self.dense.weight.chunk(self.pretraining_tp, 1), strict=True)
            x = sum((torch.nn.functional.linear(*part) for part in parts), torch.zeros_like(x))
        else:
            x = self.dense(x)
        return torch.nn.functional.dropout(x, self.hidden_dropout, self.training) + residual, None

    return run


def _mpt(attend: Attend) -> Forward:
    def run(self: Any, hidden_states: torch.Tensor, position_bias: torch.Tensor, attention_mask: Any = None, **given: Any) -> Any:
        mask, (batch, q_len, _) = attention_mask, hidden_states.shape
        if not (mask is None or hasattr(mask, "made_for")):  # the user's, which the model has made True where it is masked
            mask = ~mask
        qkv = self.Wqkv(hidden_states)
        if self.clip_qkv:
            qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (x.view(batch, q_len, self.n_heads, self.head_dim).transpose(1, 2) for x in qkv.chunk(3, dim=2))
        if (cache := cache_in(given)) is not None:
            key, value = cache.update(key, value, self.layer_idx)
        bias, keys = position_bias[:, 0], key.shape[2]
        if (more := keys - bias.shape[1]) > 0:  # slots past max_seq_len, whose biases continue those before
            step = bias[:, -1:] - bias[:, -2:-1]
            bias = torch.cat([bias, bias[:, -1:] + step * torch.arange(1, more + 1, device=bias.device)], 1)
        bias = bias[None, :, bias.shape[1] - keys :].contiguous()
        options = {"scaling": self.softmax_scale, "dropout": self.attn_dropout_p}
        return self.out_proj(attend(self, query, key, value, mask, key_bias=bias, **options)[0].flatten(2)), None

    return run


def _falcon(attend: Attend) -> Forward:
    from transformers.models.falcon import modeling_falcon

    def run(self: Any, hidden_states: torch.Tensor, alibi: torch.Tensor | None, attention_mask: Any, **given: Any) -> Any:
        # The query heads of each KV head, its key and its value follow each other in all variants.
        qkv = self.query_key_value(hidden_states).unflatten(2, (self.num_kv_heads, -1, self.head_dim))
        query, key, value = (x.transpose(1, 2) for x in (qkv[..., :-2, :].flatten(2, 3), qkv[..., -2, :], qkv[..., -1, :]))
        options = {"scaling": self.head_dim**-0.5 if alibi is None else self.inv_norm_factor}
        if alibi is None:
            query, key = modeling_falcon.apply_rotary_pos_emb(query, key, *given["position_embeddings"])
        if (cache := given.get("layer_past")) is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if alibi is not None:
            options["key_bias"] = alibi.view(len(query), self.num_heads, -1) / self.head_dim**0.5
            options["dropout"] = self.attention_dropout.p  # the rotary variants have none
            if (group := self.num_heads // self.num_kv_heads) > 1:
                key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        return self.dense(attend(self, query, key, value, attention_mask, **options)[0].flatten(2)), None

    return run


_MODELS = {
    "bloom": OwnAttention("BloomBlock", "BloomAttention", _bloom),
    "mpt": OwnAttention("MptBlock", "MptAttention", _mpt),
    "falcon": OwnAttention("FalconDecoderLayer", "FalconAttention", _falcon),
}
