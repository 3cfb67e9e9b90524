"""Cache "rolling": the first and the last tokens of each row, in constant memory (ring.py has the storage).

`update()` receives neither the mask nor the padding of the batch. `begin()` runs before the model's forward and receives both: it
counts the new tokens and builds the spans that replace the mask.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import hf
from ..attention import masks
from ..attention import step as steps
from ..attention.step import EAGER, Step
from ..streaming import Settings, has_frequencies
from . import forward
from .ring import Ring
from .stored import Arguments, ChangeableCache


class RollingCache(ChangeableCache):
    """The first `sinks` and the last `window` tokens of every row, in constant memory: a `cache` (before Transformers 5.24:
    `past_key_values`) for unbounded generation.

    model: a model patched with hf_fastattn.patch(model, "streaming", window=, sinks=), whose settings apply. Nothing is allocated
    before the first forward. get_seq_length() counts all tokens ever read, including padding.

    It supports left padding, prompts of any length, chunks of any size, several turns, beams, reset() and deepcopy. It raises an
    error for a model that cannot read it, for holes in the mask, gradients, offloading, another batch size or K/V shape, and for
    crop() of several tokens after others have been dropped. Then only the last token can be removed, once after each new one, or
    all tokens except sinks. A generate() that ends at an end-of-text token may itself have removed the last token.

    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2024), section 3.2.
    """

    streams = True
    storage: Ring

    def __init__(self, model: hf.PreTrainedModel):
        _check_model(model)
        hf.refuse_states(model.config, "A rolling cache needs", 'Use attn_implementation="lean" and a PreallocatedCache.')
        config = model.config.get_text_config(decoder=True)
        self._adopt(Ring(config.num_hidden_layers, Settings.of(config)))

    def __repr__(self) -> str:
        ring = self.storage
        return (
            f"RollingCache({len(self.layers)} layers, {ring.sinks} sinks and a window of {ring.window}, {ring.seen} tokens read)"
        )

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Number of tokens read so far, including those of the current forward."""
        return self.storage.seen

    def begin(self, step: Step, model: hf.PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Count the new tokens and build their spans.

        A single token gets the spans as its mask, because a causal mask hides nothing from the last token. For several tokens the
        model requests its mask, and the mask function of the backend returns the spans.
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
        ring.endless = settings.clamped or has_frequencies(model)
        ids = args[0] if args else kwargs.get("input_ids")
        ids = kwargs["inputs_embeds"] if ids is None else ids
        rows, q_len = ids.shape[:2]
        if q_len > 1:
            _check_positions(model, kwargs)
        pads = _new_pads(self, kwargs.get("attention_mask"), q_len)
        kv_len = ring.layers[0].get_mask_sizes(q_len)[0]
        spans = ring.begin(step, rows, q_len, pads, ids.device)
        mask = masks.of_spans(spans, (rows, q_len, kv_len), (model.config._attn_implementation, type(model).__name__))
        given = kwargs.get("position_ids")
        positions = ring.positions(q_len) if given is None else given
        if settings.clamped:
            positions = positions.clamp(max=config.max_position_embeddings - 1)
        if q_len > 1:
            step.mask = mask
            return args, {**kwargs, "position_ids": positions}
        return args, {**kwargs, "attention_mask": mask, "position_ids": positions}

    def end(self, step: Step, output: Any) -> None:
        ring = self.storage
        if step.mode != EAGER or not step.q_len:
            return
        if ring.written is None:
            ring.written = (1 << len(ring.layers)) - 1 if output is None else step.written
        ring.cut_short = ring.cut_short or step.written != ring.written

    def check_call(self, mask: torch.Tensor | None, tokens: int = 0, crops: bool = False) -> None:
        """Raise ValueError if the cache cannot serve this call of generate(). Synchronises with the device.

        mask: 2-D, with padding only on the left. Later forwards, which get parts of it, do not check it again.
        crops: whether the call crops the cache. tokens: the most tokens that it reaches.
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
        if crops and tokens > self.storage.capacity:
            raise ValueError(
                f"Assisted generation removes several tokens, and a rolling cache of {self.storage.capacity} tokens cannot "
                f"restore dropped tokens; this call may reach {tokens}. Generate without assistant or prompt lookup."
            )
        self.storage.checked, self.storage.padded = width, zeros


def _check_model(model: hf.PreTrainedModel) -> None:
    name = model.config._attn_implementation
    if not forward.streams(model):
        raise ValueError(
            f"{type(model).__name__} runs attn_implementation={name!r}, which cannot read a RollingCache; use "
            'hf_fastattn.patch(model, "streaming", window=4096, sinks=4).'
        )
    if not forward.has_hooks(model):
        raise ValueError(
            f"A RollingCache needs the padding before {type(model).__name__} runs; use "
            'hf_fastattn.patch(model, "streaming", window=4096, sinks=4), which adds the hook for it.'
        )


def _check_positions(model: hf.PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Raise ValueError for positions whose sections differ: the offset of the window is then not a single number."""
    if not hf.has_sections(model.config):
        return
    given = kwargs.get("position_ids")
    if given is None:
        differ = any(isinstance(kwargs.get(name), torch.Tensor) for name in hf.GRIDS)
    else:
        differ = given.dim() == 3 and bool((given != given[:1]).any())
    if differ:
        raise ValueError(
            f"{type(model).__name__} counts the positions of images and videos in three sections, which a RollingCache does not "
            "support. Pass only text, or use another backend."
        )


def _new_pads(cache: RollingCache, mask: object, q_len: int) -> torch.Tensor | None:
    """The number of padding tokens among the new tokens of each row, on the device."""
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
    if q_len > 1 and mask.shape[1] > ring.checked:
        cache.check_call(mask)
    if mask.shape[1] <= ring.checked and not ring.padded:
        return None
    return (mask[:, -q_len:] == 0).sum(1)
