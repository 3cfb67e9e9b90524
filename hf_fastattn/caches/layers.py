"""The storage of a preallocated cache: K and V of each layer in one buffer, and where in it the tokens stand.

A layer's buffer is (batch, num_kv_heads, capacity, head_dim). Layers alike (all full, or all of one sliding window) share a
Track, which counts the tokens on the host and mirrors the count in two integers on the device.

Outside a decode graph the host's count is enough: a layer writes a slice and returns the slice of what is live, so masks,
padding and stock attention see what a DynamicCache would show them, without its copy of everything on every token.
Inside a decode graph nothing may depend on the host: a layer writes at the device's slot and returns its whole buffer, and
spans made from the device's count say what is live.

A sliding layer keeps its last tokens in order, in a buffer a little larger than its window. A token is one write; when the buffer
is full the window moves to its front, once every SLACK tokens, between two forwards. So slots stay in order of position, and
padding, holes and taking tokens back work as in a full layer, which they would not in a ring that wraps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..compat import CacheLayerMixin
from ..kernels.append import append

STEP = 256  # tokens; capacities are multiples of it, and of an eighth of their size
KEEP = 128  # tokens older than its window that a sliding layer keeps when it moves, so that as many can be taken back
SLACK = 512  # tokens a sliding layer takes between two moves

CHANGE_ROWS = (
    "Use a cache per batch size, or batch_repeat_interleave() or batch_select_indices() to change its rows "
    "(num_return_sequences=n needs n per row)."
)

EAGER, CAPTURED, CAPTURED_WITH_MASK = "eager", "captured", "captured with mask"


def round_up(tokens: int) -> int:
    """A capacity for this many tokens: the next multiple of STEP, or of an eighth of the power of two below if that is more."""
    step = max(STEP, (1 << max(tokens, 1).bit_length() - 1) // 8)
    return -(-max(tokens, 1) // step) * step


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a GPU, those torch holds unused included; None where nobody knows (CPU)."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class Track:
    """Where the tokens of alike layers stand: slot j of a buffer holds position base + j, slots below seen - base are live."""

    def __init__(self, window: int | None, capacity: int, growable: bool):
        self.window = window
        self.growable = growable
        self.capacity = min(capacity, self.limit)
        self.layers: list[Layer] = []
        self.seen = self.base = self.start = 0
        self.mode = EAGER
        self.version = 0  # counts the times a buffer moved in memory
        self.last = -1  # index of the layer that wrote last: one not after it begins a new forward
        self.counts: torch.Tensor | None = None  # int64 (2,) on the device: the slot of the next token, and tokens seen
        self.image: tuple[int, int] | None = None  # what `counts` holds
        self.relieve: Callable[[], None] | None = None  # frees what it can when memory is short

    def __getstate__(self) -> dict:
        return {**vars(self), "relieve": None, "counts": None, "image": None}  # a copy is nobody's and in no graph

    @property
    def limit(self) -> int:
        """The largest capacity that is of use."""
        return 1 << 62 if self.window is None else self.window - 1 + KEEP + SLACK

    @property
    def old(self) -> int:
        """How many tokens before it the next token sees."""
        return self.seen if self.window is None else min(self.seen, self.window - 1)

    def begin(self, index: int, q_len: int) -> None:
        """Called by each layer in turn; the first of a forward makes room and moves the counts on for all."""
        if index <= self.last:
            self.make_room(q_len)
            self.start = self.seen - self.base
            self.seen += q_len
            if self.start + q_len > self.capacity:  # a sliding window given more at once than its buffer holds
                self.base = self.seen - min(self.seen, self.window - 1 + KEEP)
        self.last = index

    def make_room(self, q_len: int) -> None:
        """Grow the buffers, or move a sliding window to their front, where `q_len` more tokens would not fit."""
        slot = self.seen - self.base
        if slot + q_len <= self.capacity:
            return
        if self.capacity < self.limit:
            if not self.growable:
                raise ValueError(
                    f"This cache holds {self.capacity} tokens and was made with grow=False; it has seen {self.seen} and is given "
                    f"{q_len} more. Make it with capacity={self.seen + q_len} or more, or leave grow=True."
                )
            self.grow(min(self.limit, round_up(slot + q_len)))
        keep = min(self.seen, self.window - 1 + KEEP) if self.window is not None else slot
        if slot + q_len > self.capacity >= keep + q_len:
            for layer in self.layers:
                layer.move(slot - keep, keep)
            self.base = self.seen - keep

    def grow(self, capacity: int) -> None:
        """Give every layer a buffer of `capacity` tokens. Raises MemoryError, before allocating, where it does not fit."""
        made = [layer for layer in self.layers if layer.is_initialized]
        for device in {layer.device for layer in made}:
            bytes_per_token = sum(layer.bytes_per_token for layer in made if layer.device == device)
            # The old buffers go one by one as the new ones come.
            self.refuse_unless_fits(capacity, bytes_per_token, device, held=self.capacity * bytes_per_token)
        live = self.seen - self.base
        self.capacity = capacity
        self.version += 1
        for layer in made:
            layer.reallocate(live)

    def refuse_unless_fits(self, tokens: int, bytes_per_token: int, device: torch.device, held: int = 0) -> None:
        """Raise MemoryError if buffers of `tokens` do not fit beside everything but the `held` bytes they replace."""
        needed = tokens * bytes_per_token
        free = free_bytes(device)
        if free is not None and needed > free + held and self.relieve is not None:
            self.relieve()
            free = free_bytes(device)
        if free is not None and needed > free + held:
            raise MemoryError(
                f"A cache of {tokens} tokens needs {needed} bytes ({needed / 2**30:.2f} GiB) on {device}, and {free + held} "
                f"({(free + held) / 2**30:.2f} GiB) are free. Ask for fewer new tokens, fewer rows or a shorter prompt."
            )

    def get_mask_sizes(self, q_len: int) -> tuple[int, int]:
        """(slots that update() returns, position of the first of them)."""
        if self.mode == EAGER:
            return self.old + q_len, self.seen - self.old
        return self.capacity, self.base if self.mode == CAPTURED_WITH_MASK else 0

    def query_offset(self) -> int | torch.Tensor:
        """Position of the next token; in a graph its slot, on the device, where the window is all that hides a slot."""
        return self.counts[:1] if self.mode == CAPTURED else self.seen

    def seq_length(self) -> int | torch.Tensor:
        return self.counts[1] if self.mode == CAPTURED else self.seen

    def sync(self, device: torch.device) -> None:
        """Write the host's counts to the device if they differ, without waiting for it."""
        wanted = (self.seen - self.base, self.seen)
        if self.counts is None or self.counts.device != device:
            with torch.inference_mode(False):
                self.counts = torch.zeros(2, dtype=torch.int64, device=device)
            self.version += 1
            self.image = (0, 0)
        if self.image != wanted:
            self.counts[0].fill_(wanted[0])
            self.counts[1].fill_(wanted[1])
            self.image = wanted

    def advance(self) -> None:
        """Count on the host the token that a graph has written."""
        self.seen += 1
        slot, seen = self.image
        self.image = (slot + 1, seen + 1)

    def why_not_crop(self, tokens: int) -> str | None:
        if tokens > self.seen:
            return f"This cache holds {self.seen} tokens; {tokens} cannot be taken back."
        left = self.seen - tokens
        if self.window is not None and self.base > max(0, left - self.window + 1):
            return (
                f"A layer with a sliding window of {self.window} has kept {self.seen - self.base} of {self.seen} tokens, and "
                f"after taking back {tokens} its window would begin before them. Take back at most {KEEP} at a time."
            )
        return None

    def reset(self) -> None:
        self.seen = self.base = self.start = 0
        self.last = self.layers[-1].index


