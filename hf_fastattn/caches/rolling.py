"""Cache "rolling": the first tokens of each row and a ring of the last, in buffers that never grow.

A layer's buffer is (batch, num_kv_heads, sinks + window, head_dim). Token t of a row, its padding not counted, stands at

    slot t                              if t < sinks
    slot sinks + (t - sinks) % window   otherwise

so that a new token overwrites the one that leaves the window, and nothing else moves. How many tokens each row has is known on
the device alone: rows differ by their padding, and nothing here waits for the device.

One token at a time is written at its slot, and the attention reads the buffer as it lies: a softmax does not ask for an order.
Many at once are attended to as [sinks | window, oldest first | new tokens], gathered row by row, and stored afterwards.

`update()` sees neither the mask nor the batch's padding. A forward pre-hook on the model, `prepare`, does: it counts what is new
and gives the layers spans in place of the mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .. import compat, registry
from ..compat import CacheLayerMixin
from ..kernels.append import append
from ..kernels.ring import pack_spans, ring_step
from ..streaming import Settings
from .layers import CAPTURED, CHANGE_ROWS, EAGER


@dataclass
class Step:
    """What the layers need to know of one forward.

    slots: int64, (batch,) where one token is written, else None. gather: int64 (batch, held), the slots of what the rows hold,
    oldest first and right-aligned. store: int64 (batch, sinks + window), which of those and the new tokens each slot holds next.
    """

    q_len: int
    slots: torch.Tensor | None = None
    gather: torch.Tensor | None = None
    store: torch.Tensor | None = None


class Ring:
    """The layers of a rolling cache and what they have in common: the counts of tokens, and the step under way."""

    takes_mask = False  # the counts know the padding

    def __init__(self, num_layers: int, settings: Settings):
        self.window, self.sinks = settings.window, settings.sinks
        self.capacity = self.window + self.sinks
        self.layers = [RollingLayer(index, self) for index in range(num_layers)]
        self.counts: torch.Tensor | None = None  # int64 (batch,) on the device: tokens of each row
        self.seen = 0  # tokens of the longest row, padding counted: all that the host knows
        self.mode = EAGER
        self.version = 0  # changes whenever a buffer moves in memory
        self.under_way: Step | None = None
        self.last = num_layers  # index of the layer that was updated last

    @property
    def rows(self) -> int | None:
        return None if self.counts is None else self.counts.shape[0]

    def begin(self, rows: int, q_len: int, pads: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """Count `q_len` new tokens of each row, the first `pads` (int64 (batch,)) of them padding; the spans for them."""
        if self.counts is None or self.rows != rows or self.counts.device != device:
            self._allocate(rows, device)
        self.last = -1
        if q_len == 1:
            slots, spans = ring_step(self.counts, pads, self.window, self.sinks)
            self.under_way = Step(1, slots=slots)
        else:
            before = self.counts.clone()
            self.counts.add_(q_len if pads is None else q_len - pads)
            spans = self._many(before, self.counts, pads, q_len)
        if self.mode == EAGER:
            self.seen += q_len
        return spans

    def positions(self, q_len: int) -> torch.Tensor:
        """Those of the `q_len` tokens counted last, int64 (batch, q_len); 0 for padding."""
        new = torch.arange(-q_len, 0, device=self.counts.device)
        return (self.counts[:, None] + new).clamp(min=0)

    def _many(self, before: torch.Tensor, after: torch.Tensor, pads: torch.Tensor | None, q_len: int) -> torch.Tensor:
        sinks, window = self.sinks, self.window
        held = min(self.seen, self.capacity)  # by the longest row
        kept = before.clamp(max=held)
        step = self.under_way = Step(q_len)
        before, after, first = before[:, None], after[:, None], (held - kept)[:, None]
        dropped = before - kept[:, None]
        index = torch.arange(held, device=before.device) - first
        token = torch.where(index < sinks, index, index + dropped).clamp(min=0)
        step.gather = torch.where(token < sinks, token, sinks + (token - sinks) % window)
        slot = torch.arange(self.capacity, device=before.device)
        token = torch.where(slot < sinks, slot, after - 1 - (after - 1 - slot) % window)
        place = torch.where(token < sinks, first + token, held + token - before)
        new = held + token - before + (0 if pads is None else pads[:, None])
        # Slots that no token has reached yet hold anything.
        step.store = torch.where(token < before, place, new).clamp(0, held + q_len - 1)
        start = held - kept if pads is None else held - kept + pads
        full = torch.full_like(start, held)
        return pack_spans(full, start, full + q_len, dropped[:, 0])

    def _allocate(self, rows: int, device: torch.device) -> None:
        if self.seen:
            raise ValueError(
                f"This cache holds {self.rows} rows on {self.counts.device}, and is given {rows} on {device}. {CHANGE_ROWS}"
            )
        with torch.inference_mode(False):
            self.counts = torch.zeros(rows, dtype=torch.int64, device=device)
        for layer in self.layers:
            layer.is_initialized, layer.keys, layer.values = False, None, None
        self.version += 1

    def select(self, indices: torch.Tensor) -> None:
        if self.counts is None:
            return
        same = len(indices) == self.rows
        counts = self.counts[indices.to(self.counts.device)]
        self.counts = self.counts.copy_(counts) if same else counts.clone()
        self.version += not same
        for layer in self.layers:
            layer.select(indices, same)

    def reset(self) -> None:
        self.seen, self.under_way, self.last = 0, None, len(self.layers)
        if self.counts is not None:
            self.counts.zero_()

    # What a pool and a decode graph ask of a storage.

    def holds(self, tokens: int) -> bool:
        return True

    def relieve_with(self, free) -> None:
        """It never allocates when memory is short."""

    def set_mode(self, mode: str) -> None:
        self.mode = mode

    def sync(self, device: torch.device) -> None:
        """The counts are on the device as it is."""

    def step(self) -> None:
        """begin() has counted on the device already."""

    def advance(self) -> None:
        self.seen += 1

    def mark(self) -> torch.Tensor:
        return self.counts.clone()

    def rewind(self, mark: torch.Tensor) -> None:
        self.counts.copy_(mark)


class RollingLayer(CacheLayerMixin):
    """K and V of one layer, (batch, num_kv_heads, sinks + window, head_dim) each."""

    is_compileable = False  # else generate() would start torch.compile unasked; decode graphs do not ask this
    is_croppable = True
    is_sliding = False

    def __init__(self, index: int, ring: Ring):
        super().__init__()
        self.index = index
        self.ring = ring

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        shape = (*key_states.shape[:2], self.ring.capacity)
        # Normal tensors, so that a cache made under inference_mode can be used outside it.
        with torch.inference_mode(False):
            self.keys = torch.zeros(*shape, key_states.shape[3], dtype=self.dtype, device=self.device)
            self.values = torch.zeros(*shape, value_states.shape[3], dtype=self.dtype, device=self.device)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep (batch, num_kv_heads, q_len, head_dim) K and V; return those to attend to, as the spans of this forward say."""
        ring, step = self.ring, self.ring.under_way
        if self.index <= ring.last or step is None or step.q_len != key_states.shape[2]:
            raise RuntimeError(
                "A RollingCache is read through a patched model, whose forward tells it of padding: call the model that "
                'hf_fastattn.patch(model, "streaming", ...) was given, and not a part of it.'
            )
        ring.last = self.index
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif _kind(self.keys) != _kind(key_states) or _kind(self.values) != _kind(value_states):
            described = [f"{t.shape[1]} KV heads of {t.shape[3]} in {t.dtype}" for t in (self.keys, key_states)]
            raise ValueError(f"This cache holds {described[0]}, and it is given {described[1]}: it belongs to another model.")
        if key_states.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "A rolling cache is written in place and carries no gradient. Run under torch.no_grad(), or pass use_cache=False."
            )
        if step.q_len == 1:
            append(self.keys, self.values, key_states, value_states, step.slots.to(self.device))
            return self.keys, self.values
        return tuple(self._extend(*pair, step) for pair in ((self.keys, key_states), (self.values, value_states)))

    def _extend(self, buffer: torch.Tensor, states: torch.Tensor, step: Step) -> torch.Tensor:
        tokens = torch.cat([_take(buffer, step.gather), states], 2) if step.gather.shape[1] else states
        buffer.copy_(_take(tokens, step.store))
        return tokens

    def select(self, indices: torch.Tensor, same: bool) -> None:
        if self.is_initialized:
            for name in ("keys", "values"):
                buffer = getattr(self, name)
                rows = buffer.index_select(0, indices.to(buffer.device))
                setattr(self, name, buffer.copy_(rows) if same else rows.clone())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = self.ring.capacity if query_length == 1 else min(self.ring.seen, self.ring.capacity) + query_length
        return held, 0

    def get_seq_length(self) -> int:
        return self.ring.seen

    def get_max_length(self) -> int:
        return -1  # text without end

    def reset(self) -> None:
        self.ring.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise NotImplementedError("Layers of a rolling cache share their counts; call reorder_cache() of the cache.")

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("Layers of a rolling cache share their counts; call crop() of the cache.")

    def offload(self) -> None:
        raise NotImplementedError("A rolling cache stays where it was allocated; it is small, and is not offloaded.")

    prefetch = offload


