"""K and V in pages of a pool that rows of any length share, and the tables that say which pages a row has.

All pages have one size, and every layer has a pool of K and one of V, (pages, num_kv_heads, page size, head_dim). The token at
position n of a row is in slot n % size of its page n // size. Layers with one window have one table of pages: those behind the
window return, and their entries of the table stay, as no query sees them. Tables, lengths and the flags of live rows are on the
device, and a step of one token of each row reads nothing else: the rows of `bucket`, of which those that only fill it up write to
page 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from .. import hf
from ..attention import ragged
from ..attention import step as steps
from ..attention.ragged import Ragged, Shared
from ..attention.step import EAGER, Step
from ..hf import Kind, has_alibi
from ..kernels.host import gpu
from ..kernels.spec import KV
from .buffers import Buffered, Pair, cast
from .contract import Storage
from .pages import Pools
from .stored import Arguments, StoredCache

COUNTS = 2, 8, 32, 128  # of groups in a graph
GROUP = 64  # the most rows of a group, whose queries are those of one block of a kernel


class PagedLayer(Buffered):
    """K and V of one layer, (pages, num_kv_heads, page size, head_dim) each. table: the index of the table of its pages."""

    is_sliding = False
    is_croppable = False

    def __init__(self, index: int, pages: int, size: int, table: int):
        self.index, self.pages, self.size, self.table = index, pages, size, table
        super().__init__()  # type: ignore[no-untyped-call]

    @property
    def slots(self) -> None:
        return None

    def shown(self, index: int) -> None:
        return None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the pools for states of this shape, (any, num_kv_heads, any, head_dim)."""
        with torch.inference_mode(False), torch.no_grad():
            self.buffers = [x.new_zeros(self.pages, x.shape[1], self.size, x.shape[3]) for x in (key_states, value_states)]
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def ready(self, *states: torch.Tensor) -> Pair:
        """K and V in the dtype of the pages, which are allocated for the first. Raises ValueError if they have another."""
        states = cast(*states)
        if not self.is_initialized:
            self.lazy_initialization(*states)
        if states[0].dtype != self.dtype:
            raise ValueError(
                f"The pages of this model hold {self.dtype}, and it computes K and V in {states[0].dtype} now. Call "
                "hf_fastattn.unpatch() and patch() on it: new pages have the new dtype."
            )
        return states

    def append(self, rows: Ragged, key_states: torch.Tensor, value_states: torch.Tensor) -> KV:
        """Store K and V, (batch, num_kv_heads, 1, head_dim) of a step of the rows or (1, num_kv_heads, tokens, head_dim) of
        prompts in one row, and return those to attend to."""
        from ..kernels.decode.append import append  # with Triton
        from ..kernels.paged import gather, paged

        states = self.ready(key_states, value_states)
        keys, values = self.buffers
        kv = paged(keys, values, rows.pages[self.table])
        append(kv, *states, rows.slots)
        rows.stored += 1
        if rows.slots.dim() == 1:
            return kv
        if rows.ends is None:
            return KV(*states)
        if rows.ends.numel():
            k, v = (x.new_zeros(1, x.shape[1], rows.ends.numel(), x.shape[3]) for x in states)
            append(kv, k, v, rows.ends)
        # Other GPUs load tiles from pages by an address for each slot, which takes longer than a copy.
        return kv if gpu.arch(self.buffers[0].device) in (0, 90) else gather(kv)

    def get_seq_length(self) -> int:
        return 0  # rows have lengths of their own; positions are passed to the model

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        step = steps.innermost()
        return (query_length if step is None or step.ragged is None else step.ragged.sizes[2]), 0

    def update(self, *args: Any, **kwargs: Any) -> Pair:
        raise NotImplementedError("A layer in pages is written by its cache.")


