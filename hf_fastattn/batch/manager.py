"""A manager of continuous batching, with the names of Transformers': requests come at any time, and one thread runs them.

While there are requests, the thread runs a `Loop`, as generate_batch() does. Without them it waits, and holds neither pages nor
the lock of the model. The thread does not refer to the manager, and a manager that is dropped ends it.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from .. import hf
from ..kernels.checks import is_count
from .loop import Loop
from .requests import CHILD, Row

Open = Callable[[list[Row]], AbstractContextManager[Loop]]
_STOPPED = "The manager was stopped before the end of this request."


class Paused(threading.local):
    """The models whose managers this thread has paused."""

    def __init__(self) -> None:
        self.models: list[object] = []


paused = Paused()


class Work:
    """What a manager and its thread share, with `changed` as the lock. inbox: requests that no loop has. rows: the requests
    without a result, by id. results: those that nobody has fetched, oldest first. ending: "" or how the thread ends. paused: how
    many callers want it to wait; stepping: whether it does not. resumed: whether one of them has changed the model, perhaps.
    error: why it has ended by itself.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.inbox: deque[Row] = deque()
        self.rows: dict[str, Row] = {}
        self.cancelled: set[str] = set()
        self.results: deque[hf.GenerationOutput] = deque()
        self.handlers: dict[str, tuple[Callable[[hf.GenerationOutput], object], asyncio.AbstractEventLoop]] = {}
        self.thread: threading.Thread | None = None
        self.ending = ""
        self.paused = 0
        self.stepping = self.resumed = False
        self.error: BaseException | None = None

    @property
    def alive(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def end(self, how: str) -> None:
        """Let the thread end: after all requests ("soft"), or after the current step ("hard")."""
        with self.changed:
            self.ending = how if self.ending != "hard" else "hard"
            self.changed.notify_all()

    def deliver(self, result: hf.GenerationOutput) -> None:
        with self.changed:
            if result.is_finished():
                self.rows.pop(result.request_id, None)
                self.cancelled.discard(result.request_id)
            if (handler := self.handlers.get(result.request_id)) is None:
                self.results.append(result)
            else:
                if result.is_finished():
                    del self.handlers[result.request_id]
                try:
                    handler[1].call_soon_threadsafe(handler[0], result)
                except RuntimeError:  # its event loop is closed
                    self.results.append(result)
            self.changed.notify_all()

    def fail(self, reason: str) -> None:
        """End all requests."""
        with self.changed:
            self.inbox.clear()
            for row in [*self.rows.values()]:
                row.ended = True
                self.deliver(row.result(reason))

    def run(self, open_loop: Open, inference: bool) -> None:
        """What the thread does."""
        try:
            with torch.inference_mode(inference), torch.no_grad():
                while self._wait():
                    self._serve(open_loop)
        except BaseException as error:
            self.error = error
        finally:
            self.fail(_STOPPED if self.error is None else f"{type(self.error).__name__}: {self.error}")

    def _wait(self) -> bool:
        with self.changed:
            self.changed.wait_for(lambda: (self.inbox and not self.paused) or self.ending)
            return bool(self.inbox) and self.ending != "hard"

    def _serve(self, open_loop: Open) -> None:
        """Run requests until there are none, or until one needs more room for its text."""
        with open_loop([*self.inbox]) as loop:
            loop.on_result = self.deliver
            while self._next(loop):
                try:
                    loop.step()
                finally:
                    with self.changed:
                        self.stepping = False
                        self.changed.notify_all()

    def _next(self, loop: Loop) -> bool:
        """Give the loop its requests. Returns whether a step follows."""
        with self.changed:
            self.changed.wait_for(lambda: not self.paused or self.ending == "hard")
            if self.resumed:
                loop.forget()
                self.resumed = False
                if not loop.busy:
                    return False  # the next requests may need pages of another dtype
            loop.waiting += [row for row in self.inbox if row.id in self.cancelled]
            self.inbox = deque(row for row in self.inbox if row.id not in self.cancelled)
            while self.inbox and loop.holds(self.inbox[0]):
                loop.waiting.append(self.inbox.popleft())
            loop.cancelled |= self.cancelled
            self.cancelled.clear()
            self.stepping = loop.busy and self.ending != "hard"
            return self.stepping


class Manager:
    """Takes requests and returns results, as the manager of Transformers' init_continuous_batching() does.

    Not supported, and refused: logits processors per request. Graphs are captured when their sizes are first met, and pages are
    kept with the model: warmup() and keep_for_next_session have no effect.
    """

    warmed_up = True
    batch_processor = None

    def __init__(
        self,
        model: hf.PreTrainedModel,
        config: hf.GenerationConfig,
        read: Callable[[list[list[int]], int | None], list[tuple[list[int], int]]],
        open_loop: Open,
    ):
        self.model, self.generation_config, self._read, self._open = model, config, read, open_loop
        self._work = Work()
        self._count = 0
        self._finalizer = weakref.finalize(self, self._work.end, "hard")

    # ---- the thread ----

    def is_running(self) -> bool:
        """Whether the thread has been started and is alive."""
        return self._work.alive

    @property
    def fatal_error(self) -> BaseException | None:
        """Why the thread has ended by itself, or None."""
        return self._work.error

    @property
    def background_thread_status(self) -> Manager:
        """What has `fatal_error` in Transformers' manager."""
        return self

    def warmup(self) -> None:
        """Does nothing."""

    def start(self) -> None:
        """Start the thread, in the inference mode of the caller. After a stop() that did not wait, this waits for it."""
        work = self._work
        if work.alive and not work.ending:
            return
        self.join()
        work.ending, work.error = "", None
        given = self._open, torch.is_inference_mode_enabled()
        work.thread = threading.Thread(target=work.run, args=given, daemon=True, name="hf_fastattn batches")
        work.thread.start()

    def stop(
        self, block: bool = True, timeout: float | None = None, keep_for_next_session: bool = False, hard_stop: bool = False
    ) -> None:
        """End the thread after all requests, or with hard_stop after the current step: other requests fail. block: wait for it,
        at most `timeout` seconds. Raises RuntimeError inside pause()."""
        if self._work.paused and self._work.alive:
            raise RuntimeError("The manager is paused and cannot end. Leave the pause() before stop().")
        self._work.end("hard" if hard_stop else "soft")
        if block:
            self.join(timeout=timeout)

    def join(self, stop_trigger_time: float = 0.0, timeout: float | None = None) -> None:
        """Wait for the end of the thread, at most `timeout` seconds."""
        if self._work.thread is not None:
            self._work.thread.join(timeout)

    def destroy(self) -> None:
        """End the thread."""
        if self.is_running():
            self.stop()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A context in which no step runs, and the model may be changed. Requests stay."""
        work = self._work
        if not work.alive:
            raise RuntimeError("The manager does not run, so it cannot pause. Call start() before.")
        if threading.current_thread() is work.thread:
            raise RuntimeError("pause() was called by code that the manager runs, and would wait for it. Use another thread.")
        with work.changed:
            work.paused += 1
            work.changed.wait_for(lambda: not work.stepping)
        paused.models.append(self.model)
        try:
            yield
        finally:
            paused.models.remove(self.model)
            with work.changed:
                work.paused -= 1
                work.resumed = True
                work.changed.notify_all()

    def __enter__(self) -> Manager:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop(hard_stop=error[0] is not None)

    # ---- requests ----

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **logit_processor_kwargs: Any,
    ) -> str:
        """Add a request, and return its id. streaming: a result after each token. Raises ValueError and TypeError for a request
        that cannot run, and RuntimeError after the end of the thread."""
        names = None if request_id is None else [request_id]
        ends = None if eos_token_id is None else frozenset(hf.ends_of(eos_token_id))
        if not isinstance(request_id, str | None) or not all(map(is_count, ends or ())):
            raise TypeError(
                f"request_id is a string, and eos_token_id a number or a list of them; got {request_id!r} and {eos_token_id!r}."
            )
        return self._add([input_ids], names, max_new_tokens, streaming, record_timestamps, ends, logit_processor_kwargs)[0]

    def add_requests(
        self,
        inputs: list[list[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **logit_processor_kwargs: Any,
    ) -> list[str]:
        """Add requests, all or none of them, and return their ids."""
        return self._add(inputs, None, max_new_tokens, streaming, record_timestamps, None, logit_processor_kwargs)

    def _add(
        self,
        inputs: list[list[int]],
        names: list[str] | None,
        new: int | None,
        streaming: bool,
        stamped: bool,
        ends: frozenset[int] | None,
        others: dict[str, Any],
    ) -> list[str]:
        if others:
            raise ValueError(
                f"A request does not support {', '.join(map(repr, others))}: all requests of a manager have one "
                "GenerationConfig. Set it there, or create a manager for each."
            )
        config = self.generation_config
        if ends not in (None, frozenset(hf.ends_of(config.eos_token_id))) and (config.min_new_tokens or config.min_length):
            raise ValueError("eos_token_id of a request does not go with min_new_tokens and min_length, which know one for all.")
        texts, work = self._read(inputs, new), self._work
        with work.changed:
            if work.ending or work.error is not None:
                why = "was stopped" if work.error is None else f"has ended ({type(work.error).__name__}: {work.error})"
                raise RuntimeError(f"The manager {why} and takes no request. Call start() again, or create another one.")
            if names is None:
                names = []
                while len(names) < len(texts):
                    names += [name] if (name := f"req_{self._count}") not in work.rows else []
                    self._count += 1
            copies = config.num_return_sequences or 1
            made = [
                Row(name, *text, copies, stamped, ends=ends, streamed=streaming) for name, text in zip(names, texts, strict=True)
            ]
            rows = {each.id: each for row in made for each in (row, *(row.twin(index) for index in range(copies - 1)))}
            if taken := rows.keys() & work.rows.keys():
                raise ValueError(f"There is a request {min(taken)!r} already, which has no result yet. Give another request_id.")
            work.rows |= rows
            work.inbox += made
            work.changed.notify_all()
        return names

    def cancel_request(self, request_id: str) -> None:
        """Let a request, and those that continue its prompt, end before the next step, with an error."""
        with self._work.changed:
            if any(request_id in (name, name.partition(CHILD)[0]) for name in self._work.rows):
                self._work.cancelled.add(request_id)

    # ---- results ----

    def register_result_handler(self, request_id: str, callback: Callable[[hf.GenerationOutput], object]) -> None:
        """Call a function on the running event loop with each result of a request, also with those that are there already."""
        work, events = self._work, asyncio.get_running_loop()  # which raises before results are taken
        with work.changed:
            there = [result for result in work.results if result.request_id == request_id]
            work.results = deque(result for result in work.results if result.request_id != request_id)
            work.handlers[request_id] = callback, events
            for result in there:
                work.deliver(result)

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> hf.GenerationOutput | None:
        """The oldest result, of any request or of this one, which is removed. None after `timeout` seconds, or if none comes."""
        work = self._work

        def found() -> hf.GenerationOutput | None:
            return next((each for each in work.results if request_id in (None, each.request_id)), None)

        def none_comes() -> bool:
            return not work.alive or (request_id is not None and request_id not in work.rows)

        with work.changed:
            while (result := found()) is None and not none_comes():
                # The thread may end without a notice.
                if not work.changed.wait(0.5 if timeout is None else min(timeout, 0.5)) and timeout is not None:
                    if timeout <= 0.5:
                        break
                    timeout -= 0.5
            if (result := found()) is not None:
                work.results.remove(result)
            return result

    def __iter__(self) -> Iterator[hf.GenerationOutput]:
        """Results as they come, until the thread has ended."""
        while self.is_running() or self._work.results:
            if (result := self.get_result(timeout=0.1)) is not None:
                yield result

    def request_id_iter(self, request_id: str) -> Iterator[hf.GenerationOutput]:
        """The results of a request as they come: of one that streams, after each token."""
        while (result := self.get_result(request_id)) is not None:
            yield result
            if result.is_finished():
                return
