"""What a model asks of a streaming backend, and how the queries that score its sinks are turned.

Every query sees the first `sinks` tokens of its row and the last `window`, itself included, at positions counted within those.
Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2024), section 3.2.
"""

from .rotary import examine, forget, refresh, rotation
from .settings import Settings, check_mask

__all__ = ["Settings", "check_mask", "examine", "forget", "refresh", "rotation"]
