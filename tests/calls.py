"""Calls of kernels with plain tensors, and functions of plain tensors as kernels."""

from __future__ import annotations

from functools import partial, wraps

from hf_fastattn.kernels import reference
from hf_fastattn.kernels.spec import Spec, call

attention = partial(call, reference.attention)


def as_kernel(function):
    """function(q, k, v, spans, **options) as what a backend runs."""

    @wraps(function)
    def kernel(q, kv, spec=Spec(), spans=None, **tensors):  # noqa: B008
        return function(q, *kv.plain(), spans, **spec._asdict(), **tensors)

    return kernel
