"""What every test shares: no network, no luck with uninitialised memory, one device, one hypothesis profile."""

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub

import pytest
import torch
from hypothesis import HealthCheck, settings

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

# The same examples in every run: a test that turns red does so because of the change before it. No deadlines, since first
# calls compile kernels.
_common = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("cpu", max_examples=15, **_common)
settings.register_profile("cuda", max_examples=100, **_common)
settings.load_profile(DEVICE)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one and kernels are not interpreted; else the CPU."""
    return torch.device(DEVICE)


def _spoil(out, module: str):
    """Fill what the package allocated with NaN; kernels' integers with a value no span or counter has."""
    if type(out) is not torch.Tensor or out.is_meta:  # a fake tensor, while something is being traced
        return out
    if out.is_floating_point():
        return out.fill_(float("nan"))
    if module.startswith("hf_fastattn.kernels") and out.dtype == torch.int32:
        return out.fill_(-123456789)
    return out


def _spoiled(allocate):
    """`allocate`, whose result is spoiled when a module of the package called it; nobody else sees a difference."""

    def wrapper(*args, **kwargs):
        out = allocate(*args, **kwargs)
        module = sys._getframe(1).f_globals.get("__name__", "")
        return _spoil(out, module) if module.startswith("hf_fastattn") else out

    return wrapper


@pytest.fixture(autouse=True, scope="session")
def nan_filled_empties():
    """Inside the package torch.empty and its relatives return NaN, so a result nobody wrote cannot look right.

    Patched once a session, so that compiled code keeps seeing one function. Captured into a CUDA graph the fill is one more
    node, which spoils the memory again before each replay.
    """
    with torch.device("meta"):  # torch lists once which functions follow `with torch.device(...)`: these, and not their wrappers
        torch.empty(1)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like", "empty_strided"):
            wrapper = _spoiled(getattr(torch, name))
            # Dynamo must not look inside: it would stop at sys._getframe. As one opaque call it allocates as ever.
            patch.setattr(torch, name, torch.compiler.allow_in_graph(wrapper))
        patch.setattr(torch.Tensor, "new_empty", _spoiled(torch.Tensor.new_empty))
        yield


@pytest.fixture(autouse=True)
def nothing_under_way():
    """A GPU has done all that a test launched when the test ends: what fails there fails in its own test."""
    yield
    if DEVICE == "cuda":
        torch.cuda.synchronize()
