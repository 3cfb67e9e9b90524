"""A preallocated cache whose layers of full attention store K and V in 8 bits (`kernels.eight_bits`).

The first tokens of a text attend to K and V as the model computes them, and are stored afterwards. Later tokens attend to what is
stored: for up to 64 query rows of a KV head the kernels read the 8 bits, for more, as those of a long message, K and V are first
written out in the model's dtype. So are they for attention of other code. Layers with a sliding window are small, and have none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import hf
from ..attention.step import EAGER, Step
from ..hf import Kind
from ..kernels import eight_bits
from ..kernels.spec import KV
from . import states
from .buffers import UNKNOWN, Pair, Part, cast, selected
from .layers import Layer, Track
from .storage import PreallocatedStorage


class ByteLayer(Layer):
    """Codes of K and V, (batch, num_kv_heads, capacity, head_dim) in uint8, and the scales of both, (batch, num_kv_heads,
    capacity, 1) in int32.

    centre: of K, (batch, num_kv_heads, 1, head_dim) in the model's dtype: the mean of the first tokens without padding, until
    reset().
    """

    names = ("keys", "values", "scales")
    centre: torch.Tensor
    loaded: tuple[torch.Tensor, ...] = ()  # what a file has for the buffers, until the first forward; `pending` is without tokens

    def __init__(self, index: int, track: Track, kv_dtype: str):
        super().__init__(index, track)
        self.kv_dtype: str = kv_dtype

    def load(self, keys: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, centre: torch.Tensor) -> None:
        """Hold the tokens of another layer, as they are stored there."""
        self.loaded, self.centre, self.seen = (keys, values, scales), centre, keys.shape[2]
        self.pending = centre[:, :, :0], centre.new_empty(*values.shape[:2], 0, values.shape[3])

    def joined(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.pending is not None:
            return self.loaded
        *codes, scales = eight_bits.empty(keys, values)
        return *codes, scales[..., None]

    @property
    def kv(self) -> Pair:
        """Tensors without tokens, of the layout that update() takes."""
        values = self.buffers[1]
        return self.centre[:, :, :0], self.centre.new_empty(*values.shape[:2], 0, values.shape[3])

    def stored(self, tokens: int) -> KV:
        """The first slots."""
        keys, values, scales = (x[:, :, :tokens] for x in self.buffers or self.loaded)
        return eight_bits.eight_bits(keys, values, scales[..., 0], self.centre[:, :, 0], self.kv_dtype)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, heads, _, head_dim = key_states.shape  # of any number of tokens, none too
        held = self.centre if self.pending is not None else key_states.new_zeros(batch, heads, 1, head_dim)
        super().lazy_initialization(key_states, value_states)
        self.loaded = ()
        with torch.inference_mode(False):
            self.centre = held.to(self.device, copy=True)

    def reset(self) -> None:
        super().reset()
        self.loaded = ()

    def parts(self) -> list[Part]:
        found = super().parts()
        return [*found, Part(self.centre, self.index, "centre", 1)] if found else found

    def movable(self) -> list[tuple[torch.Tensor, int | None]]:
        """All as bytes in the width of K, which one kernel permutes."""
        return [self._in_bytes(part.tensor, part.slots or 0) for part in self.parts()]

    def _in_bytes(self, x: torch.Tensor, slots: int) -> tuple[torch.Tensor, int]:
        of_slot, width = x.shape[3] * x.element_size(), self.buffers[0].shape[3]
        if x.shape[2] * of_slot % width:
            return x, slots
        return x.view(torch.uint8).view(*x.shape[:2], -1, width), -(-slots * of_slot // width)

    def select(self, indices: torch.Tensor) -> None:
        if self.pending is not None:
            *held, centre = (x[indices.to(x.device)] for x in (*self.live(), self.centre))
            self.load(*held, centre)  # type: ignore[call-arg]
        if not self.buffers:
            return
        if len(indices) != self.batch_size:
            self.moved()
        *self.buffers, self.centre = (selected(part.tensor, indices, part.slots) for part in self.parts())

    def shown(self, index: int) -> torch.Tensor | None:
        """A copy: what is stored are 8 bits."""
        if self.track.mode != EAGER:
            return UNKNOWN
        held = self.buffers or self.pending is not None
        return eight_bits.widened(self.stored(self.slots), self.centre.dtype).plain()[index] if held else None

    def replace(self, index: int, old: torch.Tensor, new: torch.Tensor) -> None:
        raise ValueError(
            f"K and V that are stored in 8 bits (kv_dtype={self.kv_dtype!r}) cannot be replaced: they would be rounded twice. "
            "Leave out kv_dtype=."
        )

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> Pair:
        track, q_len = self.track, key_states.shape[2]
        key_states, value_states = cast(key_states, value_states)  # a layer has one dtype
        step = track.step
        if step is not None and step.mode != EAGER:
            kv = self.stored(track.capacity)
            self.append(step, kv, key_states, value_states)
            return self._given(kv, step)
        self.prepare(q_len, key_states, value_states)
        first, whole = self.seen == 0, self.stored(track.capacity)
        if first:
            self.centre.copy_(_mean(key_states, None if step is None else step.plan))
        self.append_all(whole, key_states, value_states)
        self.seen += q_len
        return (key_states, value_states) if first else self._given(self.stored(self.seen), step)

    def _given(self, kv: KV, step: Step | None) -> Pair:
        """K and V for attention: as they are stored, if it is of this package; otherwise written out."""
        if step is not None and self.finds_kv(step):
            step.kv = kv
            return kv.k, kv.v
        if not torch.compiler.is_compiling():
            hf.warn_once(
                f"K and V in 8 bits (kv_dtype={self.kv_dtype!r}) are written out in {self.centre.dtype} in each step: attention "
                "that does not belong to a patched model reads them. Call hf_fastattn.patch(model), or leave out kv_dtype=."
            )
        return eight_bits.widened(kv, self.centre.dtype).plain()


def _mean(x: torch.Tensor, mask: object) -> torch.Tensor:
    """The mean of x (batch, heads, tokens, width) over tokens, (batch, heads, 1, width): of those in the mask, if it is 2-D."""
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or len(mask) != len(x) or mask.shape[1] < x.shape[2]:
        return x.mean(2, keepdim=True, dtype=torch.float32)
    live = (mask[:, None, : x.shape[2], None] != 0).to(x.device)
    return x.where(live, 0.0).sum(2, keepdim=True, dtype=torch.float32) / live.sum(2, keepdim=True).clamp(min=1)


class CodedStorage(PreallocatedStorage):  # torch.load takes a class ByteStorage for one of torch
    """The layers of one cache, in 8 bits those without a sliding window."""

    kv_dtype: str
    takes_prompts = takes_packed = False  # a graph cannot tell the first tokens, which set the centre, from others

    def __init__(self, kinds: Sequence[Kind], capacity: int, kv_dtype: str, growable: bool = True):
        self.kv_dtype = kv_dtype
        super().__init__(kinds, capacity, growable)

    def ahead(self, tokens: int) -> int:
        return tokens  # a graph of many tokens writes all slots out in 16 bits

    def make_layer(self, index: int, track: Track) -> Layer:
        return super().make_layer(index, track) if track.kind.window else ByteLayer(index, track, self.kv_dtype)


def storage_of(kinds: Sequence[Kind], capacity: int, kv_dtype: str | None, growable: bool = True) -> PreallocatedStorage:
    """The storage of a preallocated cache. kv_dtype: None for K and V as the model computes them."""
    return states.storage_of(kinds, capacity, growable) if kv_dtype is None else CodedStorage(kinds, capacity, kv_dtype, growable)


def why_not(kv_dtype: object, model: hf.PreTrainedModel | hf.PreTrainedConfig) -> str | None:
    """Why the layers of a model cannot store K and V in this dtype; None if they can."""
    if kv_dtype is None:
        return None
    if not isinstance(kv_dtype, str) or kv_dtype not in eight_bits.KV_DTYPES:
        return f'kv_dtype must be "int8", "fp8" or None; got {kv_dtype!r}.'
    config = model if isinstance(model, hf.PreTrainedConfig) else model.config
    kinds, reason = {kind.name for kind in hf.layer_kinds(config)}, None
    if hf.is_shared(model):
        reason = "for a model on one rank, and ranks share this one"
    elif not kinds <= {"full", "window"}:
        reason = "for layers that all have K and V, and no recurrent states; this model has others"
    elif hf.has_latents(config):
        reason = "for K and V that attention reads as they are cached, and this model caches latents (MLA)"
    elif hf.changes_cached(config):
        reason = "for K and V that attention reads as they are cached, and the code of this model changes them"
    elif "full" not in kinds:
        reason = "for layers that keep all tokens, and each layer of this model has a sliding window"
    elif wide := [s for s in hf.layer_shapes(config) if s.head_dim > 256 or s.head_dim % 2 or s.value_dim % 2]:
        reason = f"for an even head_dim up to 256; got {wide[0].head_dim} and {wide[0].value_dim}"
    return None if reason is None else f"kv_dtype={kv_dtype!r} is {reason}. Leave out kv_dtype=."
