"""Settings of all tests: no network, NaN in uninitialised memory, one device, one hypothesis profile."""

import gc
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub

import pytest
import torch
from hypothesis import HealthCheck, settings

from hf_fastattn.hf import packages

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

# The same examples in every run, so that a test fails because of a change and not by chance. No deadlines, because first calls
# compile kernels.
_common = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("cpu", max_examples=15, **_common)
settings.register_profile("cuda", max_examples=100, **_common)
settings.load_profile(DEVICE)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, if there is one and kernels are not interpreted; else the CPU."""
    return torch.device(DEVICE)


def _spoil(out, module: str):
    """Fill a tensor that the package allocated with NaN, integers of kernels with a value that no span or counter has."""
    if type(out) is not torch.Tensor or out.is_meta:  # a fake tensor during tracing
        return out
    if out.is_floating_point():
        return out.fill_(float("nan"))
    if module.startswith("hf_fastattn.kernels") and out.dtype == torch.int32:
        return out.fill_(-123456789)
    return out


def _spoiled(allocate):
    """`allocate`, whose result is spoiled if a module of the package calls it, and unchanged for other callers."""

    def wrapper(*args, **kwargs):
        out = allocate(*args, **kwargs)
        module = sys._getframe(1).f_globals.get("__name__", "")
        return _spoil(out, module) if module.startswith("hf_fastattn") else out

    return wrapper


@pytest.fixture(autouse=True, scope="session")
def nan_filled_empties():
    """Inside the package torch.empty and related functions return NaN, so a result that was not written cannot look right.

    They are patched once per session, so that compiled code always sees the same functions. In a CUDA graph the fill is captured
    too, and spoils the memory again in each replay.
    """
    with torch.device("meta"):  # torch lists the functions for `with torch.device(...)` once: these, not their wrappers
        torch.empty(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packages, "PACKAGES", packages.PACKAGES | {__name__})
        for name in ("empty", "empty_like", "empty_strided"):
            wrapper = _spoiled(getattr(torch, name))
            # Dynamo must not trace into it, because it would stop at sys._getframe. An opaque call allocates as usual.
            patch.setattr(torch, name, torch.compiler.allow_in_graph(wrapper))
        patch.setattr(torch.Tensor, "new_empty", _spoiled(torch.Tensor.new_empty))
        yield


@pytest.fixture(autouse=True)
def registering():
    """Forget the backends that a test registers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from hf_fastattn import registry

    known = registry._backends, AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    before = [dict(each) for each in known]
    yield
    for each, its in zip(known, before, strict=True):
        each.clear()
        each.update(its)


@pytest.fixture
def captured(monkeypatch):
    """Patched models capture graphs on the CPU, too."""
    import fake_graph

    fake_graph.use(monkeypatch)


@pytest.fixture
def captured_steps(monkeypatch):
    """The same, and prompts run from Python."""
    import fake_graph

    fake_graph.use(monkeypatch, prompts=False)


@pytest.fixture
def without_collector():
    """Memory is freed by reference counts alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def seeded_without_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def one_thread():
    """The matrices of tiny models: a second thread mostly waits, long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def nothing_under_way():
    """Synchronise at the end of each test, so that an error on the GPU fails the test that caused it."""
    yield
    if DEVICE == "cuda":
        torch.cuda.synchronize()
