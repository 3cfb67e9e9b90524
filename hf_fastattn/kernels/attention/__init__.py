"""The attention kernels."""
