"""The first forward of a generate() over an empty cache, which reads a padded prompt without its padding, and equal rows once.

The tokens of all rows become one row, in which attention keeps the sequences apart (`attention.step.Packed`). Positions are those
of the padded run, the layers of the cache store K and V where the padded run would, and the logits are those of the last token of
each row. What a code or a call may observe of the padding makes it run padded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ... import hf, registry
from ...attention import step as steps
from ...attention.step import Packed, Unpackable
from ...caches import forward as caches
from ...caches.stored import StoredCache
from ...hf.packages import is_trusted
from ..graphs.entry import KEEP

TILE = 128  # tokens: to save fewer is not worth the work on the host
_TENSORS = {"input_ids", "attention_mask", "position_ids"}
_ASKED = ("output_hidden_states", "output_attentions", "output_router_logits", "labels")
_DROPS = ("drop", "jitter")  # in the names of what draws random numbers in training, for each token


def why_padded(model: hf.PreTrainedModel, cache: StoredCache, given: dict[str, Any]) -> str | None:
    """Why the padding of such a prompt is read, judged without its values; None if it need not be."""
    name = model.config._attn_implementation
    if name not in registry.names() or not registry.get(name).packed or registry.get(name).invariant:
        return f"attn_implementation={name!r} does not read prompts as one row"
    if not cache.storage.takes_packed:
        return f"a {type(cache).__name__} takes one row for each prompt"
    if (other := next((n for n, x in given.items() if n not in _TENSORS and _has_tensors(x)), None)) is not None:
        return f"the argument {other} is passed"
    if (asked := next((n for n in _ASKED if given.get(n)), None)) is not None:
        return f"{asked} is requested"
    if model.training and (draws := _draws(model.config.get_text_config(decoder=True))) is not None:
        return f"{draws} draws random numbers in training mode"
    if given.get("position_ids") is None:
        return "it takes no position_ids"
    if KEEP in given and given[KEEP] != 1:
        return f"{KEEP} is {given[KEEP]}"
    return None


def _has_tensors(x: object) -> bool:
    return isinstance(x, torch.Tensor) or (isinstance(x, Mapping) and any(map(_has_tensors, x.values())))


def _draws(config: hf.PreTrainedConfig) -> str | None:
    """A rate of the configuration with which training draws random numbers for each token."""
    rates = {name: value for name, value in vars(config).items() if any(word in name for word in _DROPS)}
    return next((name for name, value in rates.items() if isinstance(value, float) and value), None)


def code_of_user(model: hf.PreTrainedModel) -> str | None:
    """Code of the user's that would see one row in place of several, as a reason; None if there is none."""
    api = torch.nn.modules.module
    if api._global_forward_hooks or api._global_forward_pre_hooks:
        return "a global forward hook is registered"
    for module in model.modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if not (caches.is_ours(hook) or hf.is_inert_hook(hook)):
                return f"{type(module).__name__} has the forward hook {getattr(hook, '__qualname__', type(hook).__qualname__)}"
        forward = vars(module).get("forward", type(module).forward)
        if not is_trusted(getattr(forward, "__module__", None)):
            return f"{type(module).__name__}.forward() is of no installed package"
    return None


def pack(given: dict[str, Any]) -> Packed | None:
    """How to read these prompts (rows, width) as one row, or None if that saves no TILE of tokens. This synchronises.

    A row whose last token is padding has no token whose logits generate() could read: such prompts are read padded.
    """
    ids, mask = given["input_ids"], given.get("attention_mask")
    rows, width = ids.shape
    ints = partial(torch.tensor, device=ids.device)
    live = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    same = [live[1:] == live[:-1]]
    for x in (ids, *_positions(given).reshape(-1, rows, width)):
        same.append((x[1:] == x[:-1]) | ~live[1:])
    equal = torch.stack(same).all(0).all(1)
    right = live[:, -1].all() if mask is None else live[:, -1].all() & (mask == live).all()
    holes = (live[:, :-1] & ~live[:, 1:]).any()
    found = torch.cat([live.sum(1), equal.long(), holes[None], right[None]]).tolist()
    lengths, repeats = found[:rows], [0, *found[rows:-2]]
    read = [i for i in range(rows) if not repeats[i]]
    tokens = sum(lengths[i] for i in read)
    if not found[-1] or rows * width - tokens < TILE or (ids.device.type == "cpu" and tokens**2 > rows * width**2):
        return None  # on the CPU attention computes all pairs of tokens
    chosen, of_row = ints(read), ints(repeats).eq(0).cumsum(0) - 1
    # The indices of live tokens, in order, without a second synchronisation: a stable sort puts them first.
    index = (~live[chosen].flatten()).to(torch.uint8).argsort(stable=True)[:tokens]
    ends = ints([0, *(lengths[i] for i in read)]).cumsum(0).to(torch.int32)
    copies = () if len(read) == rows else (of_row, chosen[of_row])
    return Packed(rows, width, chosen[index // width], index % width, ends, bool(found[-2]), *copies)


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
    ids, storage = given["input_ids"], cache.storage
    place, last = (packed.row, packed.slot), packed.ends[1:].long() - 1
    inputs = {**given, "input_ids": ids[place][None], "attention_mask": None}
    inputs["position_ids"] = _positions(given)[..., *place].unsqueeze(-2)
    if KEEP in given:
        inputs[KEEP] = last
    with steps.reading(storage, packed):
        output = run(**inputs)
    logits = getattr(output, "logits", None)
    others = [name for name, x in output.items() if isinstance(x, torch.Tensor) and x is not logits]
    if logits is None or others or logits.shape[:2] != (1, len(last) if KEEP in given else len(packed.row)):
        raise Unpackable("its output has other tensors than the logits of these tokens")
    if not 0 < packed.stored <= packed.attended or storage.looks_ahead:
        raise Unpackable("some of its layers have another attention, or its tokens see later ones")
    found = logits[0] if KEEP in given else logits[0, last]
    output.logits = (found if packed.of_row is None else found[packed.of_row.to(found.device)])[:, None]
    return output
