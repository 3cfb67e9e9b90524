"""Cache "paged": K and V of every token in pages, for generate(). Rows that begin alike share the pages of their beginning.

The token at position n of a row is in slot n % P of its page n // P, and all rows have as many tokens, of which some may be
padding, as in a PreallocatedCache. A page belongs to the rows whose tables name it, and a row writes to a page that it has alone:
the last page of rows that part ways is copied, and those before it are not. Pages behind a sliding window return.

Beam search permutes rows in each step. The tables are permuted on the device, and the host reads them when rows need new pages.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import hf, registry
from ..attention.step import Step
from . import saved
from .paged import why_not
from .pages import check_size
from .preallocated import checked
from .stored import Arguments, ChangeableCache
from .table_storage import OTHER, TableStorage


class PagedCache(ChangeableCache):
    """K and V of every layer in pages, as `past_key_values` (from Transformers 5.24 on: `cache`) of generate() and of forwards.

    config: the model's configuration, or the model. capacity: number of tokens, of all rows together, for which pages are
    allocated at the first forward, rounded up to whole pages. page_size: tokens of a page, 16, 32, 64, 128 or 256. The pools grow
    between forwards. grow=False raises a ValueError instead. A pool holds (pages, num_kv_heads, page_size, head_dim) of K or V of
    one layer, in the dtype in which attention computes them.

    For patched models: attention of other models gets a copy of K and V in each step, with a warning. Rows whose prompts are
    equal (num_return_sequences, beams) are read once under patch() and share their pages, beam search permutes tables and not
    K and V, and pages behind a sliding window return. As a PreallocatedCache it supports left padding, holes, chunked prefill,
    several turns, crop(), reset(), assistants and deepcopy. A cache has pools of its own: `generate_batch()` shares pages between
    texts. It raises an error for latents (MLA), recurrent states, encoder-decoder models, ALiBi, streaming backends, models on
    several devices or ranks, gradients, and for cropping more of a sliding window than it keeps; it has no save().
    """

    storage: TableStorage

    def __init__(self, config: saved.ModelOrConfig, capacity: int = 1, *, page_size: int = 64, grow: bool = True):
        tokens, own = checked(capacity), saved.config_of(config)
        check_size(page_size)
        kinds = hf.layer_kinds(own)
        reason = why_not(own, kinds) or ("ranks share it" if hf.is_shared(config) else None)
        if reason is not None:
            raise ValueError(f"A PagedCache does not support this model: {reason}. {OTHER}")
        self._adopt(TableStorage([kind.window for kind in kinds], tokens, page_size, grow))

    def __repr__(self) -> str:
        pages = self.storage.pages
        return f"{type(self).__name__}({self.storage.seen} tokens, {pages.in_use} pages of {pages.size} in use)"

    @property
    def pages_in_use(self) -> int:
        """Number of pages that rows have, of the layers of each window together."""
        self.storage.read_back()
        return self.storage.pages.in_use

    def begin(self, step: Step, model: hf.PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        name = model.config._attn_implementation
        own = registry.get(name) if name in registry.names() else None
        if own is not None and (own.streaming or own.invariant):
            raise ValueError(f"A PagedCache does not support attn_implementation={name!r}. Leave out {hf.CACHE}, or use 'lean'.")
        return super().begin(step, model, args, kwargs)

    def get_query_offset(self, layer_idx: int = 0) -> int | torch.Tensor:  # type: ignore[override]  # a StaticCache's is a tensor
        return self.storage.layers[layer_idx].query_offset()

    def reserve(self, tokens: int) -> None:
        """Expect `tokens` tokens of each row, so that neither tables nor pools grow before that."""
        self.storage.expected = tokens