class Layer(CacheLayerMixin):
    """K and V of one layer, (batch, num_kv_heads, capacity, head_dim) each."""

    is_compileable = False  # else generate() would start torch.compile unasked; decode graphs do not ask this
    is_croppable = True

    def __init__(self, index: int, track: Track):
        super().__init__()
        self.index = index
        self.track = track
        self.is_sliding = track.window is not None
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None  # loaded, and not yet on the device
        track.layers.append(self)
        track.last = index  # so that the first layer begins the first forward

    @property
    def bytes_per_token(self) -> int:
        return sum(t.shape[0] * t.shape[1] * t.shape[3] * t.element_size() for t in (self.keys, self.values))

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for states like these, (batch, num_kv_heads, any, head_dim)."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size = key_states.shape[0]
        self.is_initialized = True
        self.keys, self.values = self.pending or (key_states[:, :, :0], value_states[:, :, :0])
        self.pending = None
        # Refuse before the first layer what the last would not find room for; on several devices nobody knows where it will be.
        to_come = sum(not layer.is_initialized for layer in self.track.layers) if torch.cuda.device_count() == 1 else 0
        self.track.refuse_unless_fits(self.track.capacity, (1 + to_come) * self.bytes_per_token, self.device)
        self.reallocate(self.keys.shape[2])

    def reallocate(self, live: int) -> None:
        """New buffers of the track's capacity that begin with the first `live` slots of the old ones."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            # Normal tensors, so that a cache made under inference_mode can be used outside it. Zeros, so that what was never
            # written is finite: a dense mask hides it by multiplying with 0.
            with torch.inference_mode(False), torch.no_grad():
                shape = (old.shape[0], old.shape[1], self.track.capacity, old.shape[3])
                new = torch.zeros(shape, dtype=self.dtype, device=self.device)
                new[:, :, :live].copy_(old[:, :, :live])
            setattr(self, name, new)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (batch, num_kv_heads, q_len, head_dim) K and V behind what is there; return the K and V to attend to."""
        track = self.track
        if track.mode != EAGER:
            append(self.keys, self.values, key_states, value_states, track.counts[:1])
            return self.keys, self.values
        if key_states.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "A preallocated cache is written in place and carries no gradient. Run under torch.no_grad(), or pass "
                "use_cache=False."
            )
        self.check(key_states, value_states)
        q_len = key_states.shape[2]
        track.begin(self.index, q_len)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, stop = track.start, track.start + q_len
        old = track.seen - q_len if track.window is None else min(track.seen - q_len, track.window - 1)
        if stop <= track.capacity:
            self.keys[:, :, start:stop].copy_(key_states)
            self.values[:, :, start:stop].copy_(value_states)
            return self.keys[:, :, start - old : stop], self.values[:, :, start - old : stop]
        keep = track.seen - track.base
        return tuple(
            _slide(buffer, states, start, old, keep) for buffer, states in ((self.keys, key_states), (self.values, value_states))
        )

    def check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Refuse states of another batch, model or dtype; an empty cache forgets its buffers and fits itself to them instead."""
        held = self.pending or ((self.keys, self.values) if self.is_initialized else None)
        if held is None:
            return
        if (self.pending is not None or held[0].device == key_states.device) and all(
            _kind(old) == _kind(new) for old, new in zip(held, (key_states, value_states), strict=True)
        ):
            return
        begun = self.index > self.track.last  # by an earlier layer in this forward
        if self.track.seen == (key_states.shape[2] if begun else 0):
            self.is_initialized, self.keys, self.values, self.pending = False, None, None, None
            self.track.version += 1
            return
        if key_states.shape[0] != held[0].shape[0]:
            raise ValueError(f"This cache holds {held[0].shape[0]} rows, and it is given {key_states.shape[0]}. {CHANGE_ROWS}")
        described = [f"{t.shape[1]} KV heads of {t.shape[3]} in {t.dtype} on {t.device}" for t in (held[0], key_states)]
        raise ValueError(f"This cache holds {described[0]}, and it is given {described[1]}: it belongs to another model.")

    def move(self, first: int, count: int) -> None:
        """Move `count` slots from `first` to the front."""
        if self.pending is not None:
            self.pending = tuple(t[:, :, first : first + count] for t in self.pending)
        elif self.is_initialized and first:
            for buffer in (self.keys, self.values):
                moved = buffer[:, :, first : first + count]
                buffer[:, :, :count].copy_(moved.clone() if first < count else moved)

    def live(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the live slots of K and V, oldest first."""
        count = self.track.seen - self.track.base
        keys, values = self.pending or (self.keys, self.values)
        return keys[:, :, :count], values[:, :, :count]

    def select(self, indices: torch.Tensor) -> None:
        """Rows `indices` become the rows of the cache, in place if their number stays."""
        if self.pending is not None:
            self.pending = tuple(t[indices.to(t.device)] for t in self.pending)
        elif self.is_initialized:
            rows = [t.index_select(0, indices.to(t.device)) for t in self.live()]
            if len(indices) == self.batch_size:
                for view, new in zip(self.live(), rows, strict=True):
                    view.copy_(new)
            else:
                self.keys, self.values = rows
                self.batch_size = len(indices)
                self.reallocate(rows[0].shape[2])
                self.track.version += 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.track.get_mask_sizes(query_length)

    def get_seq_length(self) -> int | torch.Tensor:
        return self.track.seq_length()

    def get_max_length(self) -> int:
        if self.track.window is not None:
            return self.track.window
        return -1 if self.track.growable else self.track.capacity

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.select(beam_idx)

    def reset(self) -> None:
        self.pending = None
        self.track.reset()

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("Layers of a preallocated cache share their count; call crop() of the cache, not of a layer.")

    def offload(self) -> None:
        raise NotImplementedError(
            "A preallocated cache stays where it was allocated and cannot be offloaded; use a DynamicCache with offloading=True."
        )

    prefetch = offload


