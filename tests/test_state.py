"""Random sequences of user actions between two calls of generate(): a patched and an unpatched model agree after each.

`make test-state` runs many sequences, different ones each time. Each error that they find becomes a row of FOUND.
"""

import os

import pytest
import state_calls  # noqa: F401 (they fill ACTIONS)
import state_model  # noqa: F401
import state_python  # noqa: F401
from cases import slow_unless
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from state import ACTIONS, WORLDS, Different, World

from hf_fastattn.patches.graphs.state import State

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("captured")]
MANY = int(os.environ.get("HF_FASTATTN_STATES", "0"))  # sequences; 0: a few, the same in every run

steps = st.sampled_from(sorted(ACTIONS)).flatmap(lambda name: st.tuples(st.just(name), st.integers(0, ACTIONS[name][1] - 1)))


def run(world: str, sequence) -> World:
    made = World(world)
    try:
        return made.run(sequence)
    finally:
        made.close()


@pytest.mark.parametrize("world", slow_unless(["llama", "recurrent"].__contains__, WORLDS))
@settings(
    max_examples=-(-MANY // len(WORLDS)) or 2,
    derandomize=not MANY,
    deadline=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(sequence=st.lists(steps, min_size=3, max_size=8))
def test_random_sequences(world, sequence):
    run(world, sequence)


@pytest.mark.parametrize("name", slow_unless([*ACTIONS][::3].__contains__, ACTIONS))
def test_each_action_in_two_of_its_variants(name):
    run("llama", [(name, variant) for variant in range(min(2, ACTIONS[name][1]))])


# Errors of earlier versions: the model, and the shortest sequence that shows the error.
COPY = "deepcopy_the_model"
FOUND = {
    "a thread's own vector": ("llama", [("steer", 1)] * 2),
    "a vector behind a weak reference": ("llama", [("steer", 2)] * 2),
    "a layer added, and the patch undone": ("rolling", [("add_a_layer", 0), ("patch_again", 0)]),
    "a copy whose forward runs the original": ("rolling", [("set_forward_of_the_model", 0), (COPY, 0)]),
    "such a copy, one layer more": ("rolling", [(each, 0) for each in ("add_a_layer", "set_forward_of_the_model", COPY)]),
    "a window made larger": ("two kinds of layers", [("edit_the_config", 2)]),
    "another dtype": ("llama", [("cast", 0), ("cast", 2)]),
    "another dtype, over a rolling cache": ("rolling", [("cast", 0), ("cast", 2)]),
    "no cache asked for": ("llama", [("ask_otherwise", 3)] * 2),
    "attention without its mask": ("recurrent", [("add_a_layer", 0), ("remove_a_layer", 0)]),
}


@pytest.mark.parametrize("name", FOUND)
def test_errors_of_earlier_versions(name):
    world = run(*FOUND[name])
    assert not world.refused


def test_each_adapter_is_captured_once():
    both = [("set_an_adapter", 0), ("set_an_adapter", 1), ("disable_adapters", 0), ("disable_adapters", 0)]
    world = run("llama", [("add_an_adapter", 0), ("add_an_adapter", 1), *both, *both])  # of steps, then of prompts
    captures = world.ours.patch.captures
    world.run(both)
    assert world.ours.patch.captures == captures and not world.ours.patch.reasons and not world.refused


def test_an_error_that_the_caller_raises_once_in_a_rehearsal_is_not_lost():
    world = run("two kinds of layers", [("add_a_layer", 0), ("add_a_layer", 0), ("raise_in_the_middle", 18)])
    world.compare("afterwards")
    assert len(world.refused) == 1


def test_a_stale_graph_is_noticed(monkeypatch):
    """A test of the comparison: if models never differ, stale steps are replayed."""
    monkeypatch.setattr(State, "differs", lambda *_: None)
    for sequence in ([("replace_a_parameter", 1)], [("edit_attention", 0)]):
        with pytest.raises(Different, match="logits of step 1 differ"):
            run("llama", sequence)


def test_steps_are_captured_and_replayed():
    world = run("llama", [("copy_into_a_weight", 1), ("call_otherwise", 1), ("drop_caches", 0)])
    patch = world.ours.patch
    assert (patch.captures, patch.replays, patch.reasons) == (3, 20, [])  # of steps and of two sizes of prompts
