"""The layers of a preallocated cache: buffers for K and V of each layer, and the mapping of tokens to slots.

The buffer of a layer is (batch, num_kv_heads, capacity, head_dim). Every layer counts its own tokens on the host, so layers may
run in any order, and a subset of them may run alone. Layers of one kind (full attention, or one sliding window) share a Track,
which has the capacity and a copy of the counts on the device.

Outside a decode graph a layer writes a slice at the host's count and returns the live slice. Masks, padding and stock attention
therefore work as with a DynamicCache, without copying all K/V for every token.
Inside a decode graph nothing may depend on the host. A layer writes at the slot given on the device and returns its whole buffer;
spans computed from the device's count mark the live slots. A graph serves the layers that hold the most tokens: all layers,
except in a model that runs a subset of its layers.

A sliding layer keeps its last tokens in order, in a buffer slightly larger than its window. A token is one write. When the buffer
is full, the window moves to its front, once every SLACK tokens. The slots therefore stay in order of position, and padding, holes
and cropping work as in a full layer. In a ring buffer they would not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..attention import step as steps
from ..attention.step import CAPTURED, CAPTURED_WITH_MASK, EAGER, Packed, Step
from ..hf import Kind
from ..kernels.spec import KV, bytes_per_token
from . import memory
from .buffers import Pair, describe, devices_of, layout, reallocated, refuse_gradient, selected, slide
from .contract import CHANGE_ROWS, Storage
from .replaced import Replaceable

STEP = 256  # tokens; capacities are multiples of it, and of an eighth of their size
KEEP = 128  # tokens before its window that a sliding layer keeps when it moves; so many can be removed by crop()
SLACK = 512  # tokens that a sliding layer writes between two moves
AHEAD = 4  # how many times as large buffers become that grow, if they then take at most 1/SPARE of free memory
SPARE = 16
AT_ONCE = 1 << 15  # tokens of a row in a launch that stores them, whose grid has at most 65,535


def round_up(tokens: int) -> int:
    """A capacity for this many tokens: the next multiple of STEP, or of 1/8 of the previous power of two if that is larger."""
    step = max(STEP, (1 << max(tokens, 1).bit_length() - 1) // 8)
    return -(-max(tokens, 1) // step) * step


class Track:
    """The state shared by layers of one kind. Slot j of a layer holds position base + j; slots below seen - base are live."""

    counts: torch.Tensor  # int64 (2,) on `device`: the slot of the next token, and the number of tokens
    live: torch.Tensor | None  # int64 (1,) there: tokens of the next step that are no padding

    def __init__(self, kind: Kind, capacity: int, growable: bool):
        self.kind = kind
        self.growable = growable
        self.capacity = min(capacity, self.limit)
        self.version = 0  # counts the times a buffer moved in memory
        self._forget()

    def _forget(self) -> None:
        self.members: list[weakref.ref[Layer]] = []
        self.storage: weakref.ref[Storage] | None = None
        self.device: torch.device | None = None  # None before a decode graph needs `counts`
        self.image, self.stale = (0, 0), True  # the values in `counts`, and whether the host has counted since
        self.live, self.new = None, 0  # new: the value in `live`
        self.placed: list[torch.device] | None = None  # where its layers compute, see `missing`
        self.running = 0  # bit mask of the layers that a decode graph writes
        self.on_low_memory: weakref.WeakMethod[Callable[[], None]] | None = None  # called when memory is short

    def __getstate__(self) -> dict[str, Any]:
        mine = ("kind", "growable", "capacity", "version")
        return {name: getattr(self, name) for name in mine}  # a copy belongs to no pool and no graph

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    @property
    def step(self) -> Step | None:
        """The current step over its storage."""
        return None if self.storage is None else steps.over(self.storage())

    @property
    def mode(self) -> str:
        """Where its tokens are counted: see `step`."""
        return EAGER if self.storage is None else steps.mode(self.storage())

    def layers(self) -> Iterator[Layer]:
        return (layer for member in self.members if (layer := member()) is not None)

    @property
    def limit(self) -> int:
        """The largest capacity that a layer can need."""
        return 1 << 62 if self.kind.window is None else self.kind.window - 1 + KEEP + SLACK

    def kept(self, seen: int) -> int:
        """How many of `seen` tokens a layer keeps when it moves its window."""
        return min(seen, self.limit - SLACK)

    def grow(self, capacity: int) -> None:
        """Give every layer a buffer of `capacity` tokens. Raises MemoryError, before allocating, if they do not fit."""
        made = [layer for layer in self.layers() if layer.is_initialized]
        for device in {layer.device for layer in made}:
            each = sum(bytes_per_token(*layer.buffers) for layer in made if layer.device == device)
            # Each old buffer is freed when its new one is allocated.
            self.refuse_unless_fits(capacity, each, device, held=self.capacity * each)
        self.version += 1
        for layer in made:
            layer.reallocate(capacity)
        self.capacity = capacity  # after all layers have it

    def refuse_unless_fits(self, tokens: int, bytes_per_token: int, device: torch.device, held: int = 0) -> None:
        """Raise MemoryError if buffers of `tokens` tokens do not fit. held: bytes of the buffers that they replace."""
        release = None if self.on_low_memory is None else self.on_low_memory()
        memory.refuse_unless_fits(tokens, bytes_per_token, device, held, release)

    def length(self, tokens: int) -> int:
        """Slots of a buffer for so many tokens."""
        return tokens

    def missing(self, device: torch.device) -> int:
        """Of how many layers on a device the first one without a buffer allocates: all of them, but itself alone if devices of
        layers are not known, and 0 if one of them has a buffer."""
        layers = [*self.layers()]
        if not any(layer.is_initialized for layer in layers):
            self.placed = devices_of(layers, device, self.step)
        if self.placed is None:
            return 1
        if any(layer.is_initialized and layer.device == device for layer in layers):
            return 0
        return max(1, self.placed.count(device))

    def is_synced(self, device: torch.device, tokens: int) -> bool:
        """Whether the device has the host's counts, and the buffers have free slots for `tokens` tokens."""
        fits = not self.stale and self.image[0] + tokens <= self.capacity
        return fits and self.device == device and self.new == tokens

    def sync(self, device: torch.device, slot: int, seen: int, tokens: int) -> None:
        """Write the counts to the device if they differ, without synchronising. tokens: those of the next step."""
        if self.device != device:
            with torch.inference_mode(False):
                both = torch.empty(3, dtype=torch.int64, device=device)
                self.counts, self.live = both[:2], both[2:]
            self.device, self.new = device, 0
            self.version += 1
            self.stale = True
        if self.stale or self.image != (slot, seen):
            if slot == seen:  # one launch
                self.counts.fill_(seen)
            else:
                self.counts[0].fill_(slot)
                self.counts[1].fill_(seen)
            self.image, self.stale = (slot, seen), False
        if self.new != tokens and self.live is not None:
            self.live.fill_(tokens)
            self.new = tokens


