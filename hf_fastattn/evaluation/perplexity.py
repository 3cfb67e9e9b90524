"""Decode perplexity: a text passes through the cache token by token, by plain generate().

Log-likelihood tasks read a text in one pass, which is prefill. Here each token is one decode step: a logits processor records the
likelihood of the next token of the text and forces generate() to choose it. The measurement therefore covers everything that
decoding uses: the decode kernel, the cache, left padding, windows and sinks, captured graphs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from tqdm import tqdm

from .. import hf


@dataclass
class Excerpts:
    """Rows of a text: prompts (rows, width), left-padded with `pad`, their mask, and the tokens that follow (rows, tokens)."""

    prompts: torch.Tensor
    mask: torch.Tensor
    targets: torch.Tensor
    pad: int


def excerpts(tokenizer: hf.PreTrainedTokenizerBase, text: str, *, rows: int, tokens: int, prompt: int) -> Excerpts:
    """`rows` evenly spaced excerpts of the text, with prompts of `prompt` / 2 to `prompt` tokens.

    Raises ValueError if the text is too short.
    """
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
    ids = ids[~torch.isin(ids, torch.tensor(tokenizer.all_special_ids, dtype=ids.dtype))]  # end-of-text ends generate()
    need = rows * (prompt + tokens)
    if len(ids) < need:
        raise ValueError(
            f"Decode perplexity of {rows} rows of {prompt} + {tokens} tokens needs a text of {need} tokens, and this one has "
            f"{len(ids)}. Take a longer text, fewer decode_tokens or a smaller batch_size."
        )
    lengths = [prompt - (prompt // 2) * row // max(1, rows - 1) for row in range(rows)]
    starts = [len(ids) // rows * row + prompt - length for row, length in enumerate(lengths)]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    prompts = torch.full((rows, prompt), pad)
    mask = torch.zeros(rows, prompt, dtype=torch.long)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        prompts[row, prompt - length :] = ids[start : start + length]
        mask[row, prompt - length :] = 1
    targets = [ids[start + length :][:tokens] for start, length in zip(starts, lengths, strict=True)]
    return Excerpts(prompts, mask, torch.stack(targets), pad)


def decode_nats(model: hf.PreTrainedModel, given: Excerpts, label: str = "") -> list[list[float]]:
    """-log p, in nats, of every target token except the first of each row, which prefill predicts: (rows, tokens - 1).

    A row is NaN if the first is not finite.
    """
    device, tokens = model.device, given.targets.shape[1]
    targets, steps = given.targets.to(device), list[torch.Tensor]()

    def force(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        target = targets[:, len(steps), None]
        steps.append(-scores.float().log_softmax(-1).gather(1, target))
        bar.update()
        return torch.full_like(scores, -math.inf).scatter_(1, target, 0.0)

    with tqdm(total=tokens, desc=f"Decode perplexity {label}".rstrip(), unit="token", disable=None) as bar:
        out = model.generate(  # type: ignore[operator]
            given.prompts.to(device),
            attention_mask=given.mask.to(device),
            max_new_tokens=tokens,
            do_sample=False,
            num_beams=1,
            pad_token_id=given.pad,
            logits_processor=[force],
        )
    if not torch.equal(out[:, given.prompts.shape[1] :].cpu(), given.targets):
        raise ValueError("generate() did not follow the text; a generation setting of this model overrides logits processors.")
    nats = torch.cat(steps, 1).double()
    return torch.where(nats[:, :1].isfinite(), nats[:, 1:], math.nan).tolist()
