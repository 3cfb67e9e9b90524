"""The counters that the programs of a launch share: which item is next, or how many programs have finished."""

from __future__ import annotations

import threading

import torch
from triton.runtime import driver

_STREAM_SLOTS = 128
COUNTERS = 1024  # for each stream
_counters: dict[torch.device, torch.Tensor] = {}
_slots: dict[tuple[torch.device, int], int] = {}
_lock = threading.Lock()


def counters_of(device: torch.device) -> torch.Tensor:
    """COUNTERS zeroed int32, for launches on the current stream of `device`.

    Launches on one stream run one after another and reset the counters to 0, so they share them. A launch that begins early uses
    them after its wait. Each stream has its own. Those of all streams of a device are allocated at the first launch, which must
    not be inside a CUDA graph capture.
    """
    stream = driver.active.get_current_stream(device.index) if device.type == "cuda" else 0
    slot = _slots.get((device, stream))
    if slot is None:
        slot = _register_stream(device, stream)
    return _counters[device][slot]


def _register_stream(device: torch.device, stream: int) -> int:
    with _lock:
        if device not in _counters:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "The first launch with counters on a device must not be captured into a CUDA graph: they are allocated "
                    "outside of the graph. Run the model once before capturing it."
                )
            _counters[device] = torch.zeros(_STREAM_SLOTS, COUNTERS, dtype=torch.int32, device=device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the next launch may be on another stream
        slot = sum(known == device for known, _ in _slots)
        if slot == _STREAM_SLOTS:
            raise RuntimeError(f"Kernels with counters have run on {_STREAM_SLOTS} streams of {device} already; reuse streams.")
        _slots.setdefault((device, stream), slot)
        return _slots[device, stream]
