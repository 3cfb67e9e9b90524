"""The decisions that ranks must share when they share a model by tensor parallelism.

A forward of such a model communicates: every rank must run the same forwards, and in each of them the same collectives. So the
ranks compare their inputs once per generate(), before its first forward, and a decode graph is rehearsed, captured and replayed
on all ranks or on none. A difference is refused with a message that names the rank. A model on one rank has `one_rank.OneRank`.
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ... import hf
from ...caches.memory import free_bytes
from ...caches.stored import StoredCache
from ..graphs.entry import Entry
from ..graphs.one_rank import OneRank, T
from ..graphs.state import Uncapturable
from .exchange import Exchange, nothing
from .facts import Fact, difference, facts
from .processes import Process, Processes, this_process

STOPPED = 60.0  # seconds that a rank whose step stopped waits for the others, which may compile the kernels of its size first
RETURN = 2.0  # seconds that a call of another model may take to return: its streamer ends before it
_WRITER = "_hf_fastattn_writer"  # an attribute of a cache; its copies have it too
_made: dict[tuple[int, ...], int] = {}  # how many Exchanges this process has created for these ranks
_groups: dict[tuple[int, ...], threading.RLock] = {}  # held by the thread that runs a call of a model of these ranks


class Ranks(OneRank):
    """The decisions of a model that several ranks share. `exchange.WAIT` is the time that they wait for a slow rank."""

    several = True
    tokens: int | None = None  # a checksum of those of the present call, None before it has run
    last: int | None = None  # that of the last call

    def __init__(self, model: hf.PreTrainedModel, mesh: Any):
        group = mesh.get_group()
        ranks = sorted(torch.distributed.get_process_group_ranks(group))
        store = torch.distributed.distributed_c10d._get_default_store()
        key = tuple(ranks)
        self.number = _made[key] = _made.get(key, 0) + 1
        prefix = f"hf_fastattn/{'-'.join(map(str, ranks))}/{self.number}"
        self.exchange = Exchange(group, ranks, store, prefix, model.device)
        self.lock = threading.RLock()  # collectives of two calls would mix
        self.group_lock = _groups.setdefault(key, threading.RLock())
        self.depth = 0
        self.arguments: dict[str, Fact] = {}
        self.has_clock = False  # whether a stopping criterion of the call measures time

    # ---- calls ----

    def meet(self, settings: Mapping[str, Any]) -> None:
        exchange = self.exchange
        found = exchange.gather("patch()", (facts(settings), this_process()))
        exchange.processes = Processes({rank: Process(*each[1]) for rank, each in zip(exchange.ranks, found, strict=True)})
        if differs := difference(exchange.ranks, [each[0] for each in found]):
            raise ValueError(f"The ranks of this model call patch() differently: {differs}.")

    def connect(self, size: int, dtype: torch.dtype) -> str | None:
        exchange, where = self.exchange, ("", "")
        reason: str | None = "Triton is not installed"
        with contextlib.suppress(ImportError):
            from ...kernels.host import symmetric

            reason = symmetric.why_not(exchange.device)
            where = symmetric.host(), "" if reason else symmetric.identity(exchange.device)
        found = exchange.gather("patch()", (reason, *where))
        reason = self._first([each[0] for each in found])
        if reason is not None or len({each[1] for each in found}) > 1:
            return reason or "they are on several hosts"
        reason = self.refusal(symmetric.why_no_access(exchange.device, [each[2] for each in found]), "patch()")
        if reason is not None:
            return reason
        from ...kernels.decode.all_reduce import block_bytes

        block = block_bytes(size, dtype)
        memory, reason = self._made(lambda: symmetric.allocate(len(exchange.ranks), block, exchange.device))
        if memory is not None:  # connect() waits for all ranks
            self.peers, reason = self._made(lambda: symmetric.connect(exchange.group, block, memory))
        if self.peers is not None:
            exchange.end_waits = self.peers.release
        return reason

    def _made(self, make: Callable[[], T]) -> tuple[T | None, str | None]:
        """What make() returns, or the reason why it fails on this rank or on another."""
        made, reason = None, None
        try:
            made = make()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0].rstrip(".")
        reason = self.refusal(reason, "patch()")
        return made if reason is None else None, reason

    @contextlib.contextmanager
    def call(self, arguments: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
        exchange = self.exchange
        with self.lock:
            if self.depth:  # a generate() within a generate()
                self._read(arguments())
                yield
                return
            if exchange.broken is not None:
                raise RuntimeError(
                    f"The process group of this model was aborted: {exchange.broken} Restart the processes on all ranks."
                )
            self.depth += 1
            self.last, self.tokens = self.tokens, None
            try:
                exchange.begin()
                self._read(arguments())
                with self._only_model():
                    yield
            except BaseException as error:
                failed = exchange.end(error)
                if failed is None:
                    raise
                raise RuntimeError(f"generate() ends on rank {exchange.rank}. {failed}") from error
            else:
                differs = exchange.end(None, self.tokens)
                if differs is not None:
                    raise RuntimeError(differs)
                if exchange.broken is not None:  # while it ran: its last sums may be incomplete
                    raise RuntimeError(f"The process group of this model was aborted: {exchange.broken}")
            finally:
                self.depth -= 1

    def generated(self, output: object, given: int) -> None:
        sequences = getattr(output, "sequences", output)
        if self.depth == 1 and isinstance(sequences, torch.Tensor) and sequences.dim() == 2 and sequences.dtype == torch.int64:
            self.tokens = zlib.crc32(sequences[:, given:].contiguous().cpu().numpy().tobytes())

    @contextlib.contextmanager
    def _only_model(self) -> Iterator[None]:
        """A time in which no other thread runs a call of another model of these ranks. Raises RuntimeError if one still does
        after RETURN seconds: on other ranks their order may differ."""
        if not self.group_lock.acquire(timeout=RETURN):
            raise RuntimeError(
                "Another thread runs generate() of another model of the same ranks, and the collectives of both would mix. "
                "Run one after the other, in the same order on all ranks."
            )
        try:
            yield
        finally:
            self.group_lock.release()

    def _read(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = facts(arguments)
        criteria = arguments.get("stopping_criteria") or ()
        self.has_clock = any(isinstance(each, hf.MaxTimeCriteria) for each in criteria)

    def agree(
        self, config: hf.GenerationConfig, settings: Mapping[str, Any], may_wait: bool, idle: list[int], needed: int
    ) -> list[int] | None:
        exchange, device = self.exchange, self.exchange.device
        mine = {**self.arguments, **facts({"generation_config": config, **settings})}
        generator, leads = hf.generator_of(device), exchange.rank == exchange.ranks[0]
        random = generator.get_state().numpy().tobytes().hex() if config.do_sample and leads else None
        found = exchange.gather("the begin of generate()", (mine, idle, needed, free_bytes(device), random, may_wait, self.last))
        arguments, idles, needs, free, randoms, waits, lasts = map(list, zip(*found, strict=True))
        if differs := difference(exchange.ranks, arguments):
            raise ValueError(
                f"generate() is called differently on the ranks of this model: {differs}. Pass the same inputs on all ranks."
            )
        if (differs := exchange.other_tokens(lasts)) is not None:
            raise RuntimeError(f"{differs} This was the last call.")
        self.may_wait = all(waits)
        if config.max_time is not None or self.has_clock:
            raise ValueError(
                "Each rank measures max_time for itself, and ranks that stop at different tokens would wait for each other. Use "
                "max_new_tokens."
            )
        common = [serial for serial in idle if all(serial in each for each in idles)]
        for rank, need, left in zip(exchange.ranks, needs, free, strict=True):
            if not common and left is not None and left < need:
                raise MemoryError(
                    f"The cache of this call needs {need} bytes ({need / 2**30:.2f} GiB) on rank {rank}, and {left} "
                    f"({left / 2**30:.2f} GiB) are free there. Ask for fewer new tokens, fewer rows or a shorter prompt."
                )
        if randoms[0] is not None:
            generator.set_state(torch.frombuffer(bytearray.fromhex(randoms[0]), dtype=torch.uint8))
        exchange.run()
        return common

    def wrote(self, cache: object) -> None:
        if isinstance(cache, hf.Cache):
            call = self.exchange.call
            vars(cache)[_WRITER] = f"call {call.number}.{call.count} of patch {self.number}"

    def count(self) -> None:
        call = self.exchange.call
        if call.failure is not None:
            raise RuntimeError(call.failure)
        call.begun = time.monotonic()  # before the number, which a thread reads first
        call.steps += 1

    # ---- graphs ----

    def every(self, what: str, value: bool) -> bool:
        return all(self.exchange.gather(what, value))

    def same(self, what: str, value: object) -> bool:
        found = self.exchange.gather(what, value)
        return all(each == found[0] for each in found)

    def refusal(self, reason: str | None, what: str = "the first step of a decode graph") -> str | None:
        return self._first(self.exchange.gather(what, reason))

    def own(self, code: str | None) -> str | None:
        found = self.exchange.gather("the code of a step", code)
        code, rank = next(((each, rank) for each, rank in zip(found, self.exchange.ranks, strict=True) if each), (None, 0))
        return code if len(set(found)) == 1 else f"{code} on rank {rank}"

    def settle(self, entry: Entry) -> None:
        state = "captured" if entry.graph is not None else "warm" if entry.warm else "new"
        found = self.exchange.gather("a step of a decode graph", (entry.refused, state))
        refused = [each[0] for each in found]
        if any(refused):
            entry.refused = next(self._named(index, refused) for index, each in enumerate(refused) if each)
        elif any(each[1] != state for each in found):  # as if the entry were new on all ranks
            entry.graph = entry.rehearsal = None

    def attempt(self, run: Callable[[Callable[[], T]], T], body: Callable[[], T], communicates: bool) -> T:
        whole = False

        def all_of_it() -> T:
            nonlocal whole
            result = body()
            whole = True
            return result

        result, reason = None, None
        try:
            result = super().attempt(run, all_of_it, communicates)
        except Uncapturable as error:
            reason = str(error)
        stopped = communicates and not whole
        what = "the rehearsal of a step" if communicates else "the capture of a step"
        try:
            found = self.exchange.gather(what, (reason, stopped), None if whole else STOPPED)
        except RuntimeError as error:
            raise error if reason is None else RuntimeError(f"A step stopped: {reason}.") from error
        reasons = [each[0] for each in found]
        if any(each[1] for each in found) and len(set(reasons)) > 1:  # some ranks wait in a collective for the others
            index = next(index for index, each in enumerate(found) if each[1])
            raise RuntimeError(f"Rank {self.exchange.ranks[index]} stopped within a step: {reasons[index]}.")
        if any(reasons):
            raise Uncapturable(self._first(reasons))
        return result  # type: ignore[return-value]  # without a reason there is a result

    def _first(self, reasons: list[str | None]) -> str | None:
        """The first reason of a rank; None if no rank has one."""
        return next((self._named(index, reasons) for index, each in enumerate(reasons) if each is not None), None)

    def _named(self, index: int, reasons: list[str | None]) -> str | None:
        """The reason of one rank, with its name if others have another reason or none."""
        reason = reasons[index]
        named = len(set(reasons)) == 1 or str(reason).startswith("on rank ")  # in an earlier step
        return reason if named else f"on rank {self.exchange.ranks[index]}, {reason}"

    def when_broken(self, drop_graphs: Callable[[], object]) -> None:
        self.exchange.drop_graphs = drop_graphs

    def close(self) -> None:
        self.exchange.leave()
        self.exchange.drop_graphs = self.exchange.end_waits = nothing
        self.peers = None

    def check_copy(self) -> None:
        raise TypeError(
            "A patched model under tensor parallelism cannot be copied: the layers of the copy would use the weights of the "
            "original. Load the model a second time."
        )


def of(model: hf.PreTrainedModel) -> OneRank:
    """The ranks that share this model."""
    mesh = hf.tensor_parallel_mesh(model)
    return OneRank() if mesh is None else Ranks(model, mesh)


@contextlib.contextmanager
def refusing(model: hf.PreTrainedModel) -> Iterator[None]:
    """The time of the checks of patch(). The other ranks of the model wait for this one: they are told of an error."""
    try:
        yield
    except BaseException as error:
        mesh = hf.tensor_parallel_mesh(model)
        with contextlib.suppress(RuntimeError, ValueError):  # there is no process group
            if mesh is not None:
                exchange = Ranks(model, mesh).exchange
                exchange.refuse(f"patch() failed on rank {exchange.rank}: {type(error).__name__}: {error}")
        raise


def facts_of_cache(cache: object) -> dict[str, str]:
    """What ranks compare of a given cache: its class, its number of tokens, and the last call that wrote it."""
    if not isinstance(cache, hf.Cache):
        return {hf.CACHE: type(cache).__name__}
    words = f"{type(cache).__name__} of {cache.get_seq_length()}"
    if isinstance(cache, StoredCache):
        words += f", with room for {cache.storage.capacity}"
    return {hf.CACHE: words, f"the last call that wrote {hf.CACHE}": vars(cache).get(_WRITER, "none")}


def least_bytes(model: hf.PreTrainedModel, kinds: tuple[hf.Kind, ...], rows: int, tokens: int) -> int:
    """Bytes of K and V that a rank stores at least: those of its share, if heads are divided among the ranks."""
    total = 0
    for shape, kind in zip(hf.layer_shapes(model.config), kinds, strict=False):
        total += kind.sees(tokens) * shape.num_kv_heads * (shape.head_dim + shape.value_dim)
    return rows * total * model.dtype.itemsize // hf.num_ranks(model)
