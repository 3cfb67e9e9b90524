"""Kernels that are known before their first launch: described, compiled by other processes, and shipped in a file."""
