"""The forwards of one generate(): each replays a graph, or runs the model's Python.

The forwards of a generate() go through a Forwards. It copies the small inputs of a step into fixed tensors, replays the graph,
and returns an output of the model's own type. The first step of a kind runs uncaptured on the same tensors, as a rehearsal. The
second step is captured, which runs the model's Python once (record.py).

A step has one token of each row, or several: the candidates of speculation, which are checked in one forward, a prompt, or a
message that follows a cached text. Steps of several tokens are padded to one of few sizes. `policy` chooses the size for a prompt
or a message, which several steps may read one after the other. The rounds of speculation have the nearest size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass
from typing import Any

import torch

from ... import hf
from ...attention.step import Unpackable
from ...caches.contract import FEW, Storage
from ...caches.stored import StoredCache
from ..graphs import policy
from ..graphs.entry import KEEP, PADDED, Entry, Inputs, grows, unpaddable
from ..graphs.graphs import DecodeGraphs, why_not_read
from ..graphs.policy import NEVER, choose, most_of_prompt, most_tokens, nearest, several, tokens_in
from ..graphs.present import Present
from ..graphs.record import Recorder
from ..graphs.state import Uncapturable
from ..graphs.undo import Mark, undo
from . import unpadded

WORTH = 4  # tokens of a row whose replays repay the capture of a graph that is valid for one call


@dataclass(eq=False)
class Forwards:
    """The forwards of one generate(): each replays a graph if there is one, or runs the model.

    run: the model's forward. say: called with the reason why a step runs uncaptured. refused: the reason why no step of this call
    can be captured, if known beforehand. unmasked: the storage of the call if its masks have no effect, else None. prompt: number
    of tokens of the prompt, if the mask gives it, else 0. chunked: whether the prompt is read in chunks.
    adds_ones: whether the masks of the steps are that of the prompt with ones added, as in Transformers' loops.
    stock: whether only code of Transformers runs between the steps. Other code may change the model: each step compares it.
    whole: whether prompts are read with their padding: code other than Transformers' loops may see what the forward returns.
    storage: that of the call's cache; other code may run the model over another one.
    outer: the forwards of the call whose assistant the model is, if it is one. limit: the most tokens of the call, its prompt
    included. begun: whether the prompt has been read.
    """

    graphs: DecodeGraphs
    model: hf.PreTrainedModel
    run: Callable[..., Any]
    say: Callable[[str], None]
    refused: str | None = None
    unmasked: Storage | None = None
    prompt: int = 0
    chunked: bool = False
    adds_ones: bool = True
    stock: bool = True
    whole: bool = False
    storage: Storage | None = None
    outer: InitVar[Forwards | None] = None
    limit: int = 1 << 62
    begun: bool = False

    def __post_init__(self, outer: Forwards | None) -> None:
        graphs, model = self.graphs, self.model
        self.recorder = Recorder(graphs, model, self.run)
        self.cost, self.most = graphs.estimate(model)
        self.wanted: frozenset[int] = frozenset()  # sizes of graphs to capture after the reply
        self.around: Callable[[Storage], StoredCache] = StoredCache.around
        self.prompted: Inputs = {}  # the arguments of the last forward that could have been one of them, without its cache
        self.limit = self.limit if outer is None else outer.limit
        always = not self.stock and not graphs.ranks.several
        above = None if outer is None else outer.present
        self.present: Present = Present(graphs, model, self.say, always=always, outer=above)
        self.replayed: Storage | None = None  # that of the last forward, if it replayed the graph of a step of one token
        # A table of learned positions has so many rows. What indexes it beyond them ends the process.
        self.positions: int | None = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        self.added = True  # whether the last forward from Python has added tokens to the cache
        self.quiet = False  # whether the current forward may run from Python without a warning

    def __call__(self, **given: Any) -> Any:
        self.replayed = None
        cache: Any = hf.cache_in(given)
        ids: Any = given.get("input_ids")
        prompt, self.begun = not self.begun or self._reads_prompt(cache, ids), True
        sizes: tuple[int, ...] = ()
        if prompt:
            if not (sizes := self._sizes(cache, ids, given)):
                return self._forward(given, prompt=True)
        elif (reason := self._why_not(cache, ids, given.get("attention_mask"))) is not None:
            return self._uncaptured(reason, given)
        self.quiet = prompt and (ids.shape[1] > FEW or not tokens_in(cache))  # few launches for each token
        # Graphs share memory: no other thread may replay one between the copy of the inputs and the copy of the logits.
        with self.graphs.lock:
            if self.graphs.closed:
                return self._uncaptured("the patch was undone during a call", given)
            seen = [layer.seen for layer in cache.storage.counted] if len(sizes) > 1 else None
            try:
                return self._steps(cache, ids, given, sizes or (nearest(ids.shape[1]),), prompt)
            except BaseException:
                if seen is not None:  # it removes the parts that were read before
                    cache.storage.interrupt(seen)
                raise

    def _steps(self, cache: Any, ids: torch.Tensor, given: Inputs, sizes: tuple[int, ...], prompt: bool) -> Any:
        """The output of the last of these steps, each of which reads so many tokens. What follows one that cannot be captured is
        read from Python."""
        try:
            for size in sizes[:-1]:
                part, others = _split(given, size)
                self._step(cache, part["input_ids"], part, size)
                given = others
            return self._step(cache, given["input_ids"], given, sizes[-1])
        except Uncapturable as error:
            reason = str(error)
            if self.quiet:
                if self.present.state is not None:  # the reason is the model's code, not its present state
                    self.graphs.asked[cache.storage][_near(ids)] = NEVER
                return self._forward(given)
            if not prompt:
                self.refused = reason
            return self._uncaptured(reason, given)

    def _reads_prompt(self, cache: object, ids: torch.Tensor | None) -> bool:
        """Whether a forward after the first reads the prompt: a chunk of it, or all of it if the model dropped its cache."""
        if ids is None or not isinstance(cache, StoredCache):
            return False
        many, tokens = ids.shape[1] > 1, tokens_in(cache)
        return (many or tokens < max(1, self.prompt)) if self.chunked else (many and not tokens)

    def _can_be_steps(self, cache: object, ids: torch.Tensor | None, given: Inputs) -> bool:
        """Whether a forward that reads the prompt can be a step of some hundred tokens of text, or several of them."""
        if self.refused is not None or ids is None or not isinstance(cache, StoredCache) or cache.storage.resized:
            return False
        storage = cache.storage
        if not (storage.takes_prompts or tokens_in(cache)):
            return False
        if given.get("attention_mask") is not None and not (storage is self.unmasked or storage.takes_mask):
            return False  # it may say that new tokens are padding
        return unpaddable(given) is None

    def _sizes(self, cache: Any, ids: Any, given: Inputs) -> tuple[int, ...]:
        """The numbers of tokens of the graphs that read a prompt one after the other; () if it is read from Python."""
        if not self._can_be_steps(cache, ids, given):
            return ()
        graphs, storage, (rows, tokens), seen = self.graphs, cache.storage, ids.shape, tokens_in(cache)
        in_parts = self._reads_in_parts(storage, seen + tokens, given)
        if tokens > most_tokens(storage, rows, self.most) and not in_parts:
            return ()
        asked: dict[int, int] = graphs.asked.setdefault(storage, {})
        sizes: tuple[int, ...] = ()
        if tokens == 1:
            sizes = (1,)
        elif not storage.looks_ahead:
            masked = storage is not self.unmasked and given.get("attention_mask") is not None
            there = graphs.sizes(storage, rows, given.get(KEEP) == 1, masked)
            most, before = most_of_prompt(storage, rows, self.most), asked.get(_near(ids), 0)
            asked[_near(ids)] = before + 1
            options: dict[str, Any] = {"graphs": there, "asked": before, "most": most, "own": graphs.runs_own}
            options |= {"later": storage is self.storage and policy.SHARE > 0 and self.may_capture_later(), "in_parts": in_parts}
            sizes, wanted = choose(self.cost.over(storage), rows, tokens, seen, **options)
            if before >= 0 and storage is self.storage:
                self.wanted |= wanted
                self.around = type(cache).around
                self.prompted = {name: value for name, value in given.items() if name not in hf.CACHES}
        if storage.rows != rows:  # there are no buffers yet
            sizes = ()
        return sizes if graphs.ranks.same("the sizes of a prompt", sizes) else ()

    def _reads_in_parts(self, storage: Storage, tokens: int, given: Inputs) -> bool:
        """Whether several steps may read a prompt that ends with so many tokens: without padding, with the same rotary
        frequencies, for the logits of its last token."""
        padded = given.get("attention_mask") is not None and storage is not self.unmasked
        usual = storage.takes_prompts and not padded and given.get(KEEP) == 1
        return usual and tokens <= self.graphs.longest_rotated(storage)

    def may_capture_later(self) -> bool:
        """Whether graphs may be captured after the reply: a step can be undone, and no rehearsal has run code of the user."""
        graphs, storage = self.graphs, self.storage
        if storage is None or not storage.takes_prompts or storage.states() or storage.looks_ahead:
            return False
        return self.stock and not (graphs.ranks.several or graphs.runs_own or graphs.closed) and graphs.late

    def _why_not(self, cache: object, ids: torch.Tensor | None, mask: object) -> str | None:
        """The reason why this step cannot be captured, judged by its arguments, or None."""
        if not isinstance(cache, StoredCache):
            return f"a step is given {'no cache' if cache is None else f'a {type(cache).__name__}'} instead of the patch's"
        if ids is None:
            return "its steps are given inputs_embeds instead of input_ids"
        if cache.storage.resized:
            return "other code has replaced K and V of its cache by those of fewer or more tokens"
        if not self.added:
            return "the forward before it has added no token to the cache (as with gradient checkpointing in training mode)"
        if ids.shape[1] > 1 and not cache.storage.takes_many:
            return f"a step has several tokens, and steps over a {type(cache).__name__} are captured for one"
        if ids.shape[1] > (most := most_tokens(cache.storage, len(ids), self.most)):
            return f"a step has more than {most} tokens of each row, the most that a graph of {len(ids)} rows has"
        if not (self.adds_ones or cache.storage.takes_mask or _adds_one(mask, tokens_in(cache))):
            return f"a step is given a mask with more than ones added, and steps over a {type(cache).__name__} read none"
        return self.refused or (why_not_read(self.model) if self.present.always else None)

    def _uncaptured(self, reason: str, given: Inputs) -> Any:
        self.say(reason)
        self.graphs.uncaptured += 1
        return self._forward(given)

    def _forward(self, given: Inputs, prompt: bool = False) -> Any:
        """The model's forward, which may change the model. prompt: whether it may leave out padding."""
        self.present.forget()
        cache = hf.cache_in(given)
        before = tokens_in(cache) if isinstance(cache, StoredCache) else -1
        output = self._unpadded(cache, given) if prompt and not (before or cache.storage.seen) else None  # seen: of a file
        if output is None:
            output = self.run(**given)
        self.added = not isinstance(cache, StoredCache) or tokens_in(cache) > before
        return output

    def _unpadded(self, cache: StoredCache, given: Inputs) -> Any:
        """The output of a forward that reads prompts without their padding; None if it has to read them with it."""
        ids: Any = given.get("input_ids")
        mask: Any = given.get("attention_mask")
        graphs = self.graphs
        padded = mask is not None and cache.storage is not self.unmasked
        if self.whole or cache.storage is not self.storage or ids is None or (padded and mask.shape != ids.shape):
            return None
        if not (padded or len(ids) > 1) or (packed := unpadded.pack(given)) is None:
            return None
        state = self.model.config._attn_implementation, self.model.training
        why = graphs.unpackable.get(state) or unpadded.why_padded(self.model, cache, given, packed)
        if why is None:
            try:
                output = unpadded.forward(self.run, cache, given, packed)
                graphs.skipped += ids.numel() - len(packed.row)
                return output
            except Unpackable as error:
                why = graphs.unpackable[state] = str(error)
        if padded and why not in graphs.padded:
            graphs.padded.append(why)
            hf.warn(f"{type(self.model).__name__}.generate() reads the padding of prompts: {why}.")
        return None

    def _step(self, cache: StoredCache, ids: torch.Tensor, given: Inputs, size: int) -> Any:
        """One step by a graph. Raises Uncapturable if it has to run without one."""
        self._check_padding(cache.storage, given)
        if self.present.may_wait():
            if (output := self._replayed_first(cache, ids, given, size)) is not None:
                return output
        elif self.present.due:
            self.present.compare()
        entry, inputs = self._prepared(cache, ids, given, size)
        if entry.warm and entry.graph is None:
            entry.refused = entry.refused or self._why_own(entry, cache)
        self._write(entry, inputs)
        mark = None
        if entry.graph is None:
            mark = Mark(cache.storage, entry.device)
            self.present.assistant = None  # the model's Python runs now
        try:
            logits = self.recorder.step(entry, cache.storage, inputs)
        except BaseException as error:
            undo(cache.storage, mark)  # an interrupted step has also counted on the device
            if isinstance(error, Uncapturable) and entry.graph is None:
                entry.refused = str(error)
            raise
        return self._counted(entry, cache, given, logits)

    def _replayed_first(self, cache: StoredCache, ids: torch.Tensor, given: Inputs, size: int) -> Any:
        """A step that compares the model while the device replays the graph. None if it has changed, or if there is no graph."""
        entry, inputs = self._prepared(cache, ids, given, size)
        if entry.graph is None or entry.refused is not None:
            self.present.compare()
            return None
        self._write(entry, inputs)
        mark, valid = Mark(cache.storage, entry.device), False
        try:
            logits = self.recorder.step(entry, cache.storage, inputs)
            self.present.compare()
            valid = self.present.entry(cache, inputs, entry.tokens) is entry
        finally:
            if not valid:
                undo(cache.storage, mark)
        return self._counted(entry, cache, given, logits) if valid else None

    def _why_own(self, entry: Entry, cache: StoredCache) -> str | None:
        """Why a step that has run code of the user is not captured, or None. Its graph is valid for this call alone."""
        own, graphs = entry.own, self.graphs
        if own is None or graphs.keep:
            return None
        if self.present.always:
            return f"a step runs {own}, which may read anything, and other code runs between the steps"
        if (left := self.limit - tokens_in(cache)) < WORTH:
            return (
                f"a step runs {own}, which may read anything, so a graph is valid for one call, and {left} tokens do not repay it"
            )
        if graphs.own is None:
            graphs.own = own
            hf.warn(
                f"{type(self.model).__name__}.generate() captures its steps anew in each call: they run {own}, which is of no "
                "installed package and may read anything. patch(keep_graphs=True) keeps the graphs, if nothing that it reads "
                "changes."
            )
        return None

    def _check_padding(self, storage: Storage, inputs: Inputs) -> None:
        """Raise Uncapturable if a graph of several tokens cannot read these inputs."""
        if inputs["input_ids"].shape[1] == 1:
            return
        if (name := unpaddable(inputs)) is not None:
            raise Uncapturable(f"its argument {name} cannot be padded")
        if storage.looks_ahead:
            raise Uncapturable("tokens may see later ones, and those of a graph may be padding")

    def _prepared(self, cache: StoredCache, ids: torch.Tensor, given: Inputs, size: int) -> tuple[Entry, Inputs]:
        """The entry for a step, and the inputs that it reads."""
        cache.storage.sync(ids.device, *several(ids))
        inputs = dict(given)
        self.set_mask(cache, inputs, size)
        return self.present.entry(cache, inputs, size), inputs

    def _write(self, entry: Entry, inputs: Inputs) -> None:
        if entry.refused is not None:
            raise Uncapturable(entry.refused)
        entry.copy_in(inputs)

    def _counted(self, entry: Entry, cache: StoredCache, given: Inputs, logits: torch.Tensor) -> Any:
        """The output of a step that has run, after its tokens are counted."""
        cache.storage.advance(*several(given["input_ids"]))
        if entry.graph is not None and entry.tokens == 1:
            self.replayed = cache.storage
        if entry.refused is not None:
            self._refuse(entry.refused)
        return entry.output(logits, cache, given)

    def _refuse(self, reason: str) -> None:
        """Note that the step that has just run cannot be captured."""
        if self.quiet:
            self.present.forget()
        else:
            self.refused = reason
            self.say(reason)
            self.graphs.uncaptured += 1

    def set_mask(self, cache: StoredCache, inputs: Inputs, tokens: int) -> None:
        """Drop a mask that has no effect. Build the masks of the layers if only the host knows which of its columns they hold."""
        storage, mask = cache.storage, inputs.get("attention_mask")
        if mask is not None and (storage is self.unmasked or not storage.takes_mask):
            del inputs["attention_mask"]
        elif grows(mask) and not (storage.keeps_all and mask.shape[1] <= storage.capacity):
            # The spans built from the mask have a fixed size.
            ids = inputs["input_ids"]
            padded = ids if tokens == ids.shape[1] else ids[:, :1].expand(-1, tokens)
            with cache.on_device(with_mask=True, tokens=tokens):
                inputs["attention_mask"] = hf.decode_mask(self.model, {**inputs, "input_ids": padded})
            if inputs["attention_mask"] is None:
                raise Uncapturable("it takes one mask for all layers, and with padding a sliding window needs its own")


def _near(ids: torch.Tensor) -> int:
    """The size under which prompts of so many tokens are counted."""
    return nearest(min(ids.shape[1], policy.NEAREST[-1]))


def _split(given: Inputs, tokens: int) -> tuple[Inputs, Inputs]:
    """The arguments of a forward that reads the first tokens of each row, and of one that reads the others."""
    every, first, others = given["input_ids"].shape[1], dict(given), dict(given)
    for name in PADDED & given.keys():
        if (value := given[name]) is not None:
            first[name], others[name] = value[..., :tokens], value[..., tokens:]
    if grows(mask := given.get("attention_mask")):
        first["attention_mask"] = mask[:, : mask.shape[1] - every + tokens]
    return first, others


def _adds_one(mask: object, seen: int) -> bool:
    """Whether a mask adds one live token in each row to those seen so far. This synchronises."""
    return mask is None or (grows(mask) and mask.shape[1] == seen + 1 and bool((mask[:, -1] == 1).all()))
