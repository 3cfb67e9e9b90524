"""Sample: temperature, top-k, top-p, min-p, softmax and the draw of one token of each row, in one launch after that of its noise.

    token = argmax over the kept i of p[i] / noise[i],  p = softmax(scores / temperature),  noise ~ Exp(1)

This is how torch.multinomial draws one token; `exponential_` fills as many numbers as there, so that seeds give the same tokens.
Programs read a part of a row each. With top_k they store the candidates of their part, the last one to finish finds the kept
ones: the vocabulary is read once, unless more than SLOTS candidates of a part are equal. Without top_k a token is drawn from all,
and the last program reads the row again to see whether top_p keeps it: if not, top_p keeps nothing that is less probable, and the
next draw is among the others. (The expected number of readings is 2.1 for top_p = 0.9.) min_p without top_k adds one reading.
Rounds: exp(x - maximum) and its sums in fp32, as torch, but in another order of summation. Limits: fp32 scores; top_k up to
MOST_K; the last program of a row waits for none. Oracle: `_sample_torch`, and Transformers' processors before torch.multinomial.
Source: Milakov, Gimelshein, "Online normalizer calculation for softmax" (2018), section 4, reads softmax and top-k at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU tensors need no Triton
    triton = None

from .. import INTERPRETED
from ..host import gpu, launch

MOST_K = 64  # the largest top_k
SLOTS = 128  # candidates that a program can store, so that it need not find exactly top_k
BLOCK = 4096  # tokens of a program, unless there would be more than MOST_PARTS
MOST_PARTS = 64


@dataclass(frozen=True, slots=True)
class Settings:
    """How tokens are drawn, in this order. top_k: 0 for all tokens. top_p: 1 for all. min_p: 0 for all."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass
class Sampler:
    """Draws tokens in one stream at a time: it keeps what programs of a launch share. rows, vocab: of these tensors."""

    rows: int = 0
    vocab: int = 0
    tensors: tuple[torch.Tensor, ...] = field(default=())

    def __call__(self, scores: torch.Tensor, settings: Settings) -> torch.Tensor:
        """int64 (rows, 1): a token of each row of scores, fp32 (rows, vocab), drawn with torch's default generator.

        A row without a finite maximum, or with NaN, fails as in torch.multinomial.
        """
        rows, vocab = scores.shape
        noise = torch.empty(rows, vocab, dtype=torch.float32, device=scores.device).exponential_()
        tokens = torch.empty(rows, 1, dtype=torch.int64, device=scores.device)
        if rows > self.rows or vocab != self.vocab or self.tensors[0].device != scores.device:
            self._make_room(rows, vocab, scores.device)
        _prepare((scores, noise, *self.tensors, tokens), settings)(scores, noise, *self.tensors, tokens)
        return tokens

    def _make_room(self, rows: int, vocab: int, device: torch.device) -> None:
        self.rows, self.vocab = rows, vocab
        parts = _parts(vocab)[1]
        with torch.inference_mode(False):
            self.tensors = (
                torch.empty(rows, parts, SLOTS, dtype=torch.float32, device=device),
                torch.empty(rows, parts, SLOTS, dtype=torch.float32, device=device),
                torch.empty(rows, parts, SLOTS, dtype=torch.int32, device=device),
                torch.empty(rows, parts, 2, dtype=torch.float32, device=device),
                torch.empty(rows, parts, 2, dtype=torch.int32, device=device),
                torch.zeros(rows, dtype=torch.int32, device=device),
            )


def takes(scores: object) -> bool:
    """Whether a Sampler draws from these scores."""
    if triton is None or torch.compiler.is_compiling() or type(scores) is not torch.Tensor or scores.dim() != 2:
        return False
    whole = scores.dtype == torch.float32 and scores.stride(1) == 1 and scores.numel() > 0 and not scores.requires_grad
    return whole and (INTERPRETED or gpu.on_gpu(scores.device))