class PagedStorage(Storage):
    """The pools of all layers, and the rows that are decoded. most_rows, width: rows and pages of a row that each table has.

    windows: of each layer; None if it sees all tokens. pages: numbers of pages, for the layers of each of windows_of().
    tables: int32 (len(pages), most_rows, width); `Ragged.pages` has this first axis too.
    bucket: the number of rows of a step; live rows come first. sharing: the most rows of a group whose first tokens a step reads
    once (`share`), 0 if each row reads its own; counted: the number of such groups, of which the last is empty. prompts: what the
    prompts of the current forward see, None in a step of the rows.
    """

    takes_mask = False
    layers: list[PagedLayer]
    made_for: tuple[torch.dtype | None, ...] = ()

    def __init__(
        self,
        windows: Sequence[int | None],
        pages: Sequence[int],
        size: int,
        most_rows: int,
        width: int,
        device: torch.device,
    ):
        self.windows = windows_of(windows)
        tables = [*map(self.windows.index, windows)]
        self.pages = Pools(size, self.windows, pages)
        self.layers = [PagedLayer(index, pages[table], size, table) for index, table in enumerate(tables)]
        self.most_rows, self.width = most_rows, (width := -(-width // 4) * 4)  # each table is aligned to 16 bytes
        with torch.inference_mode(False):
            self.tables = torch.zeros(len(pages), most_rows, width, dtype=torch.int32, device=device)
            self.lengths = torch.zeros(most_rows, dtype=torch.int64, device=device)
            self.live = torch.zeros(most_rows, dtype=torch.int32, device=device)
            self.last = torch.zeros(most_rows, dtype=torch.int64, device=device)
            self.groups = torch.zeros((GROUP + 1) * (most_rows // 4 + 1) + 2 * most_rows, dtype=torch.int64, device=device)
        self.bucket = self.sharing = self.counted = 0
        self.steps = 1
        self.prompts: Ragged | None = None

    @property
    def rows(self) -> int | None:
        return self.bucket or None

    @property
    def seen(self) -> int:
        return self.steps

    @property
    def capacity(self) -> int:
        return self.pages.all.count * self.pages.size

    @property
    def variant(self) -> tuple[int, int, int]:
        return self.bucket, self.sharing, self.counted if self.sharing else 0

    def fits(self, windows: Sequence[int | None], pages: Sequence[int], dtypes: tuple[torch.dtype | None, ...]) -> bool:
        """Whether it has so many pages for layers of these windows, and was made for these dtypes, of weights and of autocast."""
        same = [self.windows[layer.table] for layer in self.layers] == [*windows] and self.made_for == dtypes
        return same and all(pool.count >= count for pool, count in zip(self.pages.each, pages, strict=True))

    def states(self) -> list[torch.Tensor]:
        return [self.lengths]

    def reset(self) -> None:
        """Discard all tokens and rows; the pools and tables stay in place."""
        self.pages = Pools(self.pages.size, self.windows, [pool.count for pool in self.pages.each])
        for tensor in (self.tables, self.lengths, self.live, self.last):
            tensor.zero_()
        self.bucket, self.sharing, self.prompts, self.cut_short = 0, 0, None, False

    def copy(self, pages: list[list[tuple[int, int]]]) -> None:
        """Copy pages. pages: the source and the target, for each table."""
        copy_pages(self.layers, on_device(pages, self.tables.device))

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Move rows, int64 each."""
        self.tables[:, target] = self.tables[:, source]
        for tensor in (self.lengths, self.last):
            tensor[target] = tensor[source]

    def clear(self, start: int, stop: int) -> None:
        """Discard rows."""
        self.tables[:, start:stop] = 0
        for tensor in (self.lengths, self.live, self.last):
            tensor[start:stop] = 0

    @property
    def bytes_of_token(self) -> int:
        """The bytes of K and V of a token in the first layer."""
        return (
            sum(pool[0, :, 0].numel() * pool.itemsize for pool in self.layers[0].buffers) if self.layers[0].is_initialized else 0
        )

    def present(self) -> Ragged:
        """What the rows of the table see in a step of one token of each."""
        rows, kv_len = self.bucket, self.width * self.pages.size
        lengths = self.lengths[:rows]
        build = partial(ragged.of_rows, lengths, kv_len)
        return Ragged((rows, 1, kv_len), build, self.tables[:, :rows], lengths, shared=self.shared() if self.sharing else None)

    def share(self, groups: list[tuple[list[int], int]], most: int) -> None:
        """Let steps of `bucket` rows read tokens once. groups: at most bucket // 4, each of at most `most` rows and the number of
        tokens with which all of them begin."""
        self.sharing = most if groups else 0
        if not groups:
            return
        count = self.counted = counted(len(groups), self.bucket)
        place, own = [(count - 1) * most] * self.bucket, [0] * self.bucket
        members = [0] * (count * most)
        for index, (rows, tokens) in enumerate(groups):
            members[index * most : (index + 1) * most] = rows + rows[:1] * (most - len(rows))
            for i, row in enumerate(rows):
                place[row], own[row] = index * most + i, tokens
        lengths = [tokens for _, tokens in groups] + [0] * (count - len(groups))
        values = [*members, *lengths, *place, *own]
        self.groups[: len(values)] = on_device(values, self.groups.device)

    def shared(self) -> Shared:
        rows, most, count = self.bucket, self.sharing, self.counted
        members, lengths, place, own = self.groups[: count * (most + 1) + 2 * rows].split([count * most, count, rows, rows])
        return Shared(members.view(count, most), lengths, place, own)

    def step(self) -> None:
        self.lengths[: self.bucket].add_(self.live[: self.bucket])

    def advance(self, tokens: int = 1) -> None:
        self.steps += 1


class BatchCache(StoredCache):
    """The `cache` of a forward over a PagedStorage, which `generate_batch` of a patched model makes."""

    storage: PagedStorage

    def begin(self, step: Step, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        super().begin(step, model, args, kwargs)
        step.ragged = self.storage.prompts or self.storage.present()
        return None

    def end(self, step: Step, output: Any) -> Any:
        super().end(step, output)
        if output is not None and step.ragged is not None:
            step.ragged.finish()
            if others := {window for window in step.ragged.masks if window not in self.storage.windows}:
                raise ValueError(
                    f"The model asks for masks of the windows {others}, and its layers keep pages for {self.storage.windows} "
                    "(None: all tokens). Use generate()."
                )
            if step.mode == EAGER:
                if step.ragged is not self.storage.prompts:
                    self.storage.step()
                self.storage.advance()
        return None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> Pair:
        step = steps.over(self.storage)
        if step is None or step.ragged is None:
            raise ValueError("A cache in pages is written by generate_batch() of a patched model, and by no other forward.")
        layer: PagedLayer = self.storage.layers[layer_idx]
        kv = layer.append(step.ragged, key_states, value_states)
        step.kv = kv if kv.pages is not None else None
        return kv.k, kv.v


def copy_pages(layers: Iterable[Any], pages: torch.Tensor) -> None:
    """Copy pages of layers. pages: int64 (copies, tables, 2), the source and the target."""
    for layer in layers:
        source, target = pages[:, layer.table].unbind(1)
        for pool in layer.buffers:
            pool[target] = pool[source]


def counted(groups: int, rows: int) -> int:
    """The number of groups in a step of so many rows that has at least `groups`, and one that is empty: one of few numbers, for
    each of which there is a graph."""
    return min(next((count for count in COUNTS if count >= groups), rows), rows // 4) + 1


def windows_of(layers: Sequence[int | None]) -> tuple[int | None, ...]:
    """None, and the windows of the layers, which have a pool of pages each."""
    return None, *sorted({window for window in layers if window is not None})


def why_not(config: Any, kinds: Sequence[Kind]) -> str | None:
    """Why K and V of a model cannot be in pages. config: that of the model. kinds: of its layers."""
    text = config.get_text_config(decoder=True)
    if hf.has_latents(config):
        return "it caches latents (MLA), which pages do not hold yet"
    if getattr(text, "cross_attention_layers", None):
        return "it has layers that attend to an image, which pages do not hold"
    if any(kind.name not in ("full", "window") for kind in kinds):
        return "it has layers with recurrent states, or without K and V of their own, which pages do not hold"
    if has_alibi(config):
        return "its positions are a bias of keys (ALiBi), which the kernels do not read beside pages"
    return None


def on_device(values: list[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A tensor of these values, which is copied without waiting for the device."""
    with torch.inference_mode(False):
        made = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
        return made.to(device, non_blocking=True)
