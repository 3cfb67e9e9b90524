"""The model as it is during one generate(): when it is compared with what it was, and the graphs that are valid for it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ... import hf
from ...caches import forward
from ...caches.stored import StoredCache
from ...streaming import refresh
from .entry import Entry, Inputs
from .graphs import DecodeGraphs
from .state import State, Uncapturable

MAX_CHANGES = 4  # consecutive calls with a new capture before a warning


class Present:
    """The model as it was compared last, and the graphs of the steps of one call.

    always: whether each step compares the model; otherwise only one that follows a forward from Python. say: see `Forwards`.
    outer: that of the call whose assistant this model is, whose loop calls it in every round and runs no other code meanwhile.
    """

    def __init__(
        self,
        graphs: DecodeGraphs,
        model: hf.PreTrainedModel,
        say: Callable[[str], None],
        *,
        always: bool,
        outer: Present | None = None,
    ):
        self.graphs = graphs
        self.model = model
        self.say = say
        self.always = always
        self.call: object = object() if outer is None else outer.call  # the rounds of an assistant are one call
        alone = outer is None or outer.always or graphs.ranks.several
        self.outer = None if alone else outer
        self.assistant: State | None = None  # of the assistant of this call, as compared last
        self.settled: set[Entry] = set()  # those whose state the ranks have compared in this call
        self.entries: dict[int, Entry] = {}  # the last one by number of tokens
        last = None if self.outer is None else self.outer.assistant
        # The loop itself may map other ids to the rows of the table (an assistant with another vocabulary).
        self.state = last if last is not None and graphs.last.has_same_table(model) else None
        self.assumed = False  # whether the state is that of the last call, with which the model has not been compared yet
        self.memory: list[torch.UntypedStorage] = []  # what a graph may read although the model has dropped it

    def forget(self) -> None:
        """Compare the whole model before the next replay: its Python runs now, and may change it."""
        self.state = self.assistant = None
        self.memory = []
        self.entries.clear()
        self._tell()

    def _tell(self) -> None:
        """Tell the call whose assistant this model is what has been compared."""
        if self.outer is not None:
            self.outer.assistant = self.state

    @property
    def due(self) -> bool:
        """Whether the next step compares the model."""
        return self.always or self.state is None

    def may_wait(self) -> bool:
        """Whether a graph may be replayed before a comparison that is due. If the model has changed, its results are discarded:
        it must not read memory that was freed, nor a table beyond its end."""
        last = self.graphs.last
        if not self.due or not last.has_same_table(self.model):
            return False
        if self.state is not None:
            return bool(self.memory)
        if not self.graphs.ranks.several:
            self.state = last.assumed(self.model)
        self.assumed = self.state is not None
        return self.assumed

    def compare(self) -> None:
        """Compare the model with what it was, and choose other graphs if it has changed. Raises Uncapturable."""
        last, version, self.state, self.assumed = self.state, self.graphs.path.version, None, False
        self.state, tensors = self._current()
        self._tell()
        changed = last is not None and last.differs(self.state) is not None
        if changed or last is None or self.graphs.path.now() != version:
            self.entries.clear()
        if changed or not self.always:  # if it changes again, the next step compares it before a replay that may be lost
            self.memory = []
        elif not self.memory:
            self.memory = [tensor.untyped_storage() for tensor in tensors]

    def _current(self) -> tuple[State, list[torch.Tensor]]:
        """See `Last.current`. Raises Uncapturable if no graph can be captured on one of the ranks."""
        found, reason = None, None
        if self.always and forward.streams(self.model):
            refresh(self.model)  # other frequencies cannot be examined in a rehearsal
        try:
            found = self.graphs.last.current(self.model)
        except Uncapturable as error:
            reason = str(error)
        reason = self.graphs.ranks.refusal(reason)
        if found is None or reason is not None:
            raise Uncapturable(reason)
        return found

    def entry(self, cache: StoredCache, inputs: Inputs, tokens: int) -> Entry:
        """The entry for a step with these inputs, of a graph of so many tokens, in a state that all ranks share."""
        entry = self._entry(cache, inputs, tokens)
        if entry.graph is None or entry not in self.settled:
            self.graphs.ranks.settle(entry)
            self.settled.add(entry)
        return entry

    def _entry(self, cache: StoredCache, inputs: Inputs, tokens: int) -> Entry:
        entry = self.entries.get(tokens)
        if entry is not None and entry.fits(cache.storage) and entry.accepts(inputs, tokens):
            return entry
        if entry is not None and (name := entry.grown(inputs)) is not None:
            entry.refused = f"its argument {name} grows by one element per step"
            return entry
        assert self.state is not None
        entry = self.entries[tokens] = self.graphs.find(cache, self.state, inputs, tokens, self.call)
        self.settled.discard(entry)
        if self.graphs.counted is not self.state and not self.assumed:
            self.graphs.changes = 0  # it has not changed
        if self.graphs.changes >= MAX_CHANGES:
            names = ", ".join(self.graphs.changed[:3])
            reason = f"each of the last {MAX_CHANGES} calls was captured again, as values that a step reads had changed"
            self.say(f"{reason} ({names})")
        return entry