class Layer(Replaceable):
    """K and V of one layer, (batch, num_kv_heads, capacity, head_dim) each. Their dtypes may differ.

    seen: number of tokens so far. base: the position in slot 0. kv_dtype: "int8" or "fp8" for K and V in 8 bits (eight_bits.py).
    """

    kv_dtype: str | None = None

    def __init__(self, index: int, track: Track):
        self.index = index
        self.track = track
        self.is_sliding = track.kind.window is not None
        self.clear()
        track.members.append(weakref.ref(self))

    def moved(self) -> None:
        self.track.version += 1
        self.track.stale = True

    def clear(self) -> None:
        """Discard K and V, their buffers and their count: states besides them may be of the text that begins."""
        Layer.reset(self)
        super().clear()

    @property
    def slots(self) -> int:
        return self.seen - self.base

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.track.members.append(weakref.ref(self))

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate buffers for states of this shape, (batch, num_kv_heads, any, head_dim)."""
        track, device = self.track, key_states.device
        source = self.pending or (key_states[:, :, :0], value_states[:, :, :0])
        buffers = self.joined(*source)
        try:
            if missing := track.missing(device):
                each = missing * bytes_per_token(*buffers)
                track.refuse_unless_fits(track.capacity, each, device)
                if missing > 1:
                    memory.reserve(track.length(track.capacity) * each, missing * len(buffers), device)
        except MemoryError:
            if track.growable and not any(layer.is_initialized for layer in track.layers()):
                track.capacity = min(track.limit, STEP)  # the next call makes room for its own tokens
            raise
        self.buffers = [*buffers]
        self.dtype, self.device = key_states.dtype, device
        self.reallocate(track.capacity)
        self.pending, self.is_initialized = None, True

    def reallocate(self, capacity: int) -> None:
        """Replace the buffers by buffers of `capacity` tokens that begin with the live slots; frees each old one in turn.

        Callers count the new version, if any graph can have the addresses of the old ones."""
        for index in range(len(self.buffers)):
            self.buffers[index] = reallocated(self.buffers[index], self.slots, capacity, self.device)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> Pair:
        """Append K and V (batch, num_kv_heads, q_len, head_dim); return the K and V to attend to."""
        track = self.track
        step = track.step
        if step is not None and step.mode != EAGER:
            keys, values = self.kv
            self.append(step, KV(keys, values), key_states, value_states)
            return keys, values
        refuse_gradient(key_states, value_states)
        if step is not None and step.packed is not None:
            self.scatter(step.packed, key_states, value_states)
            return key_states, value_states
        q_len = key_states.shape[2]
        self.prepare(q_len, key_states, value_states)
        keys, values = self.kv
        start, old = self.slots, track.kind.sees(self.seen)
        stop = start + q_len
        if stop <= track.capacity:
            keys[:, :, start:stop].copy_(key_states)
            values[:, :, start:stop].copy_(value_states)
            self.seen += q_len
            return keys[:, :, start - old : stop], values[:, :, start - old : stop]
        keep = track.kept(self.seen + q_len)  # a sliding window, and more new tokens than its buffer has room for
        keys, values = slide(keys, key_states, start, old, keep), slide(values, value_states, start, old, keep)
        self.seen += q_len
        self.base = self.seen - keep
        return keys, values

    def append(self, step: Step, kv: KV, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Store the tokens of a captured step, at the slot that the device has counted."""
        from ..kernels.decode.append import append  # with Triton

        self.mark_written(step)
        if reason := self.why_other(key_states, value_states):
            raise RuntimeError(reason)
        append(kv, key_states, value_states, self.track.counts[:1], step.live(key_states.shape[2]))

    def why_other(self, *states: torch.Tensor) -> str | None:
        """Why these are not states of the model and the rows whose K and V it holds."""
        same = [*map(layout, self.kv)] == [*map(layout, states)]
        return None if same else f"layer {self.index} holds K and V of {describe(*self.kv)}"

    def append_all(self, kv: KV, key_states: torch.Tensor, value_states: torch.Tensor, first: int = 0) -> None:
        """Store tokens behind those that are seen, from the token `first` on."""
        from ..kernels.decode.append import append  # with Triton

        for begin in range(first, key_states.shape[2], AT_ONCE):
            keys, values = (x[:, :, begin : begin + AT_ONCE] for x in (key_states, value_states))
            append(kv, keys, values, torch.full((1,), self.seen + begin, device=self.device))

    def prepare(self, q_len: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Have buffers with room for `q_len` more tokens of this shape, (batch, num_kv_heads, any, head_dim)."""
        self.check(key_states, value_states)
        self.make_room(q_len)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.track.stale = True

    def scatter(self, packed: Packed, *states: torch.Tensor) -> None:
        """Store K and V (1, num_kv_heads, tokens, head_dim) of prompts that are read as one row where their rows have them. The
        slots of padding are zero: attention multiplies them by zero."""
        track, width = self.track, packed.width
        padded = [x.expand(packed.rows, -1, -1, -1) for x in states]
        self.prepare(width, *padded)
        keep = width if width <= track.capacity else track.kept(width)
        place = packed.place(self.device, keep)
        for buffer, x in zip(self.buffers, self.joined(*states), strict=True):
            buffer[:, :, :keep] = 0
            buffer.transpose(1, 2)[place] = x[0].transpose(0, 1)
            if packed.source is not None:
                selected(buffer, packed.source, keep)
        self.seen, self.base = width, width - keep
        packed.stored += 1

    def mark_written(self, step: Step) -> None:
        """Record that a captured step writes this layer. Raises RuntimeError if it has already, or if the layer lacks tokens."""
        running, mine = self.track.running, 1 << self.index
        if step.written & mine or not running & mine:
            why = "runs twice" if running & mine else "does not hold all tokens yet"
            raise RuntimeError(f"layer {self.index} {why}, and a graph counts one token for all its layers")
        step.written |= mine

    def make_room(self, q_len: int) -> None:
        """If `q_len` more tokens do not fit, grow the buffers or move a sliding window to the front of its buffer."""
        track, slot = self.track, self.seen - self.base
        if slot + q_len <= track.capacity:
            return
        if track.capacity < track.limit:
            if not track.growable:
                raise ValueError(
                    f"This cache holds {track.capacity} tokens and was made with grow=False; it has seen {self.seen} and is "
                    f"given {q_len} more. Make it with capacity={self.seen + q_len} or more, or leave grow=True."
                )
            track.grow(min(track.limit, round_up(slot + q_len)))
        keep = track.kept(self.seen)
        if slot + q_len > track.capacity >= keep + q_len:
            self.move(self.seen - keep)

    def check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Refuse states of another batch size, model or dtype. A layer without tokens drops its buffers instead."""
        if reason := self.why_half():
            raise ValueError(reason)
        held = self.pending or (self.kv if self.is_initialized else None)
        if held is None:
            return
        if (self.pending is not None or held[0].device == key_states.device) and all(
            layout(old) == layout(new) for old, new in zip(held, (key_states, value_states), strict=True)
        ):
            return
        if self.seen == 0:
            for layer in self.track.layers():
                if layer.seen == 0:
                    layer.clear()
            return
        if key_states.shape[0] != held[0].shape[0]:
            raise ValueError(f"This cache holds {held[0].shape[0]} rows, and it is given {key_states.shape[0]}. {CHANGE_ROWS}")
        described = [describe(*pair) for pair in (held, (key_states, value_states))]
        raise ValueError(f"This cache holds {described[0]}, and it is given {described[1]}: it belongs to another model.")

    def move(self, base: int) -> None:
        """Move the live tokens from position `base` on to the front of the buffer."""
        first, count = base - self.base, self.seen - base
        if self.pending is not None:
            keys, values = self.pending
            self.pending = keys[:, :, first : first + count], values[:, :, first : first + count]
        elif self.is_initialized and first:
            for buffer in self.buffers:
                moved = buffer[:, :, first : first + count]
                buffer[:, :, :count].copy_(moved.clone() if first < count else moved)
        self.base = base

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(slots that update() returns, position of the first of them)."""
        track = self.track
        mode = track.mode
        if mode == EAGER:
            old = track.kind.sees(self.seen)
            return old + query_length, self.seen - old
        slot, seen = track.image
        return track.capacity, seen - slot if mode == CAPTURED_WITH_MASK else 0

    def query_offset(self) -> int | torch.Tensor:
        """Position of the next token; in a graph without a mask its slot, on the device."""
        return self.track.counts[:1] if self.track.mode == CAPTURED else self.get_seq_length()

    def get_seq_length(self) -> int | torch.Tensor:  # type: ignore[override]  # Transformers' StaticLayer returns a tensor too
        track = self.track
        mode = track.mode
        if mode == EAGER:
            return self.seen
        return track.counts[1] if mode == CAPTURED else track.image[1]

    def get_max_length(self) -> int:
        if self.track.kind.window is not None:
            return self.track.kind.window
        return -1 if self.track.growable else self.track.capacity

    def reset(self) -> None:
        self.pending = None
        self.seen = self.base = 0
        self.track.stale = True

    def why_not_crop(self, tokens: int) -> str | None:
        if reason := self.why_half():
            return reason
        window, left = self.track.kind.window, max(0, self.seen - tokens)
        if window is not None and self.base > max(0, left - window + 1):
            return (
                f"A layer with a sliding window of {window} has kept {self.seen - self.base} of {self.seen} tokens, and "
                f"after removing {tokens} its window would begin before them. Remove at most {KEEP} at a time."
            )
        return None
