"""The numbers of tokens of each row that graphs are captured for."""

from __future__ import annotations

import torch

from ... import hf
from ...caches.contract import FEW, Storage
from ...caches.stored import StoredCache
from ...kernels.host import gpu

BUCKETS: tuple[int, ...] = (1, 2, 4, 8, 16, 32, *range(64, 513, 64), *range(640, 2049, 128))
MOST = 512  # tokens of all rows in a graph of more than FEW of each; more if their kernels take less time than launches
LAUNCHES = 0.7e-3, 1.8e-3  # seconds of a layer's launches from Python, on an H200's host: of one rank, of several
FLOPS = 6e14, 1.5e14  # that products reach in 16 bits: on Hopper and later, before; in 32 bits a tenth


def bucket(ids: torch.Tensor) -> int:
    """The number of tokens of the graph for these ids."""
    return next(size for size in BUCKETS if size >= ids.shape[1])


def several(ids: torch.Tensor) -> tuple[int, ...]:
    """The number of these tokens, as the last argument of a storage's sync() and advance(), which get none for one token."""
    return () if ids.shape[1] == 1 else (ids.shape[1],)


def most_tokens(storage: Storage, rows: int, most: int = MOST) -> int:
    """The most tokens of each row in a graph over this storage: FEW for any number of rows, more only up to `most` tokens of all
    rows."""
    if not storage.takes_many:
        return 1
    found = max(FEW, min(most, storage.most_tokens) // max(rows, 1) if storage.takes_prompts else 0)
    return max(size for size in BUCKETS if size <= found)


def launch_bound(model: hf.PreTrainedModel, arch: int | None = None) -> int:
    """The most tokens of a prompt, from MOST on, whose kernels take less time than their launches from Python, by estimate.

    It is the same on all ranks of a model, which must capture alike, even if their GPUs differ. arch: as in `gpu.arch`; None for
    that of the model's GPU.
    """
    if model.device.type != "cuda" and arch is None:
        return MOST
    ranks = hf.num_ranks(model)
    tables = {id(each.weight) for each in (model.get_input_embeddings(), model.get_output_embeddings()) if each is not None}
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1 and id(p) not in tables) / ranks
    layers: int = model.config.get_text_config(decoder=True).num_hidden_layers
    old = ranks == 1 and (gpu.arch(model.device) if arch is None else arch) < 90
    flops = FLOPS[old] / (1 if model.dtype.itemsize <= 2 else 10)
    tokens = LAUNCHES[ranks > 1] * layers * flops / (2 * max(weights, 1))
    return max(MOST, min(int(tokens), BUCKETS[-1]))


def tokens_in(cache: StoredCache) -> int:
    """Number of tokens whose K and V are on the device."""
    storage = cache.storage
    return 0 if storage.rows is None else cache.get_seq_length() or storage.seen  # the first layer may not run
