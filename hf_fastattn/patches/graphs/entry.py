"""One decode graph, with its input tensors and the conditions under which it is valid.

A graph of several tokens has a fixed number of them. A step with fewer is padded on the right: the padding has no effect on the
tokens before it, its K and V are beyond the tokens that the host counts, and its logits are cut off.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from ... import hf
from ...caches.contract import Storage
from ...caches.stored import StoredCache
from ..fused import sums
from ..fused.delayed import merged
from .cuda_graph import Graph
from .state import State, Uncapturable

if TYPE_CHECKING:
    from ...kernels.decode.all_reduce import Peers

Inputs = dict[str, Any]  # keyword arguments of a model
Kind = tuple[object, ...]  # of steps: see `Entry.kind`
_SCALARS = (bool, int, float, str, type(None))
PADDED = frozenset({"input_ids", "position_ids"})  # arguments with an entry for each token, whose last entry may be repeated
KEEP = "logits_to_keep"  # the number of last tokens whose logits a forward returns, 0 for all; or their indices


@dataclass(eq=False)
class Rehearsal:
    """What a step that ran from Python has shown of the steps of its kind and shape, over any storage.

    A step of another number of tokens is captured without one, with the same checks, see `Recorder.must_rehearse`.
    code: the version of the code that it ran, see `Path`. others: the names of further tensors of the output, which every replay
    writes (Moshi).
    """

    state: State
    kind: Kind
    tokens: int
    code: int
    others: list[str]
    output_type: Callable[..., Any]
    returns_cache: bool


class Entry:
    """One graph, from before its capture: its input tensors and the conditions under which it is valid.

    tokens: the number of tokens of each row. last: whether it returns only the logits of the last of them, which is `KEEP` = 1.
    """

    def __init__(self, cache: StoredCache, state: State, inputs: Inputs, tokens: int = 1):
        storage = cache.storage
        self.around: Callable[[Storage], StoredCache] = type(cache).around
        self.takes_mask = storage.takes_mask
        self.storage = weakref.ref(storage)
        self.device: torch.device = inputs["input_ids"].device
        self.tokens = tokens
        self.last = inputs.get(KEEP) == 1
        self.version = storage.version
        self.variant = storage.variant
        self.state = state
        self.own: str | None = None  # a function of no trusted package that its step ran
        self.code = 0  # the version of the code that its step ran, see `Path`
        self.call: object = None  # the call in which it was made, for which alone it is valid if the step runs code of the user
        self.used = 0
        self.refused: str | None = None
        self.rehearsal: Rehearsal | None = None
        self.graph: Graph | None = None
        self.logits: torch.Tensor  # written by every replay
        self.others: dict[str, torch.Tensor] = {}  # further tensors of the output, see `Rehearsal`
        self.returned: list[str] = []  # arguments that are in the output as they were given
        self.constants: dict[str, bool | int | float | str | None] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.rotaries: list[hf.Rotary] = []  # with tables of frequencies that the graph reads
        self.live: torch.Tensor | None = None  # bool (rows, capacity): the mask, padded with False
        self.width = 0  # columns of the mask
        self.masks: dict[str, torch.Tensor] = {}
        self.unmasked: list[str] = []  # kinds of layers that get None as their mask
        self.count = len(inputs)
        self.index: torch.Tensor | None = None  # int64 (1,): the last token that is not padding, if a forward takes its index
        for name, value in inputs.items():
            if name in hf.CACHES:
                continue
            if name == "attention_mask" and grows(value):
                with torch.inference_mode(False):
                    self.live = torch.zeros(len(value), storage.capacity, dtype=torch.bool, device=value.device)
            elif isinstance(value, torch.Tensor):
                self._add(name, value)
            elif tokens > 1 and name == KEEP and isinstance(value, int):
                with torch.inference_mode(False):
                    self.index = torch.empty(1, dtype=torch.int64, device=self.device)
            elif isinstance(value, _SCALARS):
                self.constants[name] = value
            elif (
                name == "attention_mask"
                and isinstance(value, dict)
                and all(isinstance(v, torch.Tensor | None) for v in value.values())
            ):
                self.masks = {kind: _like(mask) for kind, mask in value.items() if mask is not None}
                self.unmasked = [kind for kind, mask in value.items() if mask is None]
            else:
                self.refused = f"its argument {name} is a {type(value).__name__}"
        if self.constants.get("output_hidden_states") or self.constants.get("output_attentions"):
            self.refused = "hidden states or attentions are requested"

    @property
    def kind(self) -> Kind:
        """What steps have in common that are rehearsed alike: their arguments, and whether they have several tokens."""
        masks = self.live is not None, *self.masks, None, *self.unmasked
        return self.around, self.variant, self.tokens > 1, self.last, masks, *self.constants.items(), *self.tensors

    @property
    def shape(self) -> Kind:
        """All that selects its kernels, besides its kind."""
        storage = self.storage()
        buffers = {_layout(part.tensor) for part in ([] if storage is None else storage.memory())}
        given = map(_layout, {**self.tensors, **self.masks}.values())
        return self.kind, self.tokens, storage and storage.capacity, frozenset(buffers), *given

    @property
    def warm(self) -> bool:
        """Whether its step may be captured."""
        return self.rehearsal is not None

    @property
    def masked(self) -> bool:
        """Whether its step reads a mask."""
        return self.live is not None or bool(self.masks)

    def _add(self, name: str, value: torch.Tensor) -> None:
        if self.tokens > 1 and name in PADDED:
            value = value[..., :1].expand(*value.shape[:-1], self.tokens)
        self.tensors[name] = _like(value)

    def fits(self, storage: Storage) -> bool:
        """Whether this graph is valid for the current state of `storage`."""
        return self.storage() is storage and self.version == storage.version and self.variant == storage.variant

    def accepts(self, inputs: Inputs, tokens: int = 1) -> bool:
        """Whether inputs have the shapes and constants of this graph. tokens: the number of tokens of the graph to use."""
        if len(inputs) != self.count or tokens != self.tokens:
            return False
        if tokens > 1 and (inputs.get(KEEP) == 1) != self.last:
            return False
        q_len = inputs["input_ids"].shape[-1]
        for name, tensor in self.tensors.items():
            value = inputs.get(name)
            shape = (*tensor.shape[:-1], q_len) if name in PADDED else tensor.shape
            if not isinstance(value, torch.Tensor) or value.shape != shape or value.dtype != tensor.dtype:
                return False
        for name, constant in self.constants.items():
            if inputs.get(name, self) != constant:
                return False
        if self.live is not None:
            return grows(inputs.get("attention_mask"))
        if self.masks or self.unmasked:
            masks = inputs.get("attention_mask")
            shapes = {kind: mask.shape for kind, mask in self.masks.items()} | dict.fromkeys(self.unmasked)
            return isinstance(masks, dict) and {kind: getattr(mask, "shape", None) for kind, mask in masks.items()} == shapes
        return True

    def grown(self, inputs: Inputs) -> str | None:
        """The name of an argument that is one element longer than in this graph, or None."""
        for name, tensor in self.tensors.items() if self.tokens == 1 else ():
            shape = getattr(inputs.get(name), "shape", ())
            if shape[:-1] == tensor.shape[:-1] and shape[-1:] == (tensor.shape[-1] + 1,):
                return name
        return None

    def copy_in(self, inputs: Inputs) -> None:
        for name, tensor in self.tensors.items():
            value = inputs[name]
            if value.shape != tensor.shape:  # the last entry, which is valid, is repeated
                tensor[..., value.shape[-1] :].copy_(value[..., -1:])
                tensor = tensor[..., : value.shape[-1]]
            tensor.copy_(value)
        if self.index is not None:
            self.index.fill_(inputs["input_ids"].shape[-1] - 1)
        for kind, mask in self.masks.items():
            mask.copy_(inputs["attention_mask"][kind])
        if self.live is not None:
            mask = inputs["attention_mask"]
            self.live[:, : mask.shape[1]].copy_(mask)
            if mask.shape[1] < self.width:  # another prompt
                self.live[:, mask.shape[1] :] = False
            self.width = mask.shape[1]

    def body(
        self, model: hf.PreTrainedModel, run: Callable[..., Any], storage: Storage, peers: Peers | None
    ) -> Callable[[], Any]:
        """One step over the graph's own tensors, which is run once as a warm-up and then captured.

        run: the model's forward. peers: the memory that ranks share, for their sums.
        """
        static: Inputs = {**self.constants, **self.tensors}
        if self.index is not None:
            static[KEEP] = self.index if self.last else 0
        if self.masks or self.unmasked:
            static["attention_mask"] = {**self.masks, **dict.fromkeys(self.unmasked)}
        if self.live is not None:
            static["attention_mask"] = self.live
        self.rotaries = hf.longropes_in(model)

        def step() -> Any:
            cache = self.around(storage)
            with cache.on_device(tokens=self.tokens):
                inputs = {**static, hf.CACHE: cache}
                if self.takes_mask and "attention_mask" not in static:
                    # Built in the graph from the count on the device. Some models count tokens on the host if they get no mask.
                    inputs["attention_mask"] = hf.decode_mask(model, {**inputs, "attention_mask": None})
                with merged(model, shared=peers is not None), sums.over(peers), hf.chosen_on_device(self.rotaries):
                    outputs = run(**inputs)
                storage.step()
            if isinstance(outputs, Mapping):
                self.returned = [k for k, v in outputs.items() if k not in hf.CACHES and v is not None and v is inputs.get(k)]
            return outputs

        return step

    def check(self, logits: torch.Tensor) -> None:
        """Raise Uncapturable if a step of several tokens has returned the logits of others."""
        if self.tokens > 1 and logits.shape[1] != (1 if self.last else self.tokens):
            raise Uncapturable(f"it returns logits of {logits.shape[1]} of {self.tokens} tokens")

    def kept(self, logits: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """The part of the graph's logits that a forward with these inputs returns."""
        if self.tokens == 1 or self.last:
            return logits
        return logits[:, : inputs["input_ids"].shape[-1]][:, slice(-inputs.get(KEEP, 0), None)]

    def output(self, logits: torch.Tensor, cache: StoredCache, given: Inputs) -> Any:
        """The output of a step with these arguments, in the model's own type."""
        assert self.rehearsal is not None  # a step has run
        others = {name: given.get(name) for name in self.returned} | ({hf.CACHE: cache} if self.rehearsal.returns_cache else {})
        return self.rehearsal.output_type(logits=logits, **others, **{name: value.clone() for name, value in self.others.items()})


def unpaddable(inputs: Inputs) -> str | None:
    """The name of an argument that a step of several tokens cannot pad: a tensor other than a 2-D mask, and other than ids and
    positions with an entry for each token."""
    tokens = inputs["input_ids"].shape[-1:]
    for name, value in inputs.items():
        if not isinstance(value, (torch.Tensor, dict)) or (name == "attention_mask" and grows(value)):
            continue
        if name not in PADDED or isinstance(value, dict) or value.shape[-1:] != tokens:
            return name
    return None


def grows(mask: object) -> TypeGuard[torch.Tensor]:
    """Whether this is a mask of generate(), (rows, tokens so far), which grows with every token."""
    return isinstance(mask, torch.Tensor) and mask.dim() == 2


def _layout(x: torch.Tensor) -> Kind:
    """What a kernel is compiled for."""
    return tuple(x.shape), x.stride(), x.dtype, x.device, x.data_ptr() % 16


def _like(value: torch.Tensor) -> torch.Tensor:
    # A normal tensor, because the next generate() may run outside of inference mode.
    with torch.inference_mode(False):
        return torch.empty_like(value, memory_format=torch.contiguous_format)
