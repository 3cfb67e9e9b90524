"""The settings of a streaming backend for a model, and the rotation of the queries that score the sinks.

Every query sees the first `sinks` and the last `window` tokens of its row, its own included, at positions counted within these.
Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2024), section 3.2.
"""

from .rotary import examine, forget, has_frequencies, refresh, rotation
from .settings import Settings, check_mask

__all__ = ["Settings", "check_mask", "examine", "forget", "has_frequencies", "refresh", "rotation"]
