"""Cache "static": K and V of every token in buffers allocated once, from chosen capacity, grown in steps between forwards."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from .. import compat
from .layers import CHANGE_ROWS, Storage, round_up
from .stored import StoredCache

FORMAT = "hf_fastattn cache 1"


class PreallocatedCache(StoredCache):
    """K and V of every layer in buffers that stay where they are; a drop-in `past_key_values` for decoder-only models.

    config: the model's (or the model itself). capacity: tokens to allocate for at first, rounded up; more are
    allocated in steps when they come, between two forwards. grow=False refuses them instead, with a ValueError.
    Sliding-window layers allocate for little more than their window. Nothing is allocated before the first forward.

    It follows DynamicCache in what it does: left padding, holes, chunked prefill, beams, num_return_sequences, assisted
    and prompt-lookup decoding, several turns, reset(), deepcopy, several devices. It refuses, in a sentence: gradients,
    offloading, rows or K/V shapes of another call or model, and to take back more of a sliding window than it keeps.
    """

    def __init__(self, config, capacity: int = 1, *, grow: bool = True):
        config = getattr(config, "config", config)
        if capacity < 1:
            raise ValueError(f"capacity counts tokens and must be at least 1; got {capacity}.")
        self._adopt(Storage(compat.layer_windows(config), round_up(capacity) if grow else capacity, grow))

    def __repr__(self) -> str:
        tracks = ", ".join(
            f"{len(t.layers)} layers" + (f" of window {t.window}" if t.window else "") + f" at {t.seen}/{t.capacity} tokens"
            for t in self.storage.tracks
        )
        return f"{type(self).__name__}({tracks})"

    def get_query_offset(self, layer_idx: int = 0) -> int | torch.Tensor:
        return self.layers[layer_idx].track.query_offset()

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens in all, so that no buffer grows before they are there."""
        for track in self.storage.tracks:
            capacity = min(round_up(tokens), track.limit)
            if track.capacity < capacity and track.growable:
                track.grow(capacity)

    def check_rows(self, rows: int) -> None:
        """Raise ValueError if the cache holds tokens of another number of rows."""
        held = self.storage.rows
        if held is not None and held != rows and self.get_seq_length():
            raise ValueError(f"This cache holds {held} rows, and the call has {rows}. {CHANGE_ROWS}")

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens (a negative number, as in Transformers; 0 does nothing)."""
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding has it in a tensor
        if tokens_to_remove > 0:
            raise ValueError(f"crop() takes the negative number of tokens to take back; got {tokens_to_remove}.")
        # An early exit has not come to the layers of some, which then hold nothing to take back.
        tracks = [track for track in self.storage.tracks if track.seen] or self.storage.tracks
        for track in tracks:
            if reason := track.why_not_crop(-tokens_to_remove):
                raise ValueError(reason)
        for track in tracks:
            track.seen += tokens_to_remove

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, in place of it."""
        rows = self._rows()
        self.batch_select_indices(torch.arange(rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep rows `indices` (int64, or bool with one entry per row), in this order."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        for layer in self.layers:
            layer.select(indices)

    def _rows(self) -> int:
        return next((layer.live()[0].shape[0] for layer in self.layers if layer.is_initialized or layer.pending), 0)

    def save(self, path: str | Path, model) -> None:
        """Write the live tokens to one safetensors file, with the configuration of the `model` that made them."""
        from safetensors.torch import save_file

        tensors = {}
        for layer in self.layers:
            if not (layer.is_initialized or layer.pending):
                raise ValueError("This cache holds no tokens; run the prompt through the model before saving it.")
            for name, live in zip(("keys", "values"), layer.live(), strict=True):
                tensors[f"{layer.index}.{name}"] = live.contiguous()
        seen = {str(layer.index): layer.track.seen for layer in self.layers}
        save_file(tensors, path, {"format": FORMAT, "config": _describe(model), "seen": json.dumps(seen)})

    @classmethod
    def load(cls, path: str | Path, model, *, capacity: int = 1, grow: bool = True) -> PreallocatedCache:
        """Read a cache written by save(), for `model`. K and V go to the device of each layer in the first forward.

        Only the configuration is compared, not the weights: K and V of other weights would be taken for this model's. Raises
        ValueError, naming the difference, for files of another format, configuration or dtype.
        """
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            meta = file.metadata() or {}
            if meta.get("format") != FORMAT:
                raise ValueError(
                    f"{path} has format {meta.get('format')!r}, and this version reads {FORMAT!r}. Compute it again."
                )
            _refuse_other(path, json.loads(meta["config"]), json.loads(_describe(model)))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        dtype = getattr(model, "dtype", None)
        found = tensors["0.keys"].dtype
        if dtype is not None and found != dtype:
            raise ValueError(
                f"{path} holds {found}, and the model runs in {dtype}; load the model in {found}, or compute it again."
            )
        seen = json.loads(meta["seen"])
        cache = cls(model, max(capacity, *seen.values()), grow=grow)
        for layer in cache.layers:
            layer.pending = (tensors[f"{layer.index}.keys"], tensors[f"{layer.index}.values"])
            layer.track.seen = seen[str(layer.index)]
            layer.track.base = layer.track.seen - layer.pending[0].shape[2]
        return cache


# What may differ between the configurations a cache is saved and loaded under: nothing that K and V depend on.
_FREE = {
    "_name_or_path", "architectures", "attn_implementation", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id",
    "output_attentions", "output_hidden_states", "pad_token_id", "return_dict", "streaming_clamped", "streaming_sinks",
    "streaming_window", "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip


def _describe(model) -> str:
    config = getattr(model, "config", model).to_dict()
    return json.dumps({k: v for k, v in config.items() if k not in _FREE}, sort_keys=True, default=str)


def _refuse_other(path, saved: dict, wanted: dict) -> None:
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            raise ValueError(
                f"{path} was saved for a model with {name}={saved.get(name)!r}, and this one has {name}={wanted.get(name)!r}: "
                "its K and V do not fit. Compute it again with this model."
            )
