"""What the queries of a step see whose rows have lengths of their own: rows of a batch over pages, or prompts read as one row.

The cache of such a step (`caches.paged`) knows which keys each query may see; the model only tells the window of a layer. The
mask function asks here for the mask of each kind of layer, and the attention function checks that the model has passed it on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..kernels import spans
from ..kernels.spec import KV, Spec
from . import masks


class Shared(NamedTuple):
    """Rows that begin with the same pages, whose keys a step reads once for the queries of all of them.

    members: the rows of each group, int64 (groups, most); one with fewer repeats a row. The last group is empty. lengths: number
    of tokens that a group reads, int64 (groups,). place: of each row in members.flatten(), int64 (rows,), in the last group if it
    has no other. own: number of tokens that its group reads for it, int64 (rows,).
    """

    members: torch.Tensor
    lengths: torch.Tensor
    place: torch.Tensor
    own: torch.Tensor


@dataclass(eq=False)
class Ragged:
    """The keys of each query of one forward.

    sizes: (batch, q_len, kv_len). build: the spans for a window, None for all earlier tokens. pages: tables of pages, int32
    (tables, batch, pages); prompts in one row have one table, of the pages of each text after those of the one before. slots: of
    the new token of each row, int64 (batch,), or of each of prompts, (1, q_len). ends: of prompts in one row of which some follow
    a cached text, the slots of the last pages from the ends of the texts on, int64 (1, any), where zeros are stored: keys are
    then the slots of the table, otherwise the new tokens, and it is None. stored, attended: numbers of layers that have stored K
    and V, and of calls of attention. shared: what rows over pages share, if it is read once.
    """

    sizes: masks.Sizes
    build: Callable[[int | None], torch.Tensor]
    pages: torch.Tensor
    slots: torch.Tensor
    ends: torch.Tensor | None = None
    shared: Shared | None = None
    stored: int = 0
    attended: int = 0
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # what attend() makes once in a step

    def __post_init__(self) -> None:
        self.masks: dict[int | None, masks.Mask] = {}

    def mask(self, pattern: tuple[bool, int | None] | None, sizes: masks.Sizes, made_for: masks.Names) -> masks.Mask:
        """The mask for layers of this pattern, (causal, window). Raises ValueError for others."""
        name, model = made_for
        if pattern is None or not pattern[0]:
            raise ValueError(
                f"{model} has a mask other than causal or of a sliding window (chunks, or tokens that see later ones), and K and "
                f"V in pages support these two for attn_implementation={name!r}. Use generate()."
            )
        if sizes != self.sizes:
            raise ValueError(f"{model} requests a mask of {sizes} for a step of {self.sizes} over pages. Use generate().")
        window = pattern[1]
        if window not in self.masks:
            ints = self.build(window)
            self.masks[window] = (masks.of_runs if spans.has_rows(ints) else masks.of_spans)(ints, sizes, made_for)
        return self.masks[window]

    def check(self, mask: torch.Tensor | None) -> None:
        """Raise ValueError if the model passes another mask to a layer."""
        self.attended += 1
        content = getattr(mask, "content", None)
        if not any(content is each.content for each in self.masks.values()):
            raise ValueError("The model makes masks of its own, which do not fit K and V in pages. Use generate().")

    def attend(
        self, run: Callable[..., Any], q: torch.Tensor, kv: KV, spec: Spec, ints: torch.Tensor | None, **options: Any
    ) -> torch.Tensor:
        """Attention by `run`, as `Backend.attend`. Layers that see all tokens read those that rows share once for each group, and
        merge by the lse of both parts."""
        full, shared = self.masks.get(None), self.shared
        if shared is None or full is None or ints is None or full.content is not ints:
            out: torch.Tensor = run(q, kv, spec, ints, **options)
            return out
        from ..kernels.decode.merge_shared import merge_shared  # with Triton

        if self.parts is None:
            assert kv.pages is not None
            own = ints.clone()
            own[:, 0, 0, spans.KV_START] = shared.own
            # The first query is at the last token of its group, so that all see all tokens.
            of_groups = spans.build_spans(len(shared.members), 1, kv.sizes.kv_len, q.device, q_offset=shared.lengths - 1)
            self.parts = own, of_groups, kv.pages[shared.members[:, 0]]
        own, of_groups, table = self.parts
        mine, lse = run(q, kv, spec, own, return_lse=True, **options)
        packed = q[:, :, 0][shared.members].transpose(1, 2)
        once, lse_once = run(packed, kv._replace(pages=table), spec, of_groups, return_lse=True)
        return merge_shared(mine, lse, once, lse_once, shared.place)  # each row sees its own new token: its lse is finite

    def finish(self) -> None:
        """Raise ValueError if a layer has stored K and V and has not attended to them here."""
        if not 0 < self.stored == self.attended:
            raise ValueError(
                f"{self.stored} layers of the model store K and V in pages, and {self.attended} attend to them by a backend of "
                "hf_fastattn. Use generate()."
            )


def of_rows(lengths: torch.Tensor, kv_len: int, window: int | None) -> torch.Tensor:
    """Spans of one query of each row, after `lengths` tokens, int64 (rows,)."""
    return spans.build_spans(len(lengths), 1, kv_len, lengths.device, q_offset=lengths, window=window)


def of_prompts(first: torch.Tensor, own: torch.Tensor, kv_len: int, window: int | None) -> torch.Tensor:
    """Spans of prompts in one row: of each query the index of the first key of its text, and of its own, int64 (tokens,)."""
    lo = first if window is None else torch.maximum(first, own - window + 1)
    all_keys = spans.build_spans(1, len(own), kv_len, own.device, causal=False)
    return spans.with_rows(all_keys, lo[None], own[None] + 1)
