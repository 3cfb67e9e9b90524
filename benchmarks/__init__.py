"""Benchmarks: check the result first, then time, peers in the same run.

They belong to a clone of the repository, not to the wheel: `hf-fastattn bench NAME` or, from the clone's root,
`python -m benchmarks.NAME`. Imports between these files are relative, as the command line loads the folder under another name.
"""
