"""Benchmarks: check the result first, then time, peers in the same run."""
