"""Records the graph of an entry: the first step is a rehearsal, the second is captured.

If a step of another number of tokens was rehearsed, the first one is captured, with the checks of a rehearsal.
"""

from __future__ import annotations

import pickle
import random
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ... import hf
from ...caches.contract import Storage
from ...caches.pool import references
from . import graphs as graph
from . import verify
from .cuda_graph import Graph, T
from .entry import Entry, Inputs, Rehearsal
from .policy import several
from .state import Uncapturable, read
from .undo import Mark, Written, undo

_DIFFERS = "its graph does not compute what the step computes, as a kernel is launched on another stream"
_DRAWS = "a step of several tokens draws random numbers, and some of its tokens may be padding"


class Recorder:
    """Runs the steps of one generate() over the tensors of an entry. run: the model's forward."""

    def __init__(self, graphs: graph.DecodeGraphs, model: hf.PreTrainedModel, run: Callable[..., Any]):
        self.graphs = graphs
        self.model = model
        self.run = run

    def step(self, entry: Entry, storage: Storage, inputs: Inputs, counted: tuple[int, ...] | None = None) -> torch.Tensor:
        """The logits of one step, by the graph of `entry` if it has one. Raises Uncapturable if none can be captured.

        counted: what sync() of the storage has got after the device; None for the number of tokens of the inputs.
        A rehearsal sets `entry.refused` if the step must not be captured; the step has then run, and must not run again.
        """
        graphs = self.graphs
        if entry.graph is not None:
            graphs.replays += 1
            return _replay(entry, entry.graph, inputs)
        began = time.perf_counter()
        try:
            return self._first(entry, storage, inputs, several(inputs["input_ids"]) if counted is None else counted)
        finally:
            graphs.seconds = time.perf_counter() - began

    def _first(self, entry: Entry, storage: Storage, inputs: Inputs, counted: tuple[int, ...]) -> torch.Tensor:
        """A step that is rehearsed or captured."""
        graphs, at_once, expected = self.graphs, entry.rehearsal is None, None
        body = entry.body(self.model, self.run, storage, graphs.ranks.peers)
        if at_once:
            self._check_positions(entry, storage)
            if self.must_rehearse(entry):
                return entry.kept(self._examined(entry, body).logits, inputs)
        elif not graphs.ranks.every("whether a capture is verified", not verify.needed(self.model)):
            expected = self._from_python(entry, body, storage, inputs, counted)
        new, held, mark = graph.new_graph(entry.device, graphs.shared), references(storage), Mark(storage, entry.device)
        if at_once:
            outputs = self._at_once(entry, body, new)
            if outputs is None:
                undo(storage, mark)
                storage.sync(entry.device, *counted)
                return entry.kept(self._examined(entry, body).logits, inputs)
        else:
            outputs = graphs.ranks.attempt(new.capture, body, communicates=False)
        assert entry.rehearsal is not None
        entry.logits, entry.others = outputs.logits, {name: outputs[name] for name in entry.rehearsal.others}
        del outputs  # with its cache, which refers to the storage
        holds = references(storage) - held  # a CUDA graph only has addresses; other graphs may hold tensors
        storage.recorded += holds  # in a line of its own, which would be a reference
        logits = _replay(entry, new, inputs)
        wrong = None
        if expected is not None and verify.differs(logits, expected):
            wrong = _DIFFERS
        elif entry.tokens > 1 and not torch.equal(mark.generator.get_state(), mark.random):
            wrong = _DRAWS  # which the capture has not done
        if (reason := graphs.ranks.refusal(wrong, "the first replay of a graph")) is not None:
            raise Uncapturable(reason)
        entry.graph = new
        graphs.captures += 1
        graphs.replays += 1
        return logits

    def _at_once(self, entry: Entry, body: Callable[[], Any], new: Graph) -> Any:
        """The output of a step that `new` captures without a rehearsal; None if it cannot, and has run in part."""
        try:
            return self._examined(entry, body, new)
        except Uncapturable as error:
            if "no memory" in str(error):
                raise
            # It may hold for this number of tokens alone, or the driver loads no kernel during a capture.
            self.graphs.captures_at_once = False
            return None

    def must_rehearse(self, entry: Entry) -> bool:
        """Whether the step runs from Python before it is captured: the first of its kind, or one whose capture is verified."""
        graphs = self.graphs
        if entry.rehearsal is not None:
            return False
        at_once = graphs.captures_at_once and not verify.needed(self.model) and graphs.knows(entry)
        return not graphs.ranks.every("whether a step is captured without a rehearsal", at_once)

    def _from_python(
        self, entry: Entry, body: Callable[[], Any], storage: Storage, inputs: Inputs, counted: tuple[int, ...]
    ) -> torch.Tensor:
        """The logits of a step, run from Python and then undone."""
        mark = Mark(storage, entry.device)
        outputs = self.graphs.ranks.attempt(lambda run: run(), body, communicates=True)
        expected = entry.kept(outputs.logits, inputs).clone()
        undo(storage, mark)
        storage.sync(entry.device, *counted)
        return expected

    def _check_positions(self, entry: Entry, storage: Storage) -> None:
        """Raise Uncapturable if the model is called without positions, and the place where it counts them is not known."""
        if "position_ids" in entry.tensors:
            return
        cache = entry.around(storage)
        with cache.on_device():
            on_device = isinstance(cache.get_seq_length(), torch.Tensor)
        if entry.tokens > 1:
            reason = "a step of several tokens is padded"
        elif not on_device:
            reason = f"a {type(cache).__name__} counts tokens on the host"
        elif not hf.is_stock(type(self.model).forward):
            reason = "its code, which is not of Transformers, may count tokens on the host"
        else:
            return
        raise Uncapturable(f"the model is called without position_ids, and {reason}")

    def _examined(self, entry: Entry, body: Callable[[], Any], new: Graph | None = None) -> Any:
        """The output of the first step of an entry, after a check that a graph repeats it. new: the graph that captures it;
        None for a rehearsal."""
        ranks = self.graphs.ranks
        if entry.tokens > 1 and hf.scales_by_tensor(self.model):
            raise Uncapturable("a layer quantises the inputs of all tokens by one scale, and those of a graph may be padding")

        path = self.graphs.path

        def traced() -> Any:
            own: list[str] = []
            try:
                with path.recorded(self.model) as own:
                    return body()
            finally:
                entry.own, entry.code = own[0] if own else None, path.version
                self.graphs.runs_own |= bool(own)

        before = read(self.model, of_user=True)
        written, generator = Written(before.tensors), hf.generator_of(entry.device)
        drawn = generator.get_state()
        run = graph.new_graph(entry.device, self.graphs.shared).rehearse if new is None else new.capture
        outputs = ranks.attempt(partial(_on_device, run, entry.device), traced, communicates=new is None)
        entry.own = ranks.own(entry.own)
        self.graphs.runs_own |= entry.own is not None
        if not isinstance(outputs, Mapping):
            raise Uncapturable(f"its output is a {type(outputs).__name__}, and a graph returns one with names")
        logits: torch.Tensor | None = outputs.get("logits")
        known = "logits", hf.CACHE, *entry.returned
        others = {name: value for name, value in outputs.items() if name not in known and value is not None}
        tensors = all(isinstance(value, torch.Tensor) for value in others.values())
        if logits is None or (others and not (tensors and entry.tokens == 1)):
            held = f"{', '.join(others)} besides the logits" if others else "no logits"
            raise Uncapturable(f"its output holds {held}, and a graph returns logits, of one token also other tensors")
        entry.check(logits)
        entry.others = others
        entry.rehearsal = Rehearsal(
            entry.state, entry.kind, entry.tokens, path.version, [*others], type(outputs), hf.CACHE in outputs
        )
        values, tensors_written, reason = None, written.names(self.model), None
        try:
            now = read(self.model, of_user=True)
            values = before.state.differs(now.state)
            if values is None and entry.own is not None and before.of_user != now.of_user:
                values = f"of {entry.own}"
        except Uncapturable as error:  # other ranks wait for what this one finds
            reason = str(error)
        may_undo = not (values or reason) and written.can_undo()
        if entry.tokens > 1 and not torch.equal(generator.get_state(), drawn):  # as many for the padding as for other tokens
            reason = reason or _DRAWS
        if changed := [*([] if values is None else [values]), *tensors_written]:
            reason = reason or f"a step changes values that the next step reads ({', '.join(changed[:3])})"
        entry.refused = ranks.refusal(reason)
        if entry.refused is not None and ranks.every("a step that is undone", may_undo):
            written.undo()  # its tokens may have been padded
            raise Uncapturable(entry.refused)
        if new is not None and (refused := entry.refused or entry.own) is not None:  # the device has not run the step
            raise Uncapturable(refused)
        self.graphs.note(entry)
        return outputs


def _on_device(run: Callable[[Callable[[], T]], T], device: torch.device, body: Callable[[], T]) -> T:
    """run(body). Raises RuntimeError if the step draws random numbers on the host, which a replay does not."""
    generators = _generators_of_host(device)
    before = [get() for get, _ in generators]
    result = run(body)
    if pickle.dumps([get() for get, _ in generators]) != pickle.dumps(before):
        for (_, put), state in zip(generators, before, strict=True):  # the step runs again
            put(state)
        raise RuntimeError("it draws random numbers on the host")
    return result


def _generators_of_host(device: torch.device) -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Functions that get and set the states of the random number generators of Python, NumPy and torch, not that of `device`."""
    found: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [(random.getstate, random.setstate)]
    if (numpy := sys.modules.get("numpy.random")) is not None:
        found.append((partial(numpy.get_state, legacy=False), numpy.set_state))
    if device.type != "cpu":
        found.append((lambda: torch.get_rng_state().numpy(), lambda state: torch.set_rng_state(torch.from_numpy(state))))
    return found


def _replay(entry: Entry, recorded: Graph, inputs: Inputs) -> torch.Tensor:
    recorded.replay()
    return entry.kept(entry.logits, inputs).clone()  # a clone, because the next step overwrites it
