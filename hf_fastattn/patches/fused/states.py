"""The linear layers of hybrids, for one new token of each row: their step by kernels, in place on the states in the cache.

A layer qualifies if its forward() has a code that `hf.mixer_of` knows. Its projections and its norm run as modules. Prompts,
inputs that the kernels refuse (gradients, other dtypes) and caches that record past states run the model's own code. Both
kernels of a step are checked before the first is launched, so a refusal leaves the states as they were.

A gated norm is fused as `hf.gated_norm_of` recognises its formula, for any number of tokens.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ... import hf
from ...kernels import HAS_TRITON
from . import delayed as merged
from . import subclass
from .subclass import Forward

if TYPE_CHECKING:
    from ...kernels.decode.conv_update import Ready


def fuse(
    model: torch.nn.Module, runs: Callable[[torch.device], bool] = subclass.runs_kernels
) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """Fuse the linear layers and the gated norms of a model that are on devices that run kernels; returns both."""
    layers: list[torch.nn.Module] = []
    norms: list[torch.nn.Module] = []
    for module in model.modules() if HAS_TRITON else ():
        weight = next(module.parameters(), None)
        if "forward" in vars(module) or weight is None or not runs(weight.device):
            continue
        formula = hf.gated_norm_of(module)
        if formula is not None:
            subclass.replace(module, _FusedNorm(formula))
            norms.append(module)
        elif hf.mixer_of(type(module).forward) is not None:
            subclass.replace(module, mixer)
            layers.append(module)
    return layers, norms


@dataclass(frozen=True)
class _FusedNorm:
    """Fuses gated norms of one formula."""

    formula: hf.GatedNorm

    def __call__(self, forward: types.FunctionType) -> Forward:
        formula = self.formula

        @functools.wraps(forward)
        def norm(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> Any:
            out = None
            if gate is not None and _may_run(hidden_states, gate) and (inputs := formula.inputs(self)) is not None:
                from ...kernels.decode import gated_norm

                out = gated_norm.run(hidden_states, gate, *inputs) if subclass.has_kernels(inputs[0]) else None
            return forward(self, hidden_states, gate) if out is None else out

        return norm


def mixer(forward: types.FunctionType) -> Forward:
    """The forward() of a linear layer whose step is fused."""
    kind = hf.mixer_of(forward)
    assert kind is not None
    step, known = _STEPS[kind], hf.mixer_calls(forward)

    @functools.wraps(forward)
    def layer(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(self, hidden_states, *args, **kwargs)
        out = None
        # A function that someone has replaced in the model's file is used.
        if not args and _may_run(hidden_states) and all(names.get(name) is called for names, name, called in known):
            states = hf.states_of(self, kwargs) if hidden_states.dim() == 3 and hidden_states.shape[1] == 1 else None
            out = None if states is None else step(self, hidden_states, *states)
        if out is not None:
            return out
        with merged.apart():  # it may launch kernels of other packages
            return forward(self, hidden_states, *args, **kwargs)

    return layer


def _may_run(*tensors: torch.Tensor | None) -> bool:
    found = [tensor for tensor in tensors if tensor is not None]
    own = hf.has_own("silu", "softplus")
    return own and all(map(subclass.has_kernels, found)) and not subclass.is_autocast(found[0])


def _convolution(conv: Any, x: torch.Tensor, state: torch.Tensor, activation: object, *gates: torch.Tensor) -> Ready | None:
    """The step of a convolution, prepared, for x (rows, 1, channels)."""
    from ...kernels.decode import conv_update

    weight, bias = hf.parameters_of(conv, "weight", "bias") or (None, None)
    if activation not in (None, "silu", "swish") or weight is None or not _may_run(weight, bias, state):
        return None
    return conv_update.prepared(x[:, 0], state, weight.squeeze(1), bias, activation is not None, *(gate[:, 0] for gate in gates))


def _gated_delta(self: Any, x: torch.Tensor, conv_state: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor | None:
    return _delta(self, (self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)), conv_state, state)


def _gated_delta_packed(self: Any, x: torch.Tensor, conv_state: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor | None:
    *qkv, z, b, a = self.fix_query_key_value_ordering(self.in_proj_qkvz(x), self.in_proj_ba(x))
    return _delta(self, (torch.cat([part.flatten(2) for part in qkv], -1), z, b, a), conv_state, state)


def _delta(
    self: Any, projected: tuple[torch.Tensor, ...], conv_state: torch.Tensor, state: torch.Tensor | None
) -> torch.Tensor | None:
    from ...kernels.decode import gated_delta

    qkv, z, b, a = projected
    conv = _convolution(self.conv1d, qkv, conv_state, self.activation)
    if conv is None or state is None or state.shape[-2:] != (self.head_k_dim, self.head_v_dim):
        return None
    own: Any = hf.parameters_of(self, "A_log", "dt_bias")
    if own is None or not _may_run(*own, state):
        return None
    decay, dt_bias = own
    rows = len(qkv)
    a, b = (gate.view(rows, self.num_k_heads, -1) for gate in (a, b))
    delta = gated_delta.prepared(conv.out, a, b, decay, dt_bias, state)
    if delta is None:
        return None
    conv.launch()
    out = self.norm(delta.launch().view(-1, self.head_v_dim), z.reshape(-1, self.head_v_dim))
    return self.out_proj(out.view(rows, 1, -1))  # type: ignore[no-any-return]


def _mamba2(self: Any, x: torch.Tensor, conv_state: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor | None:
    return _selective(self, self.in_proj(x), conv_state, state, True)


def _mamba2_scaled(self: Any, x: torch.Tensor, conv_state: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor | None:
    projected = self.in_proj(x * self.ssm_in_multiplier) * self.mup_vector
    return _selective(self, projected, conv_state, state, self.mamba_rms_norm)


def _selective(
    self: Any, projected: torch.Tensor, conv_state: torch.Tensor, state: torch.Tensor | None, normed: bool
) -> torch.Tensor | None:
    from ...kernels.decode import selective

    gate, mixed, dt = projected.split([self.intermediate_size, self.conv_dim, self.num_heads], -1)
    conv = _convolution(self.conv1d, mixed, conv_state, self.activation)
    if conv is None or state is None or state.shape[1:] != (self.num_heads, self.head_dim, self.ssm_state_size):
        return None
    own: Any = hf.parameters_of(self, "A_log", "D", "dt_bias")
    if own is None or not _may_run(*own, state):
        return None
    decay, skip, dt_bias = own
    scan = selective.prepared(conv.out, dt[:, 0], decay, skip, dt_bias, state, None if normed else gate[:, 0])
    if scan is None:
        return None
    conv.launch()
    out = scan.launch()[:, None]
    return self.out_proj(self.norm(out, gate) if normed else out)  # type: ignore[no-any-return]


def _short_conv(self: Any, x: torch.Tensor, conv_state: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor | None:
    before, after, inner = self.in_proj(x).chunk(3, -1)
    conv = _convolution(self.conv, inner, conv_state, None, before, after)
    return None if conv is None else self.out_proj(conv.launch()[:, None])


_STEPS: dict[hf.Mixer, Callable[..., torch.Tensor | None]] = {
    "gated_delta": _gated_delta,
    "gated_delta_packed": _gated_delta_packed,
    "mamba2": _mamba2,
    "mamba2_scaled": _mamba2_scaled,
    "short_conv": _short_conv,
}
