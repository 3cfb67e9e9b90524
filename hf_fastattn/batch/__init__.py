"""generate_batch() of a patched model: any number of prompts, read as they find room, over K and V in pages.

`requests` has the texts and results, `pick` chooses tokens, `loop` runs the steps, `job` reads the arguments of a call, `manager`
takes requests that come while the loop runs.
"""

from .requests import BatchError

__all__ = ["BatchError"]
