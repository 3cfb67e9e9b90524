"""The first replay of a decode graph, compared with the same step run from Python.

A graph holds the launches on one stream. A kernel that a package launches on another one, such as the device's default stream, is
not in it, and neither torch nor CUDA reports this. So a graph of a model with kernels of other packages is compared once, before
it is used. Kernels of torch, Transformers' model files, PEFT, bitsandbytes and torchao are launched on the stream of the capture.
"""

from __future__ import annotations

import torch

from ..fused import subclass

_PACKAGES = frozenset({"torch", "transformers", "peft", "bitsandbytes", "torchao", "accelerate", "hf_fastattn"})
_INTEGRATIONS = "transformers.integrations."  # modules that call kernels of other packages
_ALLOWED = 2**-4  # of the norm of the logits: above the rounding of sums in another order, below the effect of a missing kernel


def needed(model: torch.nn.Module) -> bool:
    """Whether a module of the model, the class of one of its weights, or a function that a module calls is of another package."""
    return any(map(_is_foreign, model.modules())) or not subclass.run_known_code(model.modules(), _PACKAGES)


def _is_foreign(module: torch.nn.Module) -> bool:
    tensors = (*module._parameters.values(), *module._buffers.values())
    places = [type(module).__module__, *(type(tensor).__module__ for tensor in tensors if tensor is not None)]
    if any(place.startswith(_INTEGRATIONS) for place in places):
        return True
    if (own := vars(module).get("forward")) is not None:
        places.append(getattr(getattr(own, "func", own), "__module__", None) or "")
    return any(place.partition(".")[0] not in _PACKAGES for place in places)


def differs(replayed: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether logits differ by more than the order of sums explains. Reads the result on the host."""
    finite = expected.isfinite()
    if not torch.equal(finite, replayed.isfinite()):
        return True
    a, b = replayed[finite].float(), expected[finite].float()
    return bool((a - b).norm() > _ALLOWED * (b - b.mean()).norm())
