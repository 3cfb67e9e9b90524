"""The state that a decode graph depends on besides its inputs: a fingerprint of the model and of torch's settings.

A graph replays launches without running Python, so it is valid only as long as Python would issue the same launches. The
fingerprint decides this without running the model. It covers the modules and their order, their classes and the functions that
their forward() reaches, addresses and layouts of tensors, values of attributes and configurations, and torch's settings. It is
taken once per generate().

Objects are not identified by id() alone. A fingerprint holds a weak reference to each object that it identifies, so a new object
at an old address is recognised as new. It holds a strong reference only to objects that do not support weak references.
"""

from __future__ import annotations

import torch

from .. import hf
from .fingerprint import Fingerprint, Uncapturable
from .unread import classes_lock
from .walker import Walker


def survey(model: hf.PreTrainedModel) -> Fingerprint:
    """The current fingerprint of the model. Raises Uncapturable if no graph can be captured."""
    module_api = torch.nn.modules.module
    if module_api._global_forward_hooks or module_api._global_forward_pre_hooks:
        raise Uncapturable("a global forward hook is registered, and a graph would not run it")
    if torch.is_autocast_enabled(model.device.type):
        raise Uncapturable("autocast is on, and its copies of the weights are temporary")
    if torch._C._len_torch_dispatch_stack():
        raise Uncapturable("a dispatch mode of torch is active, and a graph would not pass through it")
    walker = Walker(model.device)
    with classes_lock:
        modules = walker.modules(model)
    if len(walker.devices) > 1:
        raise Uncapturable(f"its weights are on several devices ({', '.join(sorted(map(str, walker.devices)))})")
    return Fingerprint((*_settings(), *walker.backend(model.config._attn_implementation)), modules, walker.held)


def _settings() -> tuple[object, ...]:
    """Settings of torch that select kernels or dtypes."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        matmul.allow_tf32,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_accumulation,
        torch.backends.cuda.preferred_blas_library(),
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        cudnn.allow_tf32,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )
