"""Kernels that are known before their first launch: described, and compiled by other processes."""
