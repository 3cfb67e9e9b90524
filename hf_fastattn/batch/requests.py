"""The texts of a job, from the prompt to the result."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from .. import hf
from ..caches.pages import Held

CHILD = "__child#"  # between the id of a request and the number of a text that continues its prompt


class BatchError(RuntimeError):
    """Requests of generate_batch() have failed. results: of all requests by id, in which `error` says why one has failed."""

    def __init__(self, message: str, results: dict[str, hf.GenerationOutput]):
        super().__init__(message)
        self.results = results


@dataclass(eq=False)
class Row:
    """One text. prompt: its ids. limit: the most new tokens. copies: how many texts continue it, each from a token of its own.

    new: the new ids that the host has read. launched: number of new tokens whose steps have begun. done: tokens whose K and V
    have been written, or will be by a step that has begun. pages: those that hold them, of each pool. old: whether weights
    that have changed since have read some of them. ends: ids that end this text, None for those of the job. streamed: whether
    each token is reported.
    """

    id: str
    prompt: list[int]
    limit: int
    copies: int = 1
    stamped: bool = False
    new: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stamps: list[float] = field(default_factory=list)
    pages: Held = field(default_factory=list)
    done: int = 0
    launched: int = 0
    ends: frozenset[int] | None = None
    streamed: bool = False
    ended: bool = False
    old: bool = False
    made: float = field(default_factory=time.perf_counter)
    begun: float = -1.0

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.new if self.new else self.prompt

    @property
    def next(self) -> int:
        """Number of tokens whose K and V are stored when the host has read one more, or none is left."""
        return min(len(self.ids) + 1, len(self.prompt) + self.limit - 1)

    def twin(self, index: int) -> Row:
        """A text that continues the same prompt."""
        more: dict[str, Any] = {name: getattr(self, name) for name in ("stamped", "made", "begun", "ends", "streamed")}
        return Row(f"{self.id}{CHILD}{index}", self.prompt, self.limit, **more)

    def last(self, count: int) -> list[int]:
        """The last ids."""
        return self.prompt[len(self.new) - count :] + self.new if count > len(self.new) else self.new[-count:]

    def take(self, token: int, logprob: float | None) -> None:
        """Add a token."""
        self.new.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if self.stamped:
            self.stamps.append(time.perf_counter())

    def result(self, error: str | None = None) -> hf.GenerationOutput:
        """The result, or what there is of it before the end."""
        status = hf.RequestStatus
        return hf.GenerationOutput(
            request_id=self.id,
            prompt_ids=self.prompt,
            generated_tokens=[*self.new],
            logprobs=[*self.logprobs],
            error=error,
            status=status.DECODING if not self.ended else status.FINISHED if error is None else status.FAILED,
            created_time=self.made,
            lifespan=(self.begun, time.perf_counter() if self.ended else -1),
            timestamps=[*self.stamps] if self.stamped else None,
        )
