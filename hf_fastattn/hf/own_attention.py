"""Models that compute attention in their own code, which patch() replaces: Bloom, MPT and Falcon.

The positions of Bloom, of MPT and of some Falcon models are ALiBi's, a bias of each key and head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .caches import CACHE

__all__ = ["OwnAttention", "counts_without_mask", "has_alibi", "own_attention", "why_not_own_attention"]

Attend = Callable[..., tuple[torch.Tensor, Any]]  # of a backend: (module, query, key, value, mask, scaling=, key_bias=, dropout=)
Dense = Callable[[Any, int, int], torch.Tensor]  # (mask, q_len, kv_len) -> bool, True where attended
Forward = Callable[..., Any]


class OwnAttention(NamedTuple):
    """The attention of a model. layer: the name of its class. forward: (attend, dense, the class's forward) -> another forward.
    That of Bloom and MPT runs the class's where the weights of attention are requested."""

    layer: str
    forward: Callable[[Attend, Dense, Forward], Forward]


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
    return None


def counts_without_mask(config: PreTrainedConfig) -> bool:
    """Whether the bias of a model counts tokens on the host if the model is given no mask."""
    return has_alibi(config) and (config.model_type == "falcon" or (config.model_type == "bloom" and CACHE != "cache"))


def _is_users(mask: Any) -> bool:
    """Whether a mask is the tensor that the user passed, not one of the backend's mask function."""
    return isinstance(mask, torch.Tensor) and not hasattr(mask, "made_for")


def _length(cache: Any, layer: int, q_len: int) -> int:
    """The number of keys of a layer after an update of its cache."""
    return q_len if cache is None else int(cache.get_seq_length(layer)) + q_len


def _bloom(attend: Attend, dense: Dense, forward: Forward) -> Forward:
    def run(
        self: Any, hidden_states: torch.Tensor, residual: torch.Tensor, alibi: torch.Tensor, attention_mask: Any, **given: Any
    ) -> Any:
        cache, (batch, q_len, _) = given.get("layer_past"), hidden_states.shape
        exact = self.pretraining_tp > 1 and self.slow_but_exact  # a product in parts
        if exact or given.get("output_attentions"):
            if not _is_users(attention_mask):
                seen = dense(attention_mask, q_len, _length(cache, self.layer_idx, q_len)).to(hidden_states.device)
                least = torch.finfo(hidden_states.dtype).min
                attention_mask = torch.zeros((), dtype=hidden_states.dtype, device=seen.device).masked_fill(~seen, least)
            return forward(self, hidden_states, residual, alibi, attention_mask, **given)
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        options = {"scaling": self.inv_norm_factor, "dropout": self.attention_dropout.p}
        bias = alibi.view(batch, self.num_heads, -1)
        out, _ = attend(self, query, key, value, attention_mask, key_bias=bias, **options)
        return torch.nn.functional.dropout(self.dense(out.flatten(2)), self.hidden_dropout, self.training) + residual, None

    return run


def _mpt(attend: Attend, dense: Dense, forward: Forward) -> Forward:
    def run(self: Any, hidden_states: torch.Tensor, position_bias: torch.Tensor, **given: Any) -> Any:
        mask, (batch, q_len, _) = given.pop("attention_mask", None), hidden_states.shape
        cache = given.get("cache", given.get("past_key_values"))
        if given.get("output_attentions"):
            if not _is_users(mask):
                mask = ~dense(mask, q_len, _length(cache, self.layer_idx, q_len)).to(hidden_states.device)
            return forward(self, hidden_states, position_bias, attention_mask=mask, **given)
        if _is_users(mask):  # the model has made it True where it is masked
            mask = ~mask
        qkv = self.Wqkv(hidden_states)
        if self.clip_qkv:
            qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (x.view(batch, q_len, self.n_heads, self.head_dim).transpose(1, 2) for x in qkv.chunk(3, dim=2))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        bias, keys = position_bias[:, 0], key.shape[2]
        if (more := keys - bias.shape[1]) > 0:  # slots past max_seq_len, whose biases continue those before
            step = bias[:, -1:] - bias[:, -2:-1]
            bias = torch.cat([bias, bias[:, -1:] + step * torch.arange(1, more + 1, device=bias.device)], 1)
        bias = bias[None, :, bias.shape[1] - keys :].contiguous()
        options = {"scaling": self.softmax_scale, "dropout": self.attn_dropout_p}
        out, _ = attend(self, query, key, value, mask, key_bias=bias, **options)
        return self.out_proj(out.flatten(2)), None

    return run


def _falcon(attend: Attend, dense: Dense, forward: Forward) -> Forward:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    def run(self: Any, hidden_states: torch.Tensor, alibi: torch.Tensor | None, attention_mask: Any, **given: Any) -> Any:
        if given.get("output_attentions"):
            raise ValueError("output_attentions=True requests weights that a patched Falcon never forms. Undo the patch before.")
        cache, (batch, q_len, _) = given.get("layer_past"), hidden_states.shape
        # The query heads of each KV head, its key and its value follow each other in all variants of Falcon.
        qkv = self.query_key_value(hidden_states).view(batch, q_len, self.num_kv_heads, -1, self.head_dim)
        query, key, value = (x.transpose(1, 2) for x in (qkv[..., :-2, :].flatten(2, 3), qkv[..., -2, :], qkv[..., -1, :]))
        bias, dropout = None, 0.0
        if alibi is None:
            query, key = apply_rotary_pos_emb(query, key, *given["position_embeddings"])
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if alibi is not None:
            dropout = self.attention_dropout.p  # which the rotary variants do not apply
            if not _is_users(attention_mask):  # to which the model has added the bias
                bias = alibi.view(batch, self.num_heads, -1) / self.head_dim**0.5
                if (group := self.num_heads // self.num_kv_heads) > 1:
                    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        out, _ = attend(
            self, query, key, value, attention_mask, scaling=self.inv_norm_factor, key_bias=bias, dropout=dropout
        )  # fmt: skip
        return self.dense(out.flatten(2)), None

    return run


_MODELS = {
    "bloom": OwnAttention("BloomAttention", _bloom),
    "mpt": OwnAttention("MptAttention", _mpt),
    "falcon": OwnAttention("FalconAttention", _falcon),
}