def _kind(states: torch.Tensor) -> tuple:
    return *states.shape[:2], states.shape[3], states.dtype


def _slide(buffer: torch.Tensor, states: torch.Tensor, start: int, old: int, keep: int) -> torch.Tensor:
    """The `old` tokens before slot `start` and the new ones, in one tensor; the buffer then begins with the last `keep`."""
    kept = min(start, max(old, keep - states.shape[2]))
    tokens = torch.cat([buffer[:, :, start - kept : start], states], 2) if kept else states
    buffer[:, :, :keep].copy_(tokens[:, :, tokens.shape[2] - keep :])
    return tokens[:, :, kept - old :]


class Storage:
    """The layers and tracks of one cache. They may outlive it: the next cache of the same shape finds everything where it was."""

    def __init__(self, windows: list[int | None], capacity: int, growable: bool = True):
        self.tracks = [Track(window, capacity, growable) for window in dict.fromkeys(windows)]
        by_window = {track.window: track for track in self.tracks}
        self.layers = [Layer(index, by_window[window]) for index, window in enumerate(windows)]

    @property
    def rows(self) -> int | None:
        """Rows of the batch, None while nothing is allocated."""
        layer = self.layers[0]
        return layer.batch_size if layer.is_initialized else None

    @property
    def version(self) -> int:
        """Changes whenever a buffer moves in memory."""
        return sum(track.version for track in self.tracks)

    @property
    def capacity(self) -> int:
        return sum(track.capacity for track in self.tracks)

    @property
    def keeps_all(self) -> bool:
        """Whether token n is in slot n: nothing is dropped."""
        return all(track.window is None for track in self.tracks)

    def holds(self, tokens: int) -> bool:
        """Whether this many tokens fit as it is."""
        return all(track.capacity >= min(tokens, track.limit) for track in self.tracks)

    def relieve_with(self, free: Callable[[], None]) -> None:
        """Call `free` when memory is short."""
        for track in self.tracks:
            track.relieve = free

    def make_room(self, q_len: int) -> None:
        for track in self.tracks:
            track.make_room(q_len)

    def reset(self) -> None:
        for layer in self.layers:
            layer.reset()

    # What a decode graph asks of a storage, besides `version`.

    takes_mask = True  # padded rows have a graph of their own, which reads their mask
    variant = None  # nothing else decides what is captured

    def set_mode(self, mode: str) -> None:
        for track in self.tracks:
            track.mode = mode

    def sync(self, device: torch.device) -> None:
        """Have the host's counts on the device, and room for one token more."""
        self.make_room(1)
        for track in self.tracks:
            track.sync(device)

    def step(self) -> None:
        """Count on the device the token that a forward has written; captured with it."""
        for track in self.tracks:
            track.counts.add_(1)

    def advance(self) -> None:
        """Count it on the host."""
        for track in self.tracks:
            track.advance()

    def mark(self) -> None:
        """What `rewind` needs to take back the first step of a graph."""

    def rewind(self, mark: None) -> None:
        """After a step that failed: the host's counts hold, and what the device holds is unknown."""
        for track in self.tracks:
            track.image = None