def _kind(states: torch.Tensor) -> tuple:
    return *states.shape[:2], states.shape[3], states.dtype, states.device


def _take(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Slots (batch, n) of `buffer` (batch, heads, length, head_dim), another choice in each row."""
    slots = slots.to(buffer.device)[:, None, :, None]
    return buffer.gather(2, slots.expand(-1, buffer.shape[1], -1, buffer.shape[3]))


class RollingCache(compat.Cache):
    """The first `sinks` tokens of every row and the last `window`, in constant memory: a `past_key_values` for text without end.

    model: one that hf_fastattn.patch(model, "streaming", window=, sinks=) was given, whose numbers hold. Nothing is allocated
    before the first forward. get_seq_length() counts all tokens ever read, padding included.

    It takes left padding, prompts of any length, chunks of any size, several turns, beams, reset() and deepcopy. It refuses, in
    a sentence: a model that cannot read it, holes in the mask, gradients, offloading, rows or K/V shapes of another call or
    model, and to take back tokens once it has dropped any.
    """

    def __init__(self, model):
        _check_model(model)
        config = model.config.get_text_config(decoder=True)
        self._adopt(Ring(config.num_hidden_layers, Settings.of(config)))

    def _adopt(self, storage: Ring) -> None:
        self.storage = storage
        self.vetted = 0  # tokens of a mask that has been checked
        super().__init__(layers=storage.layers)

    @classmethod
    def around(cls, storage: Ring) -> RollingCache:
        """A cache whose tokens are those of `storage`."""
        cache = cls.__new__(cls)
        cache._adopt(storage)
        return cache

    def __repr__(self) -> str:
        ring = self.storage
        return (
            f"RollingCache({len(self.layers)} layers, {ring.sinks} sinks and a window of {ring.window}, {ring.seen} tokens read)"
        )

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"This cache holds {len(self.layers)} layers and is given layer {layer_idx}: it belongs to another model."
            )
        return self.layers[layer_idx].update(key_states, value_states)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.storage.seen

    def reserve(self, tokens: int) -> None:
        """Nothing: there is room for any number."""

    def check_rows(self, rows: int) -> None:
        """Raise ValueError if the cache holds tokens of another number of rows."""
        ring = self.storage
        if ring.seen and ring.rows != rows:
            raise ValueError(f"This cache holds {ring.rows} rows, and the call has {rows}. {CHANGE_ROWS}")

    def vet(self, mask: torch.Tensor | None, tokens: int = 0, takes_back: bool = False) -> None:
        """Raise ValueError for what a call is going to ask and cannot get; waits for the device.

        mask: 2-D, with padding on the left alone. takes_back: the call crops as it goes, up to `tokens` tokens in all.
        """
        if mask is not None and mask.dim() == 2:
            if bool((mask[:, 1:] < mask[:, :-1]).any()):
                raise ValueError(
                    "A rolling cache discards left padding, and this attention_mask has zeros behind ones (holes, or padding on "
                    'the right). Pad on the left (tokenizer.padding_side = "left"), or use another backend.'
                )
            self.vetted = mask.shape[1]
        if takes_back and tokens > self.storage.capacity:
            raise ValueError(
                f"Assisted generation takes tokens back, and a rolling cache of {self.storage.capacity} tokens cannot give back "
                f"what it dropped; this call may come to {tokens}. Generate without assistant or prompt lookup."
            )

    def reset(self) -> None:
        """Forget all tokens; the buffers stay where they are."""
        self.storage.reset()
        self.vetted = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens (a negative number, as in Transformers; 0 does nothing)."""
        ring = self.storage
        if tokens_to_remove > 0:
            raise ValueError(f"crop() takes the negative number of tokens to take back; got {tokens_to_remove}.")
        if -tokens_to_remove > ring.seen:
            raise ValueError(f"This cache has read {ring.seen} tokens; {-tokens_to_remove} cannot be taken back.")
        if tokens_to_remove and ring.seen > ring.capacity:
            raise ValueError(
                f"This cache keeps {ring.capacity} of {ring.seen} tokens, and those that would come into sight again after "
                f"taking back {-tokens_to_remove} are gone. Take tokens back only while nothing is dropped."
            )
        if tokens_to_remove:
            ring.counts.add_(tokens_to_remove).clamp_(min=0)
            ring.seen += tokens_to_remove

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.storage.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, in place of it."""
        self.batch_select_indices(torch.arange(self.storage.rows or 0).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep rows `indices` (int64, or bool with one entry per row), in this order."""
        self.storage.select(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    @contextmanager
    def on_device(self, with_mask: bool = False) -> Iterator[None]:
        """Inside, a forward of one token leaves the host's count alone: what a decode graph captures."""
        self.storage.set_mode(CAPTURED)
        try:
            yield
        finally:
            self.storage.set_mode(EAGER)


def _check_model(model) -> None:
    name = model.config._attn_implementation
    if name not in registry.names() or not registry.get(name).streaming:
        raise ValueError(
            f"{type(model).__name__} runs attn_implementation={name!r}, which cannot read a RollingCache; use "
            'hf_fastattn.patch(model, "streaming", window=4096, sinks=4).'
        )
    if prepare not in model._forward_pre_hooks.values():
        raise ValueError(
            f"A RollingCache must hear of padding before {type(model).__name__} runs; use "
            'hf_fastattn.patch(model, "streaming", window=4096, sinks=4), which sees to that.'
        )


def prepare(model, args: tuple, kwargs: dict):
    """The forward pre-hook of a patched model: where it is given a RollingCache, spans take the place of the mask."""
    cache = kwargs.get("past_key_values")
    if not isinstance(cache, RollingCache):
        return None
    _check_model(model)
    if len(args) > 1:
        raise TypeError("Pass everything but input_ids by keyword to a model with a RollingCache.")
    ring = cache.storage
    config = model.config.get_text_config(decoder=True)
    settings = Settings.of(config)
    if (settings.window, settings.sinks, config.num_hidden_layers) != (ring.window, ring.sinks, len(ring.layers)):
        raise ValueError(
            f"{cache} was made for another model or other settings than this one's: {settings.sinks} sinks and a window of "
            f"{settings.window}."
        )
    ids = args[0] if args else kwargs.get("input_ids")
    ids = kwargs["inputs_embeds"] if ids is None else ids
    rows, q_len = ids.shape[:2]
    pads = _new_pads(cache, kwargs.get("attention_mask"), q_len)
    spans = ring.begin(rows, q_len, pads, ids.device)
    given = kwargs.get("position_ids")
    positions = ring.positions(q_len) if given is None else given
    if settings.clamped:
        positions = positions.clamp(max=config.max_position_embeddings - 1)
    return args, {**kwargs, "attention_mask": spans, "position_ids": positions}


def detach(model) -> None:
    """Take `prepare` off the model."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is prepare:
            del model._forward_pre_hooks[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)


def _new_pads(cache: RollingCache, mask, q_len: int) -> torch.Tensor | None:
    """How many of each row's new tokens are padding, on the device."""
    if mask is None or cache.storage.mode != EAGER:
        return None
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        raise ValueError("A RollingCache takes a 2-D attention_mask, (rows, all tokens so far), and makes everything else of it.")
    if mask.shape[1] != cache.storage.seen + q_len:
        raise ValueError(
            f"attention_mask covers {mask.shape[1]} tokens; this cache has read {cache.storage.seen} and is given {q_len} more."
        )
    if q_len > 1 and mask.shape[1] > cache.vetted:
        cache.vet(mask)
    return (mask[:, -q_len:] == 0).sum(1)
