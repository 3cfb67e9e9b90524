"""Benchmarks: they check a result before they time it, together with other implementations in the same run.

They belong to a clone of the repository, not to the wheel: `hf-fastattn bench NAME` or, from the clone's root,
`python -m benchmarks.NAME`. Imports between these files are relative, because the command line loads the folder under another
name.

A *rival* is one of the implementations that a row compares, the package's included.
"""
