"""The state that a decode graph depends on besides its inputs: a fingerprint of the model and of torch's settings.

A graph replays launches without running Python, so it is valid only as long as Python would issue the same launches. The
fingerprint decides this without running the model. It covers the modules and their order, their classes and the functions that
their forward() reaches, addresses and layouts of tensors, values of attributes and configurations, and torch's settings. Each
generate() needs one. If the model is as it was, that is the last one (watch.py).

Objects are not identified by id() alone. A fingerprint holds a weak reference to each object that it identifies, so a new object
at an old address is recognised as new. It holds a strong reference only to objects that do not support weak references.
"""

from __future__ import annotations

from functools import partial

import torch

from .. import hf
from .fingerprint import Fingerprint, Uncapturable
from .unread import classes_lock
from .walker import Walker
from .watch import Watch


def survey(model: hf.PreTrainedModel) -> Fingerprint:
    """The current fingerprint of the model. Raises Uncapturable if no graph can be captured."""
    return _walk(model, *_settings(model))[0]


def surveyed(model: hf.PreTrainedModel) -> tuple[Fingerprint, list[torch.Tensor]]:
    """As survey(), with the tensors that it found."""
    found, walker = _walk(model, *_settings(model))
    return found, walker.tensors


class Surveyor:
    """The fingerprints of one model."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.last: Fingerprint | None = None
        self.watch: Watch | None = None

    def current(self, model: hf.PreTrainedModel) -> Fingerprint:
        """As survey(). The modules in it are those of the last one if they have not changed."""
        return self.surveyed(model)[0]

    def surveyed(self, model: hf.PreTrainedModel) -> tuple[Fingerprint, list[torch.Tensor]]:
        """As current(), with all tensors if the model is watched, else none."""
        settings, held = _settings(model)
        last, watch = self.last, self.watch  # another thread may call forget()
        if (
            last is not None
            and watch is not None
            and (tensors := watch.tensors(partial(hf.tensor_parallel_mesh, model))) is not None
        ):
            if settings != last.settings:
                last = self.last = last._replace(settings=settings, held=[*held, watch.held])
            return last, tensors
        self.watch = None  # if no graph can be captured, none is replayed before that is known
        with classes_lock:  # the watch records what was walked over
            found, walker = _walk(model, settings, held)
            # A model that changes in every call is not watched, which would take time and save none.
            stays = last is not None and last.modules == found.modules
            self.last, self.watch = found, Watch(walker) if stays else None
        return found, walker.tensors if stays else []

    def assumed(self, model: hf.PreTrainedModel) -> tuple[Fingerprint | None, list[torch.UntypedStorage]]:
        """The last fingerprint, and the memory of its tensors, if graphs may be replayed before the model is compared with it."""
        settings, last, watch = _settings(model)[0], self.last, self.watch
        if last is None or watch is None or settings != last.settings:
            return None, []
        memory = watch.harmless()
        return last if memory else None, memory

    def same_tables(self, since: Fingerprint) -> bool:
        """Whether tables are read as at that fingerprint (see `Watch`); False if it is not the last one."""
        last, watch = self.last, self.watch
        return last is not None and watch is not None and last.modules is since.modules and watch.same_tables()


def _walk(model: hf.PreTrainedModel, settings: tuple[object, ...], held: list[object]) -> tuple[Fingerprint, Walker]:
    if reason := hf.why_not_captured(model):
        raise Uncapturable(reason)
    walker = Walker(model.device, partial(hf.tensor_parallel_mesh, model))
    with classes_lock:
        modules = walker.modules(model)
    if len(walker.devices) > 1:
        raise Uncapturable(f"its weights are on several devices ({', '.join(sorted(map(str, walker.devices)))})")
    return Fingerprint(settings, modules, held + walker.held), walker


def _settings(model: hf.PreTrainedModel) -> tuple[tuple[object, ...], list[object]]:
    """Settings of torch and the backend, with the references that they hold. Raises Uncapturable if torch's rule graphs out."""
    module_api, device = torch.nn.modules.module, model.device
    if module_api._global_forward_hooks or module_api._global_forward_pre_hooks:
        raise Uncapturable("a global forward hook is registered, and a graph would not run it")
    if torch.is_autocast_enabled(device.type):
        raise Uncapturable("autocast is on, and its copies of the weights are temporary")
    if torch._C._len_torch_dispatch_stack():
        raise Uncapturable("a dispatch mode of torch is active, and a graph would not pass through it")
    walker = Walker(device)
    return (*_settings_of_torch(), *walker.backend(model.config._attn_implementation)), walker.held


def _settings_of_torch() -> tuple[object, ...]:
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