def _parts(vocab: int) -> tuple[int, int]:
    """(tokens of a program, programs of a row)."""
    block = max(BLOCK, triton.next_power_of_2(-(-vocab // MOST_PARTS)))
    return block, -(-vocab // block)


@launch.remember
def _prepare(tensors: tuple[torch.Tensor, ...], settings: Settings) -> launch.Launch:
    rows, vocab = tensors[0].shape
    block, parts = _parts(vocab)
    return launch.Launch(
        sample_kernel,
        (rows * parts,),
        stride=tensors[0].stride(0),
        vocab=vocab,
        parts=parts,
        # torch multiplies by the reciprocal, which it rounds to fp32.
        inverse=torch.tensor(settings.temperature, dtype=torch.float32, device="cpu").reciprocal().item(),
        top_k=settings.top_k,
        removed=1 - settings.top_p,
        min_p=settings.min_p,
        BLOCK=block,
        PARTS=triton.next_power_of_2(parts),
        SLOTS=SLOTS,
        **early(tensors[0].device),
        num_warps=8,
        maxnreg=128,  # two programs fit on a multiprocessor
        enable_fp_fusion=False,  # the difference of the maximum from itself is 0
        debug=True,  # for its assertion
        sanitize_overflow=False,
    )


def _sample_torch(scores: torch.Tensor, settings: Settings) -> torch.Tensor:
    """The same in PyTorch. Of equal tokens at the limit of top_p the first ones are removed."""
    x = scores / settings.temperature
    if settings.top_k:
        x = x.masked_fill(x < x.topk(min(settings.top_k, x.shape[1]))[0][:, -1:], -torch.inf)
    order = x.sort(stable=True)
    removed = order.values.softmax(-1).cumsum(-1) <= 1 - settings.top_p
    removed[:, -1] = False
    if settings.top_p < 1:
        x = x.masked_fill(removed.scatter(1, order.indices, removed), -torch.inf)
    p = x.softmax(-1)
    p = x.masked_fill(p < settings.min_p * p.amax(-1, keepdim=True), -torch.inf).softmax(-1)
    return (p / torch.empty_like(p).exponential_()).argmax(-1, keepdim=True)


if triton is not None:
    from ..host.overlap import early, let_next_begin, wait_for_inputs

    _LEAST = tl.constexpr(-(2**31))  # below the key of every number
    _NONE = tl.constexpr(2**31 - 1)  # no index
    _STAGES = tl.constexpr(4)  # blocks of a row that are read at the same time

    @triton.jit(do_not_specialize=["parts", "top_k"])
    def sample_kernel(
        Scores,  # (rows, vocab), fp32, the rows `stride` apart
        Noise,  # (rows, vocab), fp32
        Values,  # (rows, parts, SLOTS), fp32: candidates, then -inf; written and read
        Noises,  # (rows, parts, SLOTS), fp32: their noise, then 1; written and read
        Indices,  # (rows, parts, SLOTS), int32: their tokens, ascending; written and read
        Sums,  # (rows, parts, 2), fp32: the maximum, NaN if a score is NaN or inf; sum of exp(x - maximum); written and read
        Limits,  # (rows, parts, 2), int32: the least key of candidates; the same if some do not fit, or a token; written and read
        Finished,  # (rows,), int32: programs that have, 0 before and afterwards; written and read
        Tokens,  # (rows, 1), int64, written
        stride, vocab, parts, inverse, top_k, removed, min_p,
        BLOCK: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """One program per row and part."""
        wait_for_inputs(EARLY)
        let_next_begin(EARLY)
        row, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
        Scores += row * stride
        Noise += row * vocab
        Values += row * parts * SLOTS
        Noises += row * parts * SLOTS
        Indices += row * parts * SLOTS
        Sums += row * parts * 2
        Limits += row * parts * 2
        offs = part * BLOCK + tl.arange(0, BLOCK)
        inside = offs < vocab
        x = tl.load(Scores + offs, mask=inside, other=float("-inf")) * inverse
        invalid = tl.max(((x != x) | (x == float("inf"))).to(tl.int32))
        maximum = tl.max(x)
        tl.store(Sums + part * 2, tl.where(invalid > 0, float("nan"), maximum))
        if top_k > 0:
            keys = _keys(x)
            least, _ = _threshold(keys, tl.min(keys).to(tl.int64), tl.max(keys).to(tl.int64) + 1, top_k, SLOTS)
            taken = (keys >= least) & (x > float("-inf"))
            too_many = tl.sum(taken.to(tl.int32)) > SLOTS
            taken &= keys >= least + too_many.to(tl.int32)  # all that are larger, fewer than top_k: equal ones take no place
            slots = tl.cumsum(taken.to(tl.int32), 0) - 1
            places = part * SLOTS + slots
            tl.store(Values + places, x, mask=taken)
            tl.store(Noises + places, tl.load(Noise + offs, mask=taken, other=1.0), mask=taken)
            tl.store(Indices + places, offs, mask=taken)
            free = tl.arange(0, SLOTS)
            rest = free >= tl.sum(taken.to(tl.int32))
            tl.store(Values + part * SLOTS + free, tl.full([SLOTS], float("-inf"), tl.float32), mask=rest)
            tl.store(Noises + part * SLOTS + free, tl.full([SLOTS], 1.0, tl.float32), mask=rest)
            tl.store(Limits + part * 2, least)
            tl.store(Limits + part * 2 + 1, tl.where(too_many, least, _LEAST))
        else:
            p = tl.exp(x - tl.where(maximum == float("-inf"), 0.0, maximum))
            tl.store(Sums + part * 2 + 1, tl.sum(p))
            if min_p == 0.0:
                noise = tl.load(Noise + offs, mask=inside, other=1.0)
                tl.store(Limits + part * 2 + 1, _winner(p / noise, offs))
        tl.debug_barrier()  # the stores of all threads come before the count
        if tl.atomic_add(Finished + row, 1, sem="acq_rel", scope="gpu") == parts - 1:
            tl.store(Finished + row, 0)
            token = _of_parts(
                Scores, Noise, Values, Noises, Indices, Sums, Limits,
                vocab, parts, inverse, top_k, removed, min_p, BLOCK, PARTS, SLOTS,
            )  # fmt: skip
            tl.store(Tokens + row, token.to(tl.int64))

    @triton.jit
    def _of_parts(
        Scores, Noise, Values, Noises, Indices, Sums, Limits, vocab, parts, inverse, top_k, removed, min_p,
        BLOCK: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr,
    ):  # fmt: skip
        """The token of one row, whose parts are read."""
        part = tl.arange(0, PARTS)
        there = part < parts
        maxima = tl.load(Sums + part * 2, mask=there, other=float("-inf"))
        maximum = tl.max(maxima)
        valid = (tl.max((maxima != maxima).to(tl.int32)) == 0) & (maximum > float("-inf"))
        tl.device_assert(valid, "probability tensor contains either `inf`, `nan` or element < 0")
        least = tl.min(tl.zeros([PARTS], tl.int32) + _LEAST)
        few = least > 0
        total = maximum * 0.0
        index = tl.min(tl.zeros([PARTS], tl.int32) + _NONE)
        if top_k > 0:
            slots = tl.arange(0, PARTS * SLOTS)
            keys = _keys(tl.load(Values + slots, mask=slots < parts * SLOTS, other=float("-inf")))
            low = tl.max(tl.load(Limits + part * 2, mask=there, other=_LEAST))
            high = _keys(maximum)
            least, _ = _threshold(keys, low.to(tl.int64), high.to(tl.int64) + 1, top_k, top_k)
            few = tl.max(tl.load(Limits + part * 2 + 1, mask=there, other=_LEAST)) < least
        else:
            sums = tl.load(Sums + part * 2 + 1, mask=there, other=0.0)
            total = tl.sum(sums * tl.exp(maxima - maximum))
            if min_p == 0.0:
                drawn = tl.load(Limits + part * 2 + 1, mask=there, other=_NONE)
                there = drawn != _NONE
                p = tl.exp(tl.load(Scores + drawn, mask=there, other=float("-inf")) * inverse - maximum)
                index = _winner(p / tl.load(Noise + drawn, mask=there, other=1.0), drawn)
        size = vocab
        if few:  # the candidates in place of the row; an index is that of a slot
            Scores, Noise, size, inverse = Values, Noises, parts * SLOTS, inverse * 0.0 + 1.0
        if index == _NONE:
            _, total, index = _read(Scores, Noise, size, inverse, maximum, least, min_p, least, -1, BLOCK // 2)
        more = (removed > 0) & valid & (index != _NONE)
        while more:
            key = _keys(tl.load(Scores + index) * inverse)
            below, _, following = _read(Scores, Noise, size, inverse, maximum, least, min_p, key, index, BLOCK // 2)
            more = (below / total <= removed) & (following != _NONE)
            index = tl.where(more, following, index)
        if few:
            index = tl.load(Indices + index, mask=index != _NONE, other=_NONE)
        return index

    @triton.jit
    def _read(Scores, Noise, size, inverse, maximum, least, min_p, key, index, BLOCK: tl.constexpr):
        """(the sum of exp(x - maximum) up to a token, that of the tokens after it, the one that is drawn of these).

        Tokens are in the order of their scores, equal ones in that of their indices. least: the key from which they are kept.
        Only one program reads a row: so that it does not wait for each block, the next ones are on their way.
        """
        below, above, best = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        chosen = tl.full([BLOCK], _NONE, tl.int32)
        for start in tl.range(0, size, BLOCK, num_stages=_STAGES):
            indices = start + tl.arange(0, BLOCK)
            inside = indices < size
            x = tl.load(Scores + indices, mask=inside, other=float("-inf")) * inverse
            noise = tl.load(Noise + indices, mask=inside, other=1.0)
            keys = _keys(x)
            p = tl.where(keys >= least, tl.exp(x - maximum), 0.0)
            after = (keys > key) | ((keys == key) & (indices > index))
            below += tl.where(after, 0.0, p)
            above += tl.where(after, p, 0.0)
            value = tl.where(after & (p >= min_p), p / noise, 0.0)
            chosen = tl.where(value > best, indices, chosen)
            best = tl.maximum(best, value)
        return tl.sum(below), tl.sum(above), _winner(best, chosen)

    @triton.jit
    def _winner(values, indices):
        """The index of the largest value, the least one of several; _NONE if none is above 0."""
        best = tl.max(values)
        return tl.min(tl.where((values == best) & (values > 0.0), indices, _NONE))

    @triton.jit
    def _keys(x):
        """int32 in the order of x, fp32."""
        bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)

    @triton.jit
    def _threshold(keys, low, high, least, most):
        """(the largest limit with at least `least` keys from it on, or another with at most `most`; the number of these keys).

        low has enough keys from it on, high has too few. Both are int64.
        """
        count = tl.sum((keys >= low.to(tl.int32)).to(tl.int32))
        while (count > most) & (high - low > 1):
            middle = low + (high - low) // 2
            found = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32))
            enough = found >= least
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
            count = tl.where(enough, found, count)
        return low.to(tl.int32), count
