"""The largest difference between two runs of one model that rounding can explain, in nats. It is measured, because theoretical
bounds are too loose.

A model computes sums of products. A sum of k terms, rounded k times by at most `unit`, the dtype's unit roundoff, has an error of
about sqrt(k) * unit relative to its terms (Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", SIAM J.
Sci. Comput. 41, 2019). The growth of such errors through the layers depends on the weights. A worst-case bound multiplies the
condition numbers of all layers, and exceeds the log-likelihoods. The growth is therefore measured, as in Monte Carlo arithmetic
(Parker, 1997): the model reads its own examples once unchanged, and once with the output of every module perturbed by a relative
normal deviate of sqrt(K) * unit, where K is the length of the longest sum. This is more than any machine rounds: kernels add in
blocks, which have smaller errors, and most sums are shorter than K. `token` is the largest change of a token's log-likelihood,
`margin` the largest change of the most likely token's lead over the second.

Each of two runs may have these errors. Over n tokens the errors accumulate like sqrt(n), and so do those of the sum itself, whose
terms have one sign:

    |ll_a - ll_b| <= 2 * sqrt(n) * (token + unit * |ll|)

In 16 bits sums are added in float32, and each value that is stored is rounded. There the outputs are perturbed by `unit`, and
`once` is the difference that one perturbation makes. Attention is a few of the operations of a layer, so two right backends
differ by less: in bfloat16 the log-likelihoods of SmolLM2-135M with sdpa, eager and lean by a root mean square of 0.07 nats, and
`token` is 1.1.

Perplexities are exponentials of sums of log-likelihoods, and choices are comparisons of them. Both amplify rounding without limit
and contain no information beyond the log-likelihoods. They are reported, but do not decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import hf

TOKENS = 256  # tokens of each text that are read for the measurement


@dataclass(frozen=True)
class Rounding:
    """unit: the unit roundoff. token, margin: its effect on a token's log-likelihood, in nats, and on a lead in logits."""

    unit: float = 0.0
    token: float = 0.0
    margin: float = 0.0

    def nats(self, loglikelihood: float, tokens: int) -> float:
        """The largest difference of two log-likelihoods of `tokens` tokens that rounding explains."""
        return 2 * math.sqrt(tokens) * (self.token + self.unit * abs(loglikelihood))

    def once(self, loglikelihood: float, tokens: int) -> float:
        """The largest change of a log-likelihood of `tokens` tokens by one perturbation; its sum is rounded once more."""
        return math.sqrt(tokens) * self.token + 2 * self.unit * abs(loglikelihood)

    @property
    def measured(self) -> bool:
        """False if the logits were not finite."""
        return math.isfinite(self.token) and math.isfinite(self.margin)

    def ties(self, lead: float) -> bool:
        """Whether a token with this lead in one run may be second in another."""
        return lead <= 2 * self.margin


EXACT = Rounding()


@torch.no_grad()
def measure(model: hf.PreTrainedModel, texts: Sequence[torch.Tensor]) -> Rounding:
    """The Rounding of a model, measured on texts of its evaluation: ids (tokens,), of which TOKENS are read.

    In the result token and margin are NaN or infinite if the model's logits are.
    """
    unit = torch.finfo(model.dtype).eps / 2
    longest = max(map(len, texts))  # the length of the sums in attention
    terms = max([longest, *(weight.shape[-1] for weight in model.parameters() if weight.ndim > 1)])
    size = unit * (math.sqrt(terms) if model.dtype.itemsize >= 4 else 1)
    wide = torch.promote_types(model.dtype, torch.float32)
    leaves = [module for module in model.modules() if next(module.children(), None) is None]

    def off(module: torch.nn.Module, arguments: tuple[object, ...], out: object) -> torch.Tensor | None:
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            return (out * (1 + size * torch.randn_like(out, dtype=wide))).to(out.dtype)
        return None

    found = [torch.zeros(2)]
    for ids in texts:
        ids = ids[None, :TOKENS].to(model.device)
        if ids.shape[1] < 2:
            continue
        plain = model(ids).logits[:, :-1].to(wide)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            hooks = [module.register_forward_hook(off) for module in leaves]
            try:
                moved = model(ids).logits[:, :-1].to(wide)
            finally:
                for hook in hooks:
                    hook.remove()
        said, two = ids[:, 1:, None], plain.topk(2).indices
        change = (moved.log_softmax(-1) - plain.log_softmax(-1)).gather(2, said).abs().max()
        lead = (moved - plain).gather(2, two).diff().abs().max()
        found.append(torch.stack([change, lead]).float().cpu())
    return Rounding(unit, *torch.stack(found).amax(0).tolist())  # a NaN remains
