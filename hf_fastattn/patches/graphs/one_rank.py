"""The decisions of a model that is on one rank; `ranks.Ranks` makes them for several."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ... import hf
from .entry import Entry
from .state import Uncapturable

if TYPE_CHECKING:
    from ...kernels.decode.all_reduce import Peers

T = TypeVar("T")

_AROUND = ("hf_fastattn", "torch", "triton")  # packages that run the code of models
# What a rehearsal finds (record.py, cuda_graph.py), and what CUDA says in a capture.
_ON_HOST = {word: word for word in ("reads a value on the host", "draws random numbers on the host")}
_ON_HOST["not permitted when stream is capturing"] = "reads a value on the host"


class OneRank:
    """The decisions of a model that is on one rank."""

    several = False
    may_wait = True  # whether the loop of the call may run a step ahead, on all ranks
    peers: Peers | None = None  # memory that the GPUs of all ranks can write

    @contextlib.contextmanager
    def call(self, arguments: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
        """The context of one generate(). arguments: returns the arguments of the call."""
        yield

    def generated(self, output: object, given: int) -> None:
        """Note the tokens of a call that has run, the first `given` of which are its prompt."""

    def meet(self, settings: Mapping[str, Any]) -> None:
        """Compare the settings of patch(). Raises ValueError on all ranks if they differ."""

    def connect(self, size: int, dtype: torch.dtype) -> str | None:
        """Share memory for sums of rows of so many elements. Returns the reason why the ranks cannot, or None."""
        return "the model is on one rank"

    def agree(
        self, config: hf.GenerationConfig, settings: Mapping[str, Any], may_wait: bool, idle: list[int], needed: int
    ) -> list[int] | None:
        """Compare the inputs of a call before its first forward. Returns those of the idle storages that all ranks hold.

        settings: values besides the arguments and `config` that must be equal. may_wait: whether the loop of the call may
        run a step ahead on this rank. idle: the serial numbers of the idle storages that suit the call. needed: bytes that a new
        one needs at least, 0 if none is needed. If tokens are sampled, all ranks continue with the random numbers of the first
        rank. Raises an error on all ranks: ValueError if anything differs, RuntimeError if the last call has generated other
        tokens on one of them, MemoryError if one of them has no memory for a new storage.
        """
        return None

    def wrote(self, cache: object) -> None:
        """Note that the current call writes this cache."""

    def count(self) -> None:
        """Called before each forward of a call. Raises RuntimeError if another rank has failed."""

    def every(self, what: str, value: bool) -> bool:
        """Whether a condition holds on all ranks. what: the place in the code, for ranks that meet at other places."""
        return value

    def same(self, what: str, value: object) -> bool:
        """Whether a value is the same on all ranks. what: see `every`."""
        return True

    def refusal(self, reason: str | None, what: str = "") -> str | None:
        """The reason why no step of a call can be captured, on this rank or on another. what: see `every`."""
        return reason

    def own(self, code: str | None) -> str | None:
        """The function of the user that a step ran, on this rank or on another; None if it ran none."""
        return code

    def settle(self, entry: Entry) -> None:
        """Bring the graph of a step into the same state on all ranks, before the step runs."""

    def attempt(self, run: Callable[[Callable[[], T]], T], body: Callable[[], T], communicates: bool) -> T:
        """Return run(body). After an error the step runs uncaptured, where an error of the caller is raised again.

        communicates: whether it runs the collectives of the step, as a rehearsal does and a capture does not. An error of a class
        that is not of a library is the caller's own, who may raise it only once: a rehearsal on one rank lets it through.
        """
        try:
            return run(body)
        except Exception as error:
            if communicates and not (self.several or hf.is_trusted(type(error).__module__)):
                raise
            raise Uncapturable(_reason(error)) from error

    def when_broken(self, drop_graphs: Callable[[], object]) -> None:
        """Set the function that drops the graphs before the process group ends. It must not refer to the model."""

    def close(self) -> None:
        """Tell the other ranks that this one takes part in no further call."""

    def check_copy(self) -> None:
        """Raise TypeError if the model cannot be copied."""


def _reason(error: Exception) -> str:
    """Why a step in which this error was raised cannot be captured."""
    message, where = str(error).strip().partition("\n")[0], _where(error)
    if found := next((what for words, what in _ON_HOST.items() if words in message), None):
        place = where or message.partition(", at ")[2]
        return f"its code {found}{place and f', in {place}'}, and a graph only repeats what the device does"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return f"there is no memory for its graph ({message})"
    stopped = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return f"its code does something that a graph cannot{where and f', in {where}'} ({stopped})"


def _where(error: Exception) -> str:
    """The function of the model's code in which an error was raised, as text; "" if none was running."""
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):  # f_locals would keep what the frames hold alive
        name = frame.f_code.co_qualname
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _AROUND and not frame.f_code.co_name.startswith("__"):
            found = f"{name.rpartition('<locals>.')[2]}()"
    return found
