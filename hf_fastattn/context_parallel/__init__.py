"""Attention over keys and values that several ranks hold together, each a part of the sequence (context parallelism).

shares.py is the decode step of `patch(kv_sharding="sequence")`: K and V stay where they are, and partial results are merged.
ring.py reads a whole text of which every rank has a part: K and V travel from rank to rank.
"""

from .ring import ORDERS, Piece, pieces, positions, ring_attention
from .shares import New, Share, Shares, over_shares

__all__ = ["ORDERS", "New", "Piece", "Share", "Shares", "over_shares", "pieces", "positions", "ring_attention"]
