"""The choice of the next token of each row, with the logits processors of each and the ids of its own text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import hf
from ..caches.paged import on_device
from .requests import Row


class Picker:
    """Chooses tokens as generate() does. more: processors of the caller. logprobs: whether log-probabilities are wanted.

    reads_ids: whether a processor reads the ids of the texts. They are then on the device, in `texts`, and processors run once
    for all rows whose texts and prompts have the same lengths: a batch cannot be padded for them.
    """

    def __init__(self, model: hf.PreTrainedModel, config: hf.GenerationConfig, more: Sequence[Any] | None, logprobs: bool):
        self.model, self.config, self.more, self.logprobs = model, config, more, logprobs
        self.made: dict[tuple[int, int], list[Any]] = {}
        self.samples = bool(config.do_sample)
        self.of_scores = self.processors(1, 0)  # all of them, if none reads ids
        self.reads_ids = any(map(hf.reads_ids, self.of_scores))
        self.sampling = hf.Sampling(self.of_scores) if self.samples and not (self.reads_ids or logprobs) else None
        self.texts: torch.Tensor | None = None

    def processors(self, prompt: int, limit: int) -> list[Any]:
        """Those for a prompt of so many tokens and at most `limit` new ones."""
        if (prompt, limit) not in self.made:
            self.made[prompt, limit] = hf.processors_of(self.model, self.config, prompt, limit, self.more)
        return self.made[prompt, limit]

    def make_room(self, rows: int, width: int, device: torch.device) -> None:
        """Allocate the texts of so many rows."""
        if self.reads_ids:
            with torch.inference_mode(False):
                self.texts = torch.zeros(rows, width, dtype=torch.int64, device=device)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Move rows of the texts."""
        if self.texts is not None:
            self.texts[target] = self.texts[source]

    def begin(self, place: int, ids: list[int], token: torch.Tensor) -> None:
        """Put a text at a place, followed by a token of the device."""
        if self.texts is not None:
            self.texts[place, : len(ids)] = on_device(ids, self.texts.device)
            self.texts[place, len(ids)] = token

    def add(self, lengths: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add a token to each of the first rows, at these places of their texts."""
        if self.texts is not None:
            rows = torch.arange(len(tokens), device=tokens.device)
            self.texts[rows, lengths.long()] = tokens

    def __call__(self, logits: torch.Tensor, rows: Sequence[Row], decoded: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(the next tokens, their log-probabilities or None) of logits (rows, vocabulary). decoded: whether the rows are the
        first ones of the texts; otherwise the host has read all of their ids."""
        scores = logits.float()
        if self.sampling is not None:
            return torch.multinomial(torch.nn.functional.softmax(self.sampling(None, scores), dim=-1), num_samples=1)[:, 0], None
        if not self.reads_ids:
            for processor in self.of_scores:
                scores = processor(None, scores)
        else:
            scores = self._by_length(scores, rows, decoded)
        tokens = torch.multinomial(scores.softmax(-1), 1)[:, 0] if self.samples else scores.argmax(-1)
        chosen = scores.log_softmax(-1).gather(1, tokens[:, None])[:, 0] if self.logprobs else None
        return tokens, chosen

    def _by_length(self, scores: torch.Tensor, rows: Sequence[Row], decoded: bool) -> torch.Tensor:
        groups: dict[tuple[int, int, int], list[int]] = {}
        forced = self.config.forced_eos_token_id is not None  # by the last token that a text may have
        for index, row in enumerate(rows):
            kind = len(row.prompt), row.limit if forced else 0, len(row.prompt) + row.launched
            groups.setdefault(kind, []).append(index)
        out = torch.empty_like(scores)
        for (prompt, limit, length), members in groups.items():
            at = on_device(members, scores.device)
            if decoded:
                assert self.texts is not None
                ids = self.texts[at, :length]
            else:
                ids = on_device([rows[each].ids for each in members], scores.device)
            some = scores[at]
            for processor in self.processors(prompt, limit):
                some = processor(ids, some)
            out[at] = some.to(out.dtype)  # a processor may return another one
        return out
