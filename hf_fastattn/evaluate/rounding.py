"""How far rounding alone may bring two runs of one model apart, in nats. It is measured, since no bound on paper is sharp.

A model computes sums of products. A sum of k terms, rounded k times by at most `unit`, the dtype's unit roundoff, is off by about
sqrt(k) * unit relative to its terms (Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", SIAM J. Sci.
Comput. 41, 2019). How such errors grow on their way through the layers is a property of the weights; a worst case multiplies the
condition numbers of all layers, and is larger than the log-likelihoods themselves. So it is measured, as Monte Carlo arithmetic
does (Parker, 1997): the model reads its own examples once plainly, and once with the output of every module off by a normal
deviate of sqrt(K) * unit, K being the longest sum of all. That is more than any machine rounds: kernels add in blocks, whose
errors are smaller, and most sums are shorter than K. `token` is the largest change of a token's log-likelihood, `margin` that of
the likeliest token's lead over the next one.

Two runs may each be off by that much. Over n tokens their errors add up like sqrt(n), and so do those of the sum itself, whose
terms have one sign:

    |ll_a - ll_b| <= 2 * sqrt(n) * (token + unit * |ll|)

Perplexities are exponentials of sums of log-likelihoods, and choices are comparisons of them. Both amplify rounding without limit
and say nothing that log-likelihoods do not, so they are shown, and decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import hf

TOKENS = 256  # of each text that are read to measure


@dataclass(frozen=True)
class Rounding:
    """unit: the unit roundoff; token, margin: what it does to a token's log-likelihood, in nats, and to a lead among logits."""

    unit: float = 0.0
    token: float = 0.0
    margin: float = 0.0

    def nats(self, loglikelihood: float, tokens: int) -> float:
        """The most that two log-likelihoods of so many tokens may differ by."""
        return 2 * math.sqrt(tokens) * (self.token + self.unit * abs(loglikelihood))

    def ties(self, lead: float) -> bool:
        """Whether a token that leads by so much in one run may be the second in another."""
        return lead <= 2 * self.margin


EXACT = Rounding()


@torch.no_grad()
def measure(model: hf.PreTrainedModel, texts: Sequence[torch.Tensor], longest: int) -> Rounding:
    """The Rounding of a model, from the texts it is evaluated on: ids (tokens,), of which TOKENS are read.

    longest: tokens of the longest text, all of which attention sums over.
    """
    unit = torch.finfo(model.dtype).eps / 2
    terms = max([longest, *(weight.shape[-1] for weight in model.parameters() if weight.ndim > 1)])
    leaves = [module for module in model.modules() if next(module.children(), None) is None]

    def off(module: torch.nn.Module, arguments: tuple[object, ...], out: object) -> torch.Tensor | None:
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            return out * (1 + math.sqrt(terms) * unit * torch.randn_like(out))
        return None

    token = margin = 0.0
    for ids in texts:
        ids = ids[None, :TOKENS].to(model.device)
        if ids.shape[1] < 2:
            continue
        plain = model(ids).logits[:, :-1]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            hooks = [module.register_forward_hook(off) for module in leaves]
            try:
                moved = model(ids).logits[:, :-1]
            finally:
                for hook in hooks:
                    hook.remove()
        said, two = ids[:, 1:, None], plain.topk(2).indices
        change = (moved.log_softmax(-1) - plain.log_softmax(-1)).gather(2, said).abs().max()
        lead = (moved - plain).gather(2, two).diff().abs().max()
        token, margin = max(token, change.item()), max(margin, lead.item())
    return Rounding(unit, token, margin)
