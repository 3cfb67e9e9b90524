"""Permutation of the rows of a preallocated cache, in place: beam search continues other rows after each step.

The buffers of all layers are permuted in one launch. A copy of the rows of each buffer and back would take four launches for
each layer, and twice the traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..kernels.decode import reorder as kernel

if TYPE_CHECKING:
    from .layers import Layer

Tables = dict[tuple[int, ...], torch.Tensor]  # addresses of buffers, also as a tensor on their device


def reorder(layers: Sequence[Layer], index: torch.Tensor, tables: Tables) -> Tables:
    """Replace every row r of the layers by row index[r]. tables: those that the last call returned."""
    groups: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    rows = len(index)
    for layer in layers:
        live = layer.slots
        if live is None or layer.batch_size != rows or not all(map(kernel.fits, layer.buffers)):
            layer.select(index)
            continue
        for buffer in layer.buffers if live else ():
            kind = live, buffer.shape, buffer.stride(), buffer.dtype, buffer.device
            groups.setdefault(kind, []).append(buffer)
    used: Tables = {}
    for (live, *_), buffers in groups.items():
        device = buffers[0].device
        addresses = tuple(buffer.data_ptr() for buffer in buffers)
        table = tables.get(addresses)
        used[addresses] = torch.tensor(addresses, device=device) if table is None else table
        kernel.reorder(used[addresses], buffers[0], live, index.to(device))
    return used
