"""The storage of hybrid models: layers with recurrent states in place of K and V, or besides them, and layers without a cache.

A layer with states is Transformers' own, whose updates copy in place. Here its tensors also keep their addresses when rows are
permuted, and a tensor that is replaced gives the storage a new version.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import hf
from .buffers import Part, refuse_gradient, selected
from .contract import CHANGE_ROWS
from .layers import Layer, Track
from .storage import PreallocatedStorage

WIDTH = 128  # elements of a slot in which rows of a state are permuted
NO_CROP = (
    "This cache has recurrent states, from which no token can be removed: crop() and assisted decoding cannot run. Leave out "
    "assistant_model and prompt_lookup_num_tokens, or call reset() and read the text again."
)


class Moves:
    """How often a state of a storage has moved in memory."""

    count = 0


class Tensors(dict[int, torch.Tensor | None]):
    """The convolution states or the recurrent states of a layer, by their number. replaced: those in the place of others."""

    moves: Moves
    replaced: set[int]

    def __setitem__(self, index: int, tensor: torch.Tensor | None) -> None:
        if self.get(index) is not None and self[index] is not tensor:
            self.moves.count += 1
            self.replaced.add(index)
        super().__setitem__(index, tensor)


class States(hf.LinearAttentionLayer):
    """Layer with states that stay in place. fresh: the recurrent states that no token has entered since reset(). whole: whether
    it is that of a file, with all states of a text."""

    is_croppable = False  # in Transformers, whether there are no recurrent states yet
    is_compileable = False  # see Buffered
    index: int

    def hold(self, index: int, count: int, moves: Moves) -> None:
        hf.LinearAttentionLayer.__init__(self, number_of_states=count)
        self.index, self.fresh, self.whole = index, set(range(count)), False
        for name in ("conv_states", "recurrent_states"):
            held = Tensors(getattr(self, name))
            held.moves, held.replaced = moves, set()
            setattr(self, name, held)

    @property
    def named(self) -> list[tuple[str, Tensors, dict[int, bool]]]:
        return [
            ("conv", self.conv_states, self.is_conv_states_initialized),  # type: ignore[list-item]
            ("recurrent", self.recurrent_states, self.is_recurrent_states_initialized),  # type: ignore[list-item]
        ]

    def state_parts(self) -> list[Part]:
        each = [(name, number, tensor) for name, held, _ in self.named for number, tensor in held.items()]
        return [Part(tensor, self.index, f"{name}.{number}", None) for name, number, tensor in each if tensor is not None]

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        if self.whole:
            raise ValueError(
                f"Layer {self.index} lacks a recurrent state of its text, as the file of the cache did. Call reset() and read "
                "the text again."
            )
        with torch.inference_mode(False):  # normal tensors, so that the cache can be used outside inference_mode
            hf.LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, *args: Any, **kwargs: Any) -> torch.Tensor:
        refuse_gradient(conv_states)
        self.check_state(self.conv_states[state_idx], conv_states, 1, state_idx, not self.has_previous_state[state_idx])
        return super().update_conv_state(conv_states, state_idx, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        refuse_gradient(recurrent_states)
        self.check_state(self.recurrent_states[state_idx], recurrent_states, 0, state_idx, state_idx in self.fresh)
        self.fresh.discard(state_idx)
        return super().update_recurrent_state(recurrent_states.contiguous(), state_idx, **kwargs)

    def check_state(self, held: torch.Tensor | None, new: torch.Tensor, free: int, number: int, fresh: bool) -> None:
        """Drop a state of another batch size, model or dtype that no token has entered. Refuse a text of another batch size.

        free: number of last axes that may differ."""
        if held is None:
            return
        sizes = [(x.shape[: x.dim() - free], x.dtype, x.device) for x in (held, new)]
        if fresh and sizes[0] != sizes[1]:
            self.drop(number, 1 - free)
        elif len(held) != len(new):
            raise ValueError(f"This cache holds {len(held)} rows, and it is given {len(new)}. {CHANGE_ROWS}")

    def drop(self, number: int, which: int) -> None:
        _, held, made = self.named[which]
        held[number], made[number] = None, False
        held.replaced.discard(number)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Take a state of a file, under the name of its part."""
        kind, number = name.split(".")
        index = int(number)
        if kind == "conv":
            self.lazy_initialization(conv_states=tensor, state_idx=index)
            self.has_previous_state[index] = True
        else:
            self.lazy_initialization(recurrent_states=tensor, state_idx=index)
            self.fresh.discard(index)
        held = (self.conv_states if kind == "conv" else self.recurrent_states)[index]
        assert held is not None
        held.copy_(tensor)

    def select_states(self, indices: torch.Tensor) -> None:
        for _, held, _ in self.named:
            for number, tensor in held.items():
                if tensor is not None:
                    held[number] = selected(tensor, indices)

    def in_slots(self, rows: int) -> list[torch.Tensor] | None:
        """The states as K and V of one head, (rows, 1, slots, width), for `decode.reorder`. None if they are of other rows, or if
        the user has put a part of another tensor in the place of one."""
        states = [part.tensor for part in self.state_parts()]
        if any(len(x) != rows or not x.is_contiguous() or x.data_ptr() % 16 for x in states):
            return None
        return [x.view(rows, 1, -1, math.gcd(x[0].numel(), WIDTH)) for x in states]

    def reset(self) -> None:
        for which, (_, held, _) in enumerate(self.named):
            for number in [*held.replaced]:  # the user may have put anything in the place of a state
                self.drop(number, which)
        super().reset()
        self.fresh, self.whole = set(range(self.number_of_states)), False

    def activate_past_recording(self) -> None:
        raise ValueError(NO_CROP)

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(NO_CROP)


