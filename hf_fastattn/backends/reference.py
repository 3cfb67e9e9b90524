"""Backend "reference": plain torch in fp32: the specification the kernels are tested against."""

from ..kernels import reference
from ..registry import Backend, register

backend = register(
    Backend(
        name="reference",
        summary="plain torch in fp32: the specification the kernels are tested against",
        prefill=reference.attention,
        max_head_dim=None,
        max_value_dim=None,
        packed=True,
        backward=reference.backward,
        dropout=True,
    )
)
