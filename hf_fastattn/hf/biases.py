"""Models whose positions are ALiBi's, a bias of each key and head: their attention is their own code, which patch() replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["Alibi", "alibi", "has_alibi"]

Attend = Callable[..., tuple[torch.Tensor, Any]]  # of a backend: (module, query, key, value, mask, scaling=, key_bias=)
Dense = Callable[[Any, int, int], torch.Tensor]  # (mask, q_len, kv_len) -> bool, True where attended
Forward = Callable[..., Any]


class Alibi(NamedTuple):
    """The attention of a model. layer: the name of its class. forward: (attend, dense, the class's forward) -> another forward,
    which runs the class's with gradients, in training mode and where the weights of attention are requested."""

    layer: str
    forward: Callable[[Attend, Dense, Forward], Forward]


def alibi(model: PreTrainedModel) -> Alibi | None:
    """That of this model; None if it has other positions, or if its code may be another."""
    found = _MODELS.get(model.config.model_type)
    return found if found and type(model).__module__.startswith("transformers.models.") else None


def has_alibi(config: PreTrainedConfig) -> bool:
    """Whether the positions of a model are a bias of keys, by its configuration alone."""
    return config.model_type in _MODELS


def _runs_own(module: torch.nn.Module, hidden: torch.Tensor, given: dict[str, Any]) -> bool:
    trains = torch.is_grad_enabled() and (hidden.requires_grad or any(p.requires_grad for p in module.parameters()))
    return trains or module.training or bool(given.get("output_attentions"))


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
        if exact or _runs_own(self, hidden_states, given):
            if not _is_users(attention_mask):
                seen = dense(attention_mask, q_len, _length(cache, self.layer_idx, q_len)).to(hidden_states.device)
                least = torch.finfo(hidden_states.dtype).min
                attention_mask = torch.zeros((), dtype=hidden_states.dtype, device=seen.device).masked_fill(~seen, least)
            return forward(self, hidden_states, residual, alibi, attention_mask, **given)
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        bias = alibi.view(batch, self.num_heads, -1)
        out, _ = attend(self, query, key, value, attention_mask, scaling=self.inv_norm_factor, key_bias=bias)
        return self.dense(out.flatten(2)) + residual, None

    return run


def _mpt(attend: Attend, dense: Dense, forward: Forward) -> Forward:
    def run(self: Any, hidden_states: torch.Tensor, position_bias: torch.Tensor, **given: Any) -> Any:
        mask, (batch, q_len, _) = given.pop("attention_mask", None), hidden_states.shape
        cache = given.get("cache", given.get("past_key_values"))
        if _runs_own(self, hidden_states, given):
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
        out, _ = attend(self, query, key, value, mask, scaling=self.softmax_scale, key_bias=bias)
        return self.out_proj(out.flatten(2)), None

    return run


_MODELS = {"bloom": Alibi("BloomAttention", _bloom), "mpt": Alibi("MptAttention", _mpt)}