class StateLayer(States):
    """A layer with states alone."""

    keys = values = None
    is_initialized = True

    def __init__(self, index: int, count: int, moves: Moves):
        self.hold(index, count, moves)

    def parts(self) -> list[Part]:
        return self.state_parts()


class BothLayer(States, Layer):  # type: ignore[misc]  # dtype is also None before the first token
    """A layer with states beside K and V."""

    def __init__(self, index: int, count: int, moves: Moves, track: Track):
        self.hold(index, count, moves)
        Layer.__init__(self, index, track)

    def parts(self) -> list[Part]:
        return [*Layer.parts(self), *self.state_parts()]

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        (States if kwargs else Layer).lazy_initialization(self, *args, **kwargs)

    def reset(self) -> None:
        States.reset(self)
        Layer.reset(self)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        Layer.select(self, beam_idx)
        self.select_states(beam_idx)


class HybridStorage(PreallocatedStorage):
    """The layers of a hybrid. With states a step has one token, as padding would enter them, and is undone by a mark alone."""

    can_undo = True

    def __init__(self, kinds: Sequence[hf.Kind], capacity: int, growable: bool = True):
        self.moves = Moves()
        super().__init__(kinds, capacity, growable)
        self.tracks = [track for track in self.tracks if track.kind.has_kv]
        self.takes_many = self.takes_prompts = self.takes_packed = self.can_undo = not self.with_states

    def make_layer(self, index: int, track: Track) -> Any:
        kind = track.kind
        if kind.name == "none":
            return hf.NoLayer()
        if kind.name == "state":
            return StateLayer(index, kind.states, self.moves)
        return BothLayer(index, kind.states, self.moves, track) if kind.name == "both" else Layer(index, track)

    @property
    def counted(self) -> list[Layer]:  # no attribute: a pool counts the references to layers
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    @property
    def with_states(self) -> list[States]:
        return [layer for layer in self.layers if isinstance(layer, States)]

    @property
    def version(self) -> int:
        return super().version + self.moves.count

    def states(self) -> list[torch.Tensor]:
        return [part.tensor for layer in self.with_states for part in layer.state_parts()]

    def select(self, indices: torch.Tensor) -> None:
        super().select(indices)
        for layer in self.with_states:
            layer.select_states(indices)

    def movable(self, index: torch.Tensor, fits: Callable[[torch.Tensor], bool]) -> list[tuple[torch.Tensor, int]]:
        found = super().movable(index, fits)
        for layer in self.with_states:
            if (slots := layer.in_slots(len(index))) is None or not all(map(fits, slots)):
                layer.select_states(index)
            else:
                found += [(state, state.shape[2]) for state in slots]
        return found

    def crop(self, tokens: int) -> None:
        if not self.can_undo:
            raise ValueError(NO_CROP)
        super().crop(tokens)


def storage_of(kinds: Sequence[hf.Kind], capacity: int, growable: bool = True) -> PreallocatedStorage:
    """The storage for layers of these kinds."""
    plain = all(kind.name in ("full", "window") for kind in kinds)
    return (PreallocatedStorage if plain else HybridStorage)(kinds, capacity, growable)
