"""The first forward of a generate() over an empty cache, which reads a padded prompt without its padding, and equal rows once.

The tokens of all rows become one row, in which attention keeps the sequences apart (`attention.step.Packed`). Positions are those
of the padded run, the layers of the cache store K and V where the padded run would, and the logits are those of the last token of
each row. What a code or a call may observe of the padding makes it run padded.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd

from ... import hf, registry
from ...attention import step as steps
from ...attention.step import Packed, Unpackable
from ...caches import forward as caches
from ...caches.states import HybridStorage
from ...caches.stored import StoredCache
from ...hf.packages import is_trusted
from ..graphs.entry import KEEP

TILE = 128  # tokens: to save fewer is not worth the work on the host
TENSORS = {"input_ids", "attention_mask", "position_ids"}
_ASKED = ("output_hidden_states", "output_attentions", "output_router_logits")
_OURS = "a backend of the package"
_DROPS = ("drop", "jitter")  # in the names of what draws random numbers in training, for each token


def why_padded(model: hf.PreTrainedModel, cache: StoredCache, given: dict[str, Any], packed: Packed) -> str | None:
    """Why the padding of these prompts is read; None if it need not be."""
    name, config = model.config._attn_implementation, model.config.get_text_config(decoder=True)
    if name not in registry.names() or not registry.get(name).packed or registry.get(name).invariant:
        return f"attn_implementation={name!r} does not read prompts as one row"
    if isinstance(cache.storage, HybridStorage) and not cache.storage.takes_packed:
        return "recurrent states take one row for each prompt"
    if not cache.storage.takes_packed:
        return f"a {type(cache).__name__} takes one row for each prompt"
    if (other := next((n for n, x in given.items() if n not in TENSORS and has_tensors(x)), None)) is not None:
        return f"the argument {other} is passed"
    if (asked := next((n for n in _ASKED if given.get(n) or getattr(config, n, None)), None)) is not None:
        return f"{asked} is requested"
    if given.get("position_ids") is None:
        return "it takes no position_ids"
    if hf.has_alibi(config):
        return "its bias of keys (ALiBi) counts the tokens of a row"
    if given.get(KEEP, 1) != 1:
        return f"{KEEP} is {given[KEEP]}"
    if packed.holes and (cache.storage.windowed or not hf.is_stock(type(model).forward)):
        return "there is padding between tokens, which windows count"
    return code_of_user(model, config)


def has_tensors(x: object) -> bool:
    return isinstance(x, torch.Tensor) or (isinstance(x, Mapping) and any(map(has_tensors, x.values())))


def _draws(config: hf.PreTrainedConfig) -> str | None:
    """A rate of the configuration with which training draws random numbers for each token."""
    rates = {name: value for name, value in vars(config).items() if any(word in name for word in _DROPS)}
    return next((name for name, value in rates.items() if isinstance(value, float) and value), None)


def code_of_user(model: hf.PreTrainedModel, config: hf.PreTrainedConfig) -> str | None:
    """What would see one row in place of several, as a reason: code of the user, and what draws random numbers for each token."""
    api = torch.nn.modules.module
    if api._global_forward_hooks or api._global_forward_pre_hooks:
        return "a global forward hook is registered"
    rate = _draws(config)
    for module in model.modules():
        kind, own = type(module).__name__, vars(module)
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if not (caches.is_ours(hook) or hf.is_inert_hook(hook)):
                return f"{kind} has the forward hook {getattr(hook, '__qualname__', type(hook).__qualname__)}"
        if isinstance(module, torch.jit.ScriptModule):
            return f"{kind} is a torch.jit.ScriptModule"
        if not (_is_of_packages(own.get("forward", type(module).forward)) and _is_of_packages(own.get("_hf_hook"))):
            return f"{kind}.forward() is of no installed package"
        if module.training and isinstance(module, _DropoutNd) and module.p:
            return f"{kind} draws random numbers"
        if module.training and rate is not None:
            return f"{rate} draws random numbers in training mode"
    return None


def _is_of_packages(code: object) -> bool:
    """Whether a function, what it wraps and what it binds, or the class of another object, is code of installed packages."""
    while code is not None:
        if isinstance(code, functools.partial):
            code = code.func
        elif hasattr(code, "__func__"):
            code = code.__func__
        elif isinstance(code, types.FunctionType):
            if not is_trusted(code.__globals__.get("__name__")):
                return False
            code = getattr(code, "__wrapped__", None)
        else:
            return is_trusted(type(code).__module__) and all(map(_is_of_packages, getattr(code, "hooks", ())))
    return True


def pack(given: dict[str, Any]) -> Packed | None:
    """How to read these prompts (rows, width) as one row, or None if that saves no TILE of tokens. This synchronises.

    A row whose last token is padding has no token whose logits generate() could read, and some models read the largest position,
    also of padding: such prompts are read padded.
    """
    ids, mask = given["input_ids"], given.get("attention_mask")
    (rows, width), device = ids.shape, ids.device
    live = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    positions = ids[None] * 0 if given.get("position_ids") is None else _positions(given).reshape(-1, rows, width)
    same = [(x[1:] == x[:-1]) | ~live[1:] for x in (ids, *positions)]
    equal = torch.stack([*same, live[1:] == live[:-1]]).all(0).all(1)
    right = live[:, -1].all() & (positions.amax() == positions.masked_fill(~live, 0).amax())
    if mask is not None:
        right &= (mask == live).all()
    holes = (live[:, :-1] & ~live[:, 1:]).any()
    *lengths, holes, right = torch.cat([live.sum(1), equal.long(), holes[None], right[None]]).tolist()
    repeats = [0, *lengths[rows:]]
    read = [i for i in range(rows) if not repeats[i]]
    counts = [lengths[i] for i in read]
    tokens = sum(counts)
    if not right or rows * width - tokens < TILE or (device.type == "cpu" and tokens**2 > rows * width**2):
        return None  # on the CPU attention computes all pairs of tokens
    ends = [0, *itertools.accumulate(counts)]
    of_row = [*itertools.accumulate((1 - each for each in repeats), initial=-1)][1:]
    on_device = torch.tensor([*read, *of_row, *ends], device=device).split([len(read), rows, len(ends)])
    chosen, copies = on_device[0], on_device[1]
    # The indices of live tokens, in order, without a second synchronisation: a stable sort puts them first.
    index = (~live[chosen].flatten()).to(torch.uint8).argsort(stable=True)[:tokens]
    tokens_at = chosen[index // width], index % width, on_device[2].to(torch.int32)
    last = torch.tensor(ends[1:], device="cpu") - 1
    return Packed(rows, width, *tokens_at, bool(holes), last, *((copies, chosen[copies]) if len(read) < rows else ()))


def _positions(given: dict[str, Any]) -> torch.Tensor:
    """The positions of all tokens, (..., rows, width): some models have several for each token."""
    positions: torch.Tensor = given["position_ids"]
    return positions.expand(*positions.shape[:-2], *given["input_ids"].shape)


def forward(run: Callable[..., Any], cache: StoredCache, given: dict[str, Any], packed: Packed) -> Any:
    """The output of run(**given), with the logits of the last tokens, whose forward reads the prompts as one row.

    Raises Unpackable if the model cannot read them so. The cache is then empty, as before, also after another error.
    """
    try:
        return _forward(run, cache, given, packed)
    except BaseException:
        cache.storage.reset()
        raise


def _forward(run: Callable[..., Any], cache: StoredCache, given: dict[str, Any], packed: Packed) -> Any:
    ids, storage, last = given["input_ids"], cache.storage, packed.last
    place = packed.row, packed.slot
    inputs = {**given, "input_ids": ids[place][None], "attention_mask": None}
    inputs["position_ids"] = _positions(given)[..., *place].unsqueeze(-2)
    if KEEP in given:
        inputs[KEEP] = last
    with steps.reading(storage, packed):
        output = run(**inputs)
    logits = getattr(output, "logits", None)
    if other := [name for name, x in output.items() if isinstance(x, torch.Tensor) and x is not logits]:
        raise Unpackable(f"its output has {other[0]}")
    if logits is None or logits.shape[:2] != (1, len(last) if KEEP in given else len(packed.row)):
        raise Unpackable(f"its logits are {None if logits is None else tuple(logits.shape)}")
    if not 0 < packed.stored == packed.attended:
        raise Unpackable(f"{packed.stored} of its layers store K and V, and {packed.attended} attend to them by {_OURS}")
    if storage.looks_ahead:
        raise Unpackable("tokens may see later ones")
    found = logits[0] if KEEP in given else logits[0, last]
    output.logits = (found if packed.of_row is None else found[packed.of_row.to(found.device)])[:, None]
    return output
