"""A substitute for CUDA graphs on the CPU: records the tensor operations of one step, and replays them on the same memory.

Like a graph, it repeats operations and not Python: an int that Python read during the recording keeps its value, a result is
written to the same memory, and reading a value on the host is an error. Unlike a graph it computes while it records, so its first
replay does nothing. Collectives are recorded, too, and every replay waits for their results.
"""

import functools
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_fastattn import kernels
from hf_fastattn.hf import packages
from hf_fastattn.patches.calls import forwards
from hf_fastattn.patches.graphs import graphs as graph
from hf_fastattn.patches.graphs import policy

packages.PACKAGES |= {__name__}  # what records a step is no code of the model

SYNCS = ("aten._local_scalar_dense", "aten.nonzero", "aten.item", "aten.masked_select")


class Event:
    """In place of torch.Event, which the CPU does not have: copies have ended when their calls return. recorded: how often."""

    recorded = 0

    def __init__(self, device, blocking):
        pass

    def record(self):
        Event.recorded += 1

    def synchronize(self):
        pass


class RecordedGraph:
    def __init__(self, device, shared):
        self.operations = []
        self.recorded_just_now = False

    def rehearse(self, body):
        with _Recorder([]), _NoHost():
            return body()

    def capture(self, body):
        with _Recorder(self.operations), _NoHost():
            result = body()
        self.recorded_just_now = True
        return result

    def replay(self):
        if self.recorded_just_now:
            self.recorded_just_now = False
            return
        with torch.no_grad():
            for function, args, kwargs, results in self.operations:
                again = [_finished(x, str(function)) for x in tree_leaves(function(*args, **kwargs))]
                for old, new in zip(results, again, strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

    @property
    def collectives(self) -> list[str]:
        """The names of the recorded collectives."""
        names = [str(function) for function, *_ in self.operations]
        return [name for name in names if "c10d" in name and "wait" not in name and "wrap" not in name]


def _finished(result, name: str):
    """A result of an operation, when it has been computed: collectives return before that."""
    if name.startswith("c10d.") and hasattr(result, "wait"):
        result.wait()
    elif name.startswith("_c10d_functional.") and "wait" not in name and "wrap" not in name:
        torch.ops._c10d_functional.wait_tensor(result)
    return result


class _Recorder(TorchDispatchMode):
    def __init__(self, operations):
        super().__init__()
        self.operations = operations

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it is converted to operations on local tensors, which come here again
        if str(function).startswith(SYNCS):
            raise RuntimeError(f"operation not permitted when stream is capturing: {function}")
        result = function(*args, **(kwargs or {}))
        if any(isinstance(each, FakeTensor) for each in tree_leaves((args, kwargs, result))):
            return result  # a DTensor finds the shape of a new result, which launches nothing
        args, kwargs = tree_map_only(torch.nn.Parameter, torch.Tensor.detach, (args, kwargs or {}))  # at their present addresses
        self.operations.append((function, args, kwargs, tree_leaves(result)))
        return result


class _NoHost:
    """A context in which functions that read a CPU tensor without an operation that a dispatch mode would see are refused.

    A function mode of torch would see them, too, but passes on what a name refers to, which a test may have replaced.
    """

    active = threading.local()

    def __enter__(self):
        _NoHost.active.now = True

    def __exit__(self, *error):
        _NoHost.active.now = False


def _refused_while_recording(name: str):
    own = getattr(torch.Tensor, name)

    @functools.wraps(own)
    def method(tensor, *args, **kwargs):
        if getattr(_NoHost.active, "now", False):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        return own(tensor, *args, **kwargs)

    return method


torch.Tensor.tolist, torch.Tensor.numpy = map(_refused_while_recording, ("tolist", "numpy"))


def use(monkeypatch, prompts: bool = True) -> None:
    """Let patched models on the CPU capture RecordedGraphs. prompts: also for prompts and messages."""
    if not prompts:
        only_steps(monkeypatch)
    if kernels.INTERPRETED:
        pytest.skip("an interpreted kernel is not a tensor operation and cannot be recorded")
    monkeypatch.setattr(graph, "new_graph", RecordedGraph)
    monkeypatch.setattr(graph, "why_no_graph", lambda device: None)
    monkeypatch.setattr(policy, "SHARE", 0.0)  # captures after a reply depend on its time
    monkeypatch.setattr(policy, "FIRST", 0.0)


def only_steps(monkeypatch) -> None:
    """Let prompts and messages run from Python, for tests that count the graphs of decode steps."""
    monkeypatch.setattr(forwards.Forwards, "_can_be_steps", lambda *_: False)
