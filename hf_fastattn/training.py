"""Attention with gradients, for code that calls it itself."""

from .attention.training import attention

__all__ = ["attention"]
