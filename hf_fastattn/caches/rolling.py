"""Cache "rolling": the first tokens of each row and the last, in constant memory (ring.py has the storage).

`update()` sees neither the mask nor the batch's padding. `begin()`, before the model's forward, does: it counts what is new and
makes the spans that the layers get in place of the mask.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import hf, masks
from .. import step as steps
from ..step import EAGER, Step
from ..streaming import Settings
from . import forward
from .ring import Ring
from .stored import Arguments, StoredCache


class RollingCache(StoredCache):
    """The first `sinks` tokens of every row and the last `window`, in constant memory: a `past_key_values` for unbounded
    generation.

    model: one that hf_fastattn.patch(model, "streaming", window=, sinks=) was given, whose numbers hold. Nothing is allocated
    before the first forward. get_seq_length() counts all tokens ever read, padding included.

    It takes left padding, prompts of any length, chunks of any size, several turns, beams, reset() and deepcopy. It refuses, in
    a sentence: a model that cannot read it, holes in the mask, gradients, offloading, rows or K/V shapes of another call or
    model, and to take back tokens once it has dropped any.
    """

    streams = True
    storage: Ring

    def __init__(self, model: hf.PreTrainedModel):
        _check_model(model)
        config = model.config.get_text_config(decoder=True)
        self._adopt(Ring(config.num_hidden_layers, Settings.of(config)))

    def __repr__(self) -> str:
        ring = self.storage
        return (
            f"RollingCache({len(self.layers)} layers, {ring.sinks} sinks and a window of {ring.window}, {ring.seen} tokens read)"
        )

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Tokens read so far, those that are being read included."""
        return self.storage.seen

    def begin(self, step: Step, model: hf.PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Count the new tokens and make their spans.

        One token gets them in place of its mask: nothing can be hidden from the last token of all. More leave the mask to the
        model, which asks for what it wants, and gets the spans from our mask function.
        """
        _check_model(model)
        if len(args) > 1:
            raise TypeError("Pass everything but input_ids by keyword to a model with a RollingCache.")
        ring = self.storage
        config = model.config.get_text_config(decoder=True)
        settings = Settings.of(config)
        if (settings.window, settings.sinks, config.num_hidden_layers) != (ring.window, ring.sinks, len(ring.layers)):
            raise ValueError(
                f"{self} was made for another model or other settings than this one's: {settings.sinks} sinks and a window of "
                f"{settings.window}."
            )
        ids = args[0] if args else kwargs.get("input_ids")
        ids = kwargs["inputs_embeds"] if ids is None else ids
        rows, q_len = ids.shape[:2]
        if q_len > 1:
            _check_positions(model, kwargs)
        pads = _new_pads(self, kwargs.get("attention_mask"), q_len)
        kv_len = ring.layers[0].get_mask_sizes(q_len)[0]
        fresh = step.mode == EAGER and not ring.seen and q_len > 1 and pads is None
        spans = ring.begin(step, rows, q_len, pads, ids.device)
        mask = masks.of_spans(spans, (rows, q_len, kv_len), (model.config._attn_implementation, type(model).__name__), fresh)
        given = kwargs.get("position_ids")
        positions = ring.positions(q_len) if given is None else given
        if settings.clamped:
            positions = positions.clamp(max=config.max_position_embeddings - 1)
        if q_len > 1:
            step.mask = mask
            return args, {**kwargs, "position_ids": positions}
        return args, {**kwargs, "attention_mask": mask, "position_ids": positions}

    def vet(self, mask: torch.Tensor | None, tokens: int = 0, takes_back: bool = False) -> None:
        """Raise ValueError for what a call will need and cannot have; synchronizes with the device.

        mask: 2-D, with padding on the left alone; the parts of it that later forwards are given are not checked again.
        takes_back: the call crops as it goes, up to `tokens` tokens in all.
        """
        width, zeros = 0, False
        if mask is not None and mask.dim() == 2:
            width = mask.shape[1]
            holes, zeros = torch.stack([(mask[:, 1:] < mask[:, :-1]).any(), (mask == 0).any()]).tolist()
            if holes:
                raise ValueError(
                    "A rolling cache discards left padding, and this attention_mask has zeros behind ones (holes, or padding on "
                    'the right). Pad on the left (tokenizer.padding_side = "left"), or use another backend.'
                )
        if takes_back and tokens > self.storage.capacity:
            raise ValueError(
                f"Assisted generation takes tokens back, and a rolling cache of {self.storage.capacity} tokens cannot give back "
                f"what it dropped; this call may come to {tokens}. Generate without assistant or prompt lookup."
            )
        self.storage.vetted, self.storage.padded = width, zeros

    def reset(self) -> None:
        """Forget all tokens; the buffers stay where they are."""
        self.storage.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens (a negative number, as in Transformers; 0 does nothing)."""
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding has it in a tensor
        ring = self.storage
        if tokens_to_remove > 0:
            raise ValueError(f"crop() takes the negative number of tokens to take back; got {tokens_to_remove}.")
        if -tokens_to_remove > ring.seen:
            raise ValueError(f"This cache has read {ring.seen} tokens; {-tokens_to_remove} cannot be taken back.")
        if tokens_to_remove and ring.seen > ring.capacity:
            raise ValueError(
                f"This cache keeps {ring.capacity} of {ring.seen} tokens, and the tokens that would re-enter the window after "
                f"taking back {-tokens_to_remove} are gone. Take tokens back only while nothing is dropped."
            )
        if tokens_to_remove:
            ring.counts.add_(tokens_to_remove).clamp_(min=0)
            ring.seen += tokens_to_remove
            ring.vetted = min(ring.vetted, ring.seen)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.storage.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, in place of it."""
        self.batch_select_indices(torch.arange(self.storage.rows or 0).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep rows `indices` (int64, or bool with one entry per row), in this order."""
        self.storage.select(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)


def _check_model(model: hf.PreTrainedModel) -> None:
    name = model.config._attn_implementation
    if not forward.streams(model):
        raise ValueError(
            f"{type(model).__name__} runs attn_implementation={name!r}, which cannot read a RollingCache; use "
            'hf_fastattn.patch(model, "streaming", window=4096, sinks=4).'
        )
    if not forward.follows(model):
        raise ValueError(
            f"A RollingCache must be given the padding before {type(model).__name__} runs; use "
            'hf_fastattn.patch(model, "streaming", window=4096, sinks=4), which sees to that.'
        )


def _check_positions(model: hf.PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Raise ValueError for positions in sections that differ: how far a window has moved is then not one number."""
    if not hf.has_sections(model.config):
        return
    given = kwargs.get("position_ids")
    if given is None:
        differ = any(isinstance(kwargs.get(name), torch.Tensor) for name in hf.GRIDS)
    else:
        differ = given.dim() == 3 and bool((given != given[:1]).any())
    if differ:
        raise ValueError(
            f"{type(model).__name__} counts the positions of images and videos in three sections, by which a RollingCache cannot "
            "move its window. Give it text alone, or use another backend."
        )


def _new_pads(cache: RollingCache, mask: object, q_len: int) -> torch.Tensor | None:
    """How many of each row's new tokens are padding, on the device."""
    ring = cache.storage
    if mask is None or steps.mode(ring) != EAGER:
        return None
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        raise ValueError(
            "A RollingCache takes a 2-D attention_mask, (rows, all tokens so far), from which it makes its own mask."
        )
    if mask.shape[1] != ring.seen + q_len:
        raise ValueError(
            f"attention_mask covers {mask.shape[1]} tokens; this cache has read {ring.seen} and is given {q_len} more."
        )
    if q_len > 1 and mask.shape[1] > ring.vetted:
        cache.vet(mask)
    if mask.shape[1] <= ring.vetted and not ring.padded:
        return None
    return (mask[:, -q_len:] == 0).sum(1)
