"""patch() under Transformers' tensor parallelism: two processes on the CPU, with a substitute for CUDA graphs."""

import contextlib
import copy
import errno
import gc
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref
from unittest.mock import Mock

import fake_graph
import processes
import pytest
import torch
from calls import Averaged, Puts
from cases import slow_unless
from models import FAMILIES, family, prompts, tiny
from torch.distributed.tensor import Replicate
from transformers import DynamicCache, LogitsProcessor, MaxTimeCriteria, StoppingCriteria
from transformers.distributed import DistributedConfig
from transformers.utils import logging

import hf_fastattn
from hf_fastattn import hf
from hf_fastattn.patches.calls import calls
from hf_fastattn.patches.fused import norms as fuse
from hf_fastattn.patches.fused import subclass, sums
from hf_fastattn.patches.graphs import graphs as graph
from hf_fastattn.patches.graphs.state import read
from hf_fastattn.patches.ranks import exchange, facts, ranks
from hf_fastattn.patches.ranks.processes import Processes, _begin_of, this_process

pytestmark = [processes.HIDDEN, pytest.mark.xdist_group("ranks")]
NEW = 8
BIASES = {"starcoder2": ("starcoder2", {"use_bias": True, "sliding_window": None})}  # a bias after an all-reduce
SHARED = [*(name for name in FAMILIES if name not in ("opt", "mistral_window_above_prompt")), *BIASES]


def divided(one, config: DistributedConfig, attention: str = "eager", dtype: torch.dtype = torch.float32):
    """A copy of a model that the ranks of a configuration share."""
    state = {name: tensor.clone() for name, tensor in one.state_dict().items()}
    options = {"state_dict": state, "attn_implementation": attention, "dtype": dtype, "distributed_config": config}
    return type(one).from_pretrained(None, config=one.config, **options).eval()


def shared(one, count: int = 2, attention: str = "eager", **sizes: int):
    """A copy of a model, shared by `count` ranks, or by the `sizes` of a DistributedConfig. Replays of its decode graphs are
    recorded operations."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    graph.new_graph, graph.why_no_graph = fake_graph.RecordedGraph, lambda device: None
    return divided(one, DistributedConfig(**(sizes or {"tp_size": count})), attention)


def of_family(name: str):
    if name in BIASES:
        model_type, own = BIASES[name]
        return tiny(model_type, **own)
    return family(name, "cpu")


def generate(model, inputs, **options):
    return model.generate(**{"max_new_tokens": NEW, "do_sample": False, **inputs, **options})


def tokens_and_logits(model, inputs, **options) -> types.SimpleNamespace:
    """Those of a call, without its cache, which the next call then uses again."""
    output = generate(model, inputs, return_dict_in_generate=True, output_logits=True, **options)
    return types.SimpleNamespace(sequences=output.sequences, logits=output.logits)


def graphs_of(patch) -> list:
    return [entry.graph for entries in patch._graphs.entries.values() for entry in entries if entry.graph is not None]


def results(ended) -> list:
    assert all(each.result is not None for each in ended), "\n".join(each.output for each in ended)
    return [each.result for each in ended]


# ---- every family ----


def tensors_but_weights(model) -> int:
    """How many tensors the comparison of a model reads that are no weights: with weights on a GPU, they may be on the host."""
    weights = {id(getattr(each, "_local_tensor", each)) for each in (*model.parameters(), *model.buffers())}
    return len({id(tensor) for tensor in read(model).tensors} - weights)


def decode_family(rank: int, name: str, padding: str, count: int) -> dict:
    one, inputs = of_family(name), prompts(padding, "cpu")
    model = shared(one, count)
    recorder = fake_graph.RecordedGraph(None, {})
    with torch.no_grad():
        recorder.capture(lambda: model(input_ids=inputs["input_ids"][:, :1]))
        want = generate(one, inputs)
    with hf_fastattn.patch(model, "lean") as patch:
        calls = [tokens_and_logits(model, inputs) for _ in range(3)]  # the third one captures the prompt
        graph = graphs_of(patch)[0]
    return {
        "tokens": all(torch.equal(each.sequences, want) for each in calls),
        "logits": [bytes(x.numpy().tobytes()) for each in calls for x in each.logits],
        "collectives": (graph.collectives, recorder.collectives),
        "steps": (patch.captures, patch.uncaptured),
        "reasons": patch.reasons,
        "read": tensors_but_weights(model),
        "left": sorted(set(vars(model)) & {"generate", "_hf_fastattn_patch"}),
    }


def decode_families(rank: int, names: list[str], padding: str, count: int) -> dict:
    return {name: decode_family(rank, name, padding, count) for name in names}


def of_family_before(tmp_path_factory, names, *args):
    """The results of two processes, for which the models are drawn before the fork."""
    for name in names:
        of_family(name)
    return results(processes.run(tmp_path_factory.mktemp("ranks"), 2, *args, limit=240))


@pytest.fixture(scope="module")
def decoded(tmp_path_factory):
    others = [name for name in SHARED if name != "llama"]
    return of_family_before(tmp_path_factory, SHARED, decode_families, others, "left_padding", 2)


def a_few(rank: int) -> dict:
    return {"llama": decode_family(rank, "llama", "left_padding", 2), **act(Scene(rank), FEW)}


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """The two processes of the tests that `make test` runs."""
    return of_family_before(tmp_path_factory, ["llama"], a_few)


@pytest.mark.parametrize("name", slow_unless("llama".__eq__, SHARED))
def test_decode_steps_are_captured_and_equal_to_eager_on_one_process(request, name):
    first, second = (each[name] for each in request.getfixturevalue("few" if name == "llama" else "decoded"))
    for each in (first, second):
        assert each["tokens"]
        assert each["steps"] == (2, 0) and not each["reasons"]
        assert (each["left"], each["read"]) == ([], 0)
        in_graph, eager = each["collectives"]
        assert in_graph == eager and in_graph
    assert first["logits"] == second["logits"]
    if name == "llama":  # two for each layer, and one for the logits
        assert sum("allreduce_" in each for each in in_graph) == 4
        assert sum("all_gather" in each for each in in_graph) == 1


# ---- calls that differ, and graphs that only one rank could capture ----


def outcome(run) -> str:
    """ "ok", or the exception of run() in words."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


class Scene:
    """One model on two ranks, patched again for each scene."""

    def __init__(self, rank: int, count: int = 2):
        self.rank = rank
        self.one, self.inputs = of_family("llama"), prompts("left_padding", "cpu")
        self.model = shared(self.one, count)
        self.want = generate(self.one, self.inputs)

    def __call__(self, **options) -> str:
        return outcome(lambda: self.check(options))

    def check(self, options) -> None:
        assert torch.equal(generate(self.model, self.inputs | options), self.want), "other tokens"

    def replacing(self, thing, name: str, value, **options) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(thing, name, value)
            return self(**options)

    def same(self, **options) -> bool:
        inputs = {name: value[1:2] for name, value in self.inputs.items()}
        want = generate(self.one, inputs, **{**options, "prefill_chunk_size": None})
        return torch.equal(generate(self.model, inputs, **options), want)

    def talk(self, model, messages, cache=None, then=lambda: None) -> tuple:
        """The ids of a chat, and its cache. then: called after each reply."""
        ids = self.inputs["input_ids"][2:, 48:]
        for message in messages:
            inputs = {"input_ids": torch.cat([ids, message], 1)}
            out = generate(model, inputs, past_key_values=cache, return_dict_in_generate=True)
            ids, cache = out.sequences, out.past_key_values
            then()
        return ids, cache

    def cache(self):
        return generate(self.model, self.inputs, return_dict_in_generate=True).past_key_values

    def around(self, change) -> str:
        """Two calls, with a change on rank 1 in between, and the number of captures."""
        found = [self()]
        if self.rank:
            change()
        return f"{[*found, self()]} {self.patch.captures} captures"


def stops_never(act):
    """A stopping criterion that calls act(ids)."""
    return [lambda ids, scores, **_: act(ids) or torch.zeros(len(ids), dtype=torch.bool)]


def fail(*args):
    raise ArithmeticError("of the user")


def other_ids(scene: Scene) -> str:
    ids = scene.inputs["input_ids"].clone()
    ids[0, -1] += scene.rank
    return scene(input_ids=ids)


def other_ids_of_a_call_within_a_call(scene: Scene) -> list:
    call = lambda difference: lambda ids: generate(scene.model, {"input_ids": ids + difference}, max_new_tokens=2) is None  # noqa: E731
    return [scene(stopping_criteria=stops_never(call(difference))) for difference in (0, -scene.rank)]


def another_cache_of_as_many_tokens(scene: Scene) -> list:
    """Two chats, of which one rank continues the other. A copy of a cache counts as the cache."""
    ids = scene.inputs["input_ids"][2:, 48:]

    def of_two(make) -> list:
        first, second = (
            generate(scene.model, {"input_ids": x}, past_key_values=make(), return_dict_in_generate=True) for x in (ids, ids + 1)
        )
        inputs = {"input_ids": torch.nn.functional.pad(first.sequences, (0, 3), value=7)}
        mine, other = (copy.deepcopy(each.past_key_values) for each in (first, second))
        refused = outcome(lambda: generate(scene.model, inputs, past_key_values=other if scene.rank else mine))
        return [refused, torch.equal(generate(scene.model, inputs, past_key_values=mine), generate(scene.one, inputs))]

    return [*of_two(lambda: None), *of_two(DynamicCache)]


def another_model_in_another_thread(scene: Scene) -> list:
    other, begun, goes, found = shared(scene.one), threading.Event(), threading.Event(), []

    class Waits(Puts):
        def end(self):
            begun.set()
            goes.wait(20)

    thread = threading.Thread(target=lambda: found.append(scene(streamer=Waits(int))))
    with hf_fastattn.patch(other, "lean"):
        thread.start()
        begun.wait(20)
        refused = outcome(lambda: generate(other, scene.inputs))
        goes.set()
        thread.join()
        return [refused, *found, torch.equal(generate(other, scene.inputs), scene.want)]


def another_model_at_the_end_of_a_stream(scene: Scene) -> str:
    """A chat in a thread, and another model that reads its text: the call of the first one has not returned yet."""
    other, read = shared(scene.one), threading.Event()

    class Slow(Puts):
        def end(self):
            read.set()
            time.sleep(0.3)

    thread = threading.Thread(target=lambda: scene(streamer=Slow(int)))
    with hf_fastattn.patch(other, "lean"):
        thread.start()
        read.wait(20)
        found = outcome(lambda: generate(other, scene.inputs))
        thread.join()
    return found


def wrong_argument(scene: Scene) -> str:
    return scene(**({"no_such_argument": 1} if scene.rank else {}))


def wrong_argument_beside_a_slow_rank(scene: Scene) -> str:
    time.sleep(0 if scene.rank else 0.5)
    return scene.replacing(exchange, "GRACE", 0.2, **({"no_such_argument": 1} if scene.rank else {}))


def interrupted_while_waiting(scene: Scene) -> str:
    if not scene.rank:
        time.sleep(0.5)
        return scene()
    try:
        return scene.replacing(exchange.Exchange, "_wait", Mock(side_effect=KeyboardInterrupt))
    except KeyboardInterrupt:
        return "KeyboardInterrupt"


def other_modes(scene: Scene) -> list:
    found = [scene.same(**o) for o in ({"num_beams": 2}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 40})]
    return [*found, scene.patch.captures > 0, scene.patch.uncaptured]


def a_module_that_counts(scene: Scene) -> list:
    """Steps of several tokens change a tensor in place: a rehearsal, whose tokens are padded, is undone on all ranks."""

    def found(model) -> list:
        inputs = {"input_ids": scene.inputs["input_ids"][2:, 48:]}
        with pytest.MonkeyPatch.context() as patch:  # which keeps the order of the modules
            patch.setattr(model.model, "norm", Averaged(model.model.norm, 64))
            return [tokens_and_logits(model, inputs, prompt_lookup_num_tokens=4) for _ in range(3)]

    pairs = list(zip(found(scene.model), found(scene.one), strict=True))
    same = all(torch.equal(mine.sequences, want.sequences) for mine, want in pairs)
    close = all(torch.allclose(torch.cat(mine.logits), torch.cat(want.logits), atol=1e-4) for mine, want in pairs)
    return [same and close, scene.patch.captures]


def a_chat(scene: Scene) -> bool:
    """Short messages after a cached text, of which one rank has forgotten the size."""
    forget = scene.patch._graphs.entries.clear if scene.rank else lambda: None
    messages = [torch.full((1, 3), 7)] * 4
    return torch.equal(scene.talk(scene.model, messages, then=forget)[0], scene.talk(scene.one, messages)[0])


def a_streamer_on_one_rank_beside_a_late_stop_check(scene: Scene) -> list:
    """Code of the caller on one rank: no rank runs a step too many, for which the others would wait."""
    eos = scene.want[:, -NEW // 2].tolist()
    options = {"eos_token_id": eos, "pad_token_id": 0}
    want, scene.want = scene.want, generate(scene.one, scene.inputs, **options)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Event", fake_graph.Event)
        for streamer, records in ((None, True), (Mock() if scene.rank else None, True), (None, scene.rank == 0)):
            patch.setattr(calls, "records_events", lambda device, records=records: records)
            fake_graph.Event.recorded = 0
            found += [scene(**options, streamer=streamer), fake_graph.Event.recorded > 0]
    scene.want = want
    return found


def other_tokens_on_one_rank(scene: Scene) -> list[str]:
    """The last token of one rank is another: the forwards of both ranks are the same."""

    class Differs(LogitsProcessor):
        def __call__(self, ids, scores):
            return scores.roll(scene.rank, -1) if ids.shape[1] == scene.want.shape[1] - 1 else scores

    inputs = scene.inputs | {"logits_processor": [Differs()]}
    return [outcome(lambda: generate(scene.model, inputs)), scene(), scene()]


def a_hook_on_one_rank(scene: Scene) -> str:
    with scene.model.lm_head.register_forward_hook(lambda *args: None) if scene.rank else contextlib.nullcontext():
        return scene()


def messages_of_other_sizes(scene: Scene, fails: str = "") -> list:
    """A chat: whether its tokens are those of one process, and the steps that are rehearsed and captured. fails: whether the
    first capture of the third size does, "on one rank" after its launches, or "late", before them and on one rank later."""
    messages = [torch.arange(tokens)[None] + 5 for tokens in (5, 60, 5, 120, 120)]
    ran: list[str] = []

    class Graph(fake_graph.RecordedGraph):
        def rehearse(self, body):
            ran.append("rehearsed")
            return super().rehearse(body)

        def capture(self, body):
            ran.append("captured")
            if fails == "late" and len(ran) == 5:  # one rank still compiles kernels
                time.sleep(2.0 * scene.rank)
                raise RuntimeError("no graph here")
            result = super().capture(body)
            if fails and scene.rank and len(ran) == 5:
                raise RuntimeError("no graph here")
            return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "new_graph", Graph)
        found, _ = scene.talk(scene.model, messages, hf_fastattn.PreallocatedCache(scene.model, 512))
    return [torch.equal(found, scene.talk(scene.one, messages)[0]), ran, scene.patch.captures]


def code_of_the_user_on_one_rank(scene: Scene) -> list:
    """Calls of a few tokens, which do not repay a capture, and of more, whose captures are verified."""
    space = {"__name__": "of_the_user", "norm": (norm := scene.model.model.norm).forward}
    exec("def logged(x):\n    return norm(x)\n", space)
    if scene.rank:
        norm.forward = space["logged"]
    try:
        return [*(scene.same(max_new_tokens=tokens) for tokens in (5, 5, NEW, NEW)), scene.patch.captures > 0]
    finally:
        norm.forward = space["norm"]


def a_graph_that_fails(method: str, why: str, seconds: float | None = None):
    """On one rank after the work of a method. With seconds on all ranks in place of it, and on one of them later: it compiles
    kernels, which the cache of the other host has."""

    def scene_of(scene: Scene) -> str:
        def fails(graph, body):
            time.sleep(scene.rank * (seconds or 0.0))
            if seconds is None:
                getattr(fake_graph.RecordedGraph, method)(graph, body)
            raise RuntimeError(why)

        made = type("Graph", (fake_graph.RecordedGraph,), {method: fails})
        return scene.replacing(graph, "new_graph", made if scene.rank or seconds else fake_graph.RecordedGraph)

    return scene_of


def a_cache_kept_on_one_rank(scene: Scene) -> str:
    kept = scene.cache()
    if not scene.rank:
        del kept
    return f"{[scene(), scene()]} {scene.patch.captures} captures"


def a_weight_moved_on_one_rank(scene: Scene) -> str:
    norm = scene.model.model.norm
    return scene.around(lambda: setattr(norm, "weight", torch.nn.Parameter(norm.weight.detach().clone())))


def other_seeds(scene: Scene) -> list:
    torch.manual_seed(scene.rank)
    return [generate(scene.model, scene.inputs, do_sample=True).tolist() for _ in range(2)]


def a_rank_that_does_not_come(scene: Scene) -> str:
    store = torch.distributed.distributed_c10d._get_default_store()
    if scene.rank:
        store.wait(["rank 0 has waited"])
    found = scene.replacing(exchange, "WAIT", 0.3)
    store.set("rank 0 has waited", "")
    return found


def a_group_aborted_meanwhile(scene: Scene) -> str:
    """The last sums of a call may be incomplete, if its group was aborted while it ran."""
    group = scene.patch._generation.ranks.exchange
    try:
        return scene(stopping_criteria=stops_never(lambda ids: setattr(group, "broken", "of the test")))
    finally:
        group.broken = None


def other_config(scene: Scene) -> str:
    config = scene.model.config
    return scene.replacing(config, "rms_norm_eps", config.rms_norm_eps + scene.rank)


def a_mesh_of_others(scene: Scene) -> str:
    """The weights are DTensors, but not from tensor parallelism, as those of FSDP are not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scene.model, "_tp_size", None)
        return outcome(lambda: read(scene.model))


FEW = {
    "other_ids": other_ids,
    "max_time": lambda scene: scene(max_time=60.0),
    "no_memory": lambda scene: scene.replacing(ranks, "free_bytes", lambda device: 1000 if scene.rank else 1 << 40),
    "wrong_argument_on_all": lambda scene: scene(no_such_argument=1),
    "a_hook_on_one_rank": a_hook_on_one_rank,
    "other_seeds": other_seeds,
}
REFUSED = (None, "of the test")
LATE = "a_streamer_on_one_rank_beside_a_late_stop_check"
SCENES = {
    "a_saved_cache": lambda scene: outcome(lambda: scene.cache().save("not written", scene.model)),
    "a_mesh_of_others": a_mesh_of_others,
    "other_length": lambda scene: scene(max_new_tokens=NEW + scene.rank),
    "other_rows": lambda scene: scene(**{name: value[scene.rank :] for name, value in scene.inputs.items()}),
    "other_ids_of_a_call_within_a_call": other_ids_of_a_call_within_a_call,
    "a_clock": lambda scene: scene(stopping_criteria=[MaxTimeCriteria(60.0)]),
    "another_cache_of_as_many_tokens": another_cache_of_as_many_tokens,
    "another_model_in_another_thread": another_model_in_another_thread,
    "another_model_at_the_end_of_a_stream": another_model_at_the_end_of_a_stream,
    "wrong_argument": wrong_argument,
    "wrong_argument_beside_a_slow_rank": wrong_argument_beside_a_slow_rank,
    "interrupted_while_waiting": interrupted_while_waiting,
    "other_modes": other_modes,
    "a_chat": a_chat,
    "a_module_that_counts": a_module_that_counts,
    "messages_of_other_sizes": messages_of_other_sizes,
    "a_capture_without_a_rehearsal_that_fails": lambda scene: messages_of_other_sizes(scene, "on one rank"),
    "a_capture_without_a_rehearsal_that_fails_late": lambda scene: messages_of_other_sizes(scene, "late"),
    "code_of_the_user_on_one_rank": code_of_the_user_on_one_rank,
    "fails_on_all": lambda scene: scene(stopping_criteria=[fail]),
    "a_streamer_on_one_rank": lambda scene: scene(streamer=Mock() if scene.rank else None),
    LATE: a_streamer_on_one_rank_beside_a_late_stop_check,
    "other_tokens_on_one_rank": other_tokens_on_one_rank,
    "a_failed_capture": a_graph_that_fails("capture", "no graph here"),
    "a_failed_rehearsal": a_graph_that_fails("rehearse", "it reads a value on the host"),
    "a_rehearsal_that_stops_late_on_one_rank": a_graph_that_fails("rehearse", "it counts its tokens", 4.0),
    "a_cache_kept_on_one_rank": a_cache_kept_on_one_rank,
    "a_graph_dropped_on_one_rank": lambda scene: scene.around(scene.patch._graphs.clear),
    "a_weight_moved_on_one_rank": a_weight_moved_on_one_rank,
    "a_slow_rank": lambda scene: time.sleep(0.5 * scene.rank) or scene(),
    "a_rank_that_does_not_come": a_rank_that_does_not_come,
    "a_copy": lambda scene: outcome(lambda: copy.deepcopy(scene.patch, {id(scene.model): scene.model})),
    "other_config": other_config,
    "steps_that_one_rank_cannot_capture": lambda scene: scene.replacing(hf, "why_not_captured", lambda _: REFUSED[scene.rank]),
    "a_group_aborted_meanwhile": a_group_aborted_meanwhile,
}


def act(scene: Scene, scenes: dict) -> dict:
    """By the name of each scene: its result, the reasons of its patch, and the outcome of the next call."""
    exchange.GRACE, found = 20.0, {}  # the processes may share a core
    for name, each in scenes.items():
        with warnings.catch_warnings(action="ignore"), hf_fastattn.patch(scene.model, "lean") as scene.patch:
            result = each(scene)
            found[name] = result, list(scene.patch.reasons), scene()
    return found


def play(rank: int) -> dict:
    scene = Scene(rank)
    found = act(scene, SCENES)
    for name, arguments, options in (
        ("refused on one rank", ("lean",), {"kv_sharding": "tokens" if rank else "heads"}),
        ("other settings", ("lean" if rank else "split_kv",), {}),
        ("peer memory", ("lean",), {"peer_memory": True}),
        ("other memory", ("lean",), {"peer_memory": bool(rank)}),
    ):
        found[name] = outcome(lambda: hf_fastattn.patch(scene.model, *arguments, **options)), [], "ok"  # noqa: B023
    found["state"] = sorted(name for name in vars(scene.model) if "patch" in name or name == "generate"), [], "ok"
    with hf_fastattn.patch(scene.model, "lean") as patch:
        if rank:
            patch.undo()
        else:
            found["undone on one rank"] = scene(), [], "ok"
    return found


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    return of_family_before(tmp_path_factory, ["llama"], play)


ONCE_EACH = ["rehearsed", "captured"] * 2
AGAIN = ([True, [*ONCE_EACH, "captured", "rehearsed", "captured"], 3],)
IN_PLACE = "a step changes values that the next step reads .model.norm.mean.$"
OF_THE_CALL = f"ValueError: .*the last call that wrote {hf.CACHE} is 'call %d.* on rank 0 and 'call %d.* on rank 1"
OTHER_IDS = "ValueError: .*input_ids, a tensor of shape .3, %d. and int64, has other values on rank 1 than on rank 0"
ALIKE = {  # the result of a scene on every rank, and the reason why its steps ran uncaptured
    "other_ids": (OTHER_IDS % 96,),
    "other_length": (r"ValueError: .*max_new_tokens is 8 on rank 0 and 9 on rank 1",),
    "other_rows": ("ValueError: .*input_ids is a tensor of shape .3, 96.* on rank 0 and a tensor of shape .2, 96.* on rank 1",),
    "other_config": (r"ValueError: .*config\['rms_norm_eps'\] is 1e-06 on rank 0 and 1.000001 on rank 1",),
    "steps_that_one_rank_cannot_capture": ("ValueError: .*graph is True on rank 0 and 'of the test' on rank 1",),
    "max_time": ("ValueError: Each rank measures max_time for itself",),
    "a_clock": ("ValueError: Each rank measures max_time for itself",),
    "no_memory": (r"MemoryError: .*on rank 1, and 1000 .*are free there",),
    "other settings": (r"ValueError: The ranks .*backend is 'split_kv' on rank 0 and 'lean' on rank 1",),
    "peer memory": ("ValueError: peer_memory=True is not possible: the model is on cpu. Leave it out",),
    "other memory": (r"ValueError: The ranks .*peer_memory is False on rank 0 and True on rank 1",),
    "a_group_aborted_meanwhile": ("RuntimeError: The process group of this model was aborted: of the test",),
    "wrong_argument_on_all": ("ValueError: .*no_such_argument",),
    "fails_on_all": ("ArithmeticError: of the user",),
    "a_saved_cache": ("ValueError: Under tensor parallelism a cache holds the KV heads of one rank",),
    "a_mesh_of_others": ("Uncapturable: a weight is a DTensor that is not from Transformers' tensor parallelism",),
    "a_copy": ("TypeError: .*Load the model a second time",),
    "a_streamer_on_one_rank": ("ok",),
    "a_slow_rank": ("ok",),
    "another_model_at_the_end_of_a_stream": ("ok",),
    LATE: (["ok", True, "ok", False, "ok", False],),
    "a_graph_dropped_on_one_rank": (r"\['ok', 'ok'\] 2 captures",),  # on all ranks or on none
    "a_weight_moved_on_one_rank": (r"\['ok', 'ok'\] 2 captures",),
    "a_cache_kept_on_one_rank": (r"\['ok', 'ok'\] 2 captures",),  # its storage is kept on all
    "other_modes": ([True, True, True, True, 0],),
    "a_chat": (True,),
    "state": ([],),  # undo removes everything
    "other_ids_of_a_call_within_a_call": (["ok", OTHER_IDS % 97],),
    "another_cache_of_as_many_tokens": ([OF_THE_CALL % (1, 2), True, OF_THE_CALL % (5, 6), True],),
    "another_model_in_another_thread": ([".*Another thread runs generate.. of another model of the same ranks", "ok", True],),
    "a_module_that_counts": ([True, 0], IN_PLACE),  # a rehearsal of padded tokens is undone on all ranks
    "messages_of_other_sizes": ([True, [*ONCE_EACH, "captured"], 3],),  # of 1, 64 and 128 tokens, the last one at once
    "a_capture_without_a_rehearsal_that_fails": AGAIN,
    "a_capture_without_a_rehearsal_that_fails_late": AGAIN,
    "code_of_the_user_on_one_rank": ([True] * 5, "a step runs logged.. of of_the_user on rank 1, which may read"),
    "a_hook_on_one_rank": ("ok", "on rank 1, Linear has the forward hook"),
    "a_failed_capture": ("ok", "on rank 1, its code does something that a graph cannot.* .RuntimeError: no graph here."),
    "a_failed_rehearsal": ("ok", "on rank 1, its code reads a value on the host.*, and a graph only"),
    "a_rehearsal_that_stops_late_on_one_rank": ("ok", "its code does something that a graph cannot.* .RuntimeError: it counts"),
}


def is_like(found, expected) -> bool:
    """Equal, where a string is a pattern."""
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(is_like, found, expected))
    return re.match(expected, found, re.DOTALL) is not None if isinstance(expected, str) else found == expected


@pytest.mark.parametrize("name", slow_unless(FEW.__contains__, ALIKE))
def test_every_rank_ends_alike(request, name):
    expected, *reason = ALIKE[name]
    first, second = (found[name] for found in request.getfixturevalue("few" if name in FEW else "played"))
    assert is_like(first[0], expected), first[0]
    assert first[0] == second[0] and first[2] == second[2] == "ok"  # the next call
    for found in (first, second):
        assert not reason or re.match(reason[0], found[1][0]), found[1]


@pytest.mark.slow
def test_ranks_that_generate_other_tokens_fail(played):
    first, second = (found["other_tokens_on_one_rank"] for found in played)
    said = "RuntimeError: Rank 1 generated other tokens than rank 0. Logits processors, stopping criteria and hooks must decide"
    assert any(found[0][0].startswith(said) for found in (first, second))
    for found in (first, second):
        assert found[0][0] == "ok" or found[0][0].startswith(said)
        assert re.match(f"RuntimeError: .*{said[14:]} alike on all ranks. This was the last call", found[0][1])
        assert found[0][2] == found[2] == "ok"


@pytest.mark.slow
def test_a_rank_learns_why_another_has_failed(played):
    for name in ("wrong_argument", "wrong_argument_beside_a_slow_rank"):
        assert re.match("ValueError: .*no_such_argument", played[1][name][0])
        assert re.match("RuntimeError: generate.. ends on rank 0. Rank 1 failed .*no_such_argument", played[0][name][0])
        assert [found[name][2] for found in played] == ["ok", "ok"]
    assert played[1]["interrupted_while_waiting"][0] == "KeyboardInterrupt"
    assert re.match("RuntimeError: .*Rank 1 failed .*: KeyboardInterrupt", played[0]["interrupted_while_waiting"][0])
    assert [found["interrupted_while_waiting"][2] for found in played] == ["ok", "ok"]
    assert re.match("RuntimeError: Rank 1 did not reach the begin of", played[0]["a_rank_that_does_not_come"][0])
    assert re.match("RuntimeError: generate.. ends on rank 1. Rank 0 failed", played[1]["a_rank_that_does_not_come"][0])
    assert re.match("RuntimeError: generate.. ends on rank 0. Rank 1 has left", played[0]["undone on one rank"][0])
    assert played[0]["refused on one rank"][0] == f"RuntimeError: patch() failed on rank 1: {played[1]['refused on one rank'][0]}"


def test_ranks_with_different_seeds_sample_the_same_tokens(few):
    first, second = (found["other_seeds"][0] for found in few)
    assert first == second and first[0] != first[1]
    torch.manual_seed(0)
    assert torch.equal(generate(of_family("llama"), prompts("left_padding", "cpu"), do_sample=True), torch.tensor(first[0]))


def changes_seen(model) -> list:
    """Whether each change is noticed, and that it is undone."""
    layer = model.model.layers[1].mlp.up_proj
    shard, forward = layer.weight, vars(layer)["forward"]
    (style,) = (forward.__closure__[forward.__code__.co_freevars.index("self")],)
    found, first = [], read(model).state
    for thing, name, value in (
        (style, "cell_contents", copy.copy(style.cell_contents)),
        (shard, "_local_tensor", shard._local_tensor.clone()),
        (shard, "_spec", copy.copy(shard._spec)),
        (shard._spec, "placements", (Replicate(),)),
        (layer, "forward", lambda *args, **kwargs: forward(*args, **kwargs)),
        (layer, "weight", torch.nn.Parameter(shard.detach().clone())),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(thing, name, value)
            seen = first.differs(read(model).state) is not None
        found.append(seen and first.differs(read(model).state) is None)
    return found


def shared_model_compared(rank: int) -> list:
    model = shared(of_family("llama"))
    patch = hf_fastattn.patch(model, "lean")
    model.model.layers[0].others = [model.model.layers[0].mlp.down_proj.weight]
    for _ in range(3):
        generate(model, {"input_ids": torch.arange(12)[None]})
    alive, seen = weakref.ref(model), changes_seen(model)
    del model
    gc.collect()
    return [seen, alive() is None, patch.reasons]


@pytest.mark.slow
def test_changes_of_a_shared_model_are_noticed(tmp_path):
    of_family("llama")
    for found in results(processes.run(tmp_path, 2, shared_model_compared)):
        assert found == [[True] * 6, True, []]


# ---- failures within a call ----


def divide_by_zero() -> None:
    raise ZeroDivisionError("of the user")


def interrupt() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it
    os.kill(os.getpid(), signal.SIGINT)


class StopsAt(StoppingCriteria):
    def __init__(self, tokens: int):
        self.tokens = tokens

    def __call__(self, ids, scores, **kwargs):
        return torch.full((len(ids),), ids.shape[1] >= self.tokens)


ACTS = {"raises": divide_by_zero, "is interrupted": interrupt, "stays": lambda: time.sleep(600)}


def leave(rank: int, how: str) -> list[str]:
    """Rank 1 leaves rank 0 alone in a call or after it. Its process stays, as that of a notebook does, and both call again."""
    exchange.GRACE, scene = 0.5, Scene(rank)
    call = lambda **options: outcome(lambda: generate(scene.model, scene.inputs, **options))  # noqa: E731
    with hf_fastattn.patch(scene.model, "lean") as patch:
        found, other = [call()], patch._generation.ranks.exchange.processes
        exchange.WAIT = 4.0 if how == "stays" else exchange.WAIT
        options = {"stopping_criteria": [StopsAt(100 - rank)]} if how == "stops earlier" else {}
        try:
            found.append(call(**options, streamer=Puts(ACTS[how]) if rank and how in ACTS else None))
        except KeyboardInterrupt:
            found.append("KeyboardInterrupt")
        if rank and how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        found += [f"{len(graphs_of(patch))} graphs", call()]
        while rank and how in ACTS and not other.has_ended(0):  # whose collective raises once this process has ended
            time.sleep(0.05)
        return found


ABORTED = "RuntimeError: The process group of this model was aborted"
LEFT = {  # what the process of rank 0 prints, and the results of both ranks; None: the process ended
    "raises": ("Rank 1 failed during generate(): ZeroDivisionError: of the user", None, ["ok", "Zero", "0 graphs", ABORTED]),
    "is interrupted": ("Rank 1 failed during generate(): KeyboardInterrupt", None, ["ok", "Keyboard", "0 graphs", ABORTED]),
    "stays": ("Rank 1 did not begin forward 4 of generate() within 4 seconds.", None, None),
    "stops earlier": (
        "Rank 1 ended generate() after 3 forwards, and rank 0 has begun another.",
        None,
        ["ok", "ok", ".* graphs", "RuntimeError: generate.. ends on rank 1. (Rank|The process of rank) 0 has"],
    ),
    "is killed": ("", ["ok", "ok", ".*", "RuntimeError: generate.. ends on rank 0. The process of rank 1 has ended."], None),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", LEFT)
def test_a_rank_that_another_has_left_ends_with_a_sentence(tmp_path, how):
    """A collective of gloo cannot be interrupted, so the process of the rank ends."""
    of_family("llama")
    said, *expected = LEFT[how]
    first, second = processes.run(tmp_path, 2, leave, how)
    assert said in first.output and (how != "stays" or said in second.output)
    for ended, result in zip((first, second), expected, strict=True):
        assert ended.result == result or is_like(ended.result, result), ended
    assert how not in ("raises", "is interrupted") or first.seconds < second.seconds


def test_the_end_of_a_process_on_this_host_is_noticed(monkeypatch):
    monkeypatch.delattr(os, "pidfd_open", raising=False)  # Python compiled with old headers
    if not (own := this_process()).where:
        pytest.skip("not on Linux")
    children = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    others = [own._replace(number=x.pid, begin=_begin_of(x.pid)) for x in children]
    elsewhere, hidden = others[0]._replace(where="another host"), own._replace(begin="another time")
    watch = Processes(dict(enumerate([own, *others, elsewhere, hidden])))
    assert not any(watch.has_ended(rank) for rank in range(5))
    children[0].kill()
    os.waitid(os.P_PID, children[0].pid, os.WEXITED | os.WNOWAIT)  # a zombie
    assert [watch.has_ended(rank) for rank in range(5)] == [False, True, False, False, False]
    children[1].kill()
    for child in children:
        child.communicate()
    assert [watch.has_ended(rank) for rank in range(5)] == [False, True, True, False, False]
    monkeypatch.setattr("builtins.open", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
    assert not watch.has_ended(1)


def test_every_call_says_that_the_store_has_ended():
    ended = Mock(side_effect=RuntimeError("Connection reset by peer"))
    store = types.SimpleNamespace(set=ended, check=ended, delete_key=ended)
    ours = types.SimpleNamespace(rank=1, ranks=[0, 1], store=store, call=exchange.Call(9), _mine=[(0, "0/1/1")], broken=None)
    for name in ("begin", "end", "failed", "_of", "_read", "_set", "_killed"):
        setattr(ours, name, types.MethodType(vars(exchange.Exchange)[name], ours))
    both = ranks.Ranks.__new__(ranks.Ranks)
    both.exchange, both.lock, both.group_lock, both.depth = ours, threading.RLock(), threading.RLock(), 0
    for _ in range(2):
        with pytest.raises(RuntimeError, match="The process that holds the store") as raised, both.call(dict):
            ours._set("1", None)
        assert "Connection reset" in str(raised.value.__cause__)


class Store(dict):
    """The store of torch.distributed. after_check: called once, after all keys of a check have been found."""

    after_check = None

    def set(self, key, value):
        self[key] = value

    def check(self, keys):
        found = self.keys() >= set(keys)
        if found and self.after_check is not None:
            run, self.after_check = self.after_check, None
            run()
        return found

    def get(self, key):
        return self[key]  # torch's would wait for the key

    def multi_get(self, keys):
        return [*map(self.get, keys)]

    def delete_key(self, key):
        self.pop(key)


def members(store: Store, count: int = 2) -> list[exchange.Exchange]:
    """Ranks that share a store."""
    found = [exchange.Exchange.__new__(exchange.Exchange) for _ in range(count)]
    for rank, each in enumerate(found):
        vars(each).update(rank=rank, ranks=[*range(count)], store=store, call=exchange.Call(0), _mine=[], processes=Processes({}))
    return found


def test_old_keys_are_deleted_and_the_last_rank_says_who_generated_other_tokens():
    store, sizes = Store(), []
    group = members(store, 3)
    for _ in range(3 * exchange.KEPT):
        for each in group:
            each.begin()
        for each in group[:2]:
            each._set("1", ("a step", None))
        assert group[2].gather("a step", None) == [None] * 3
        assert [each.end(None, tokens=7) for each in group] == [None] * 3
        sizes.append(len(store))
    assert sizes[exchange.KEPT] == sizes[-1] and {key.partition("/")[0] for key in store} == {
        str(number) for number in range(2 * exchange.KEPT + 1, 3 * exchange.KEPT + 1)
    }
    for each in group:
        each.begin()
    said = [each.end(None, tokens=tokens) for each, tokens in zip(group, (7, 8, 7), strict=True)]
    assert said[:2] == [None, None] and said[2].startswith("Rank 1 generated other tokens than rank 0.")


def test_a_rank_that_stops_waiting_when_another_comes_does_not_block_it(monkeypatch):
    store = Store()
    first, second = members(store)
    second._set("1", ("a step", None))  # it waits, and is interrupted while the first rank reads the values

    def interrupt():
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(second, "_wait", Mock(side_effect=KeyboardInterrupt))
            second.gather("a step", None)
        second._set("failed", "Rank 1 failed.")

    store.after_check = interrupt
    with pytest.raises(RuntimeError, match="Rank 1 failed"):
        first.gather("a step", None)


RAN: list[str] = []


def record(word: str) -> None:
    RAN.append(word)


class Payload:
    """Whoever reads a pickle of it calls record()."""

    def __reduce__(self):
        return record, ("a pickle",)


WRITTEN = facts.encode(None).removesuffix(b"null")
MALFORMED = [
    *(pickle.dumps(Payload()), b"", b"\xff\xfe", b"[" * 100_000, b'"a step"', facts.encode("a step").replace(b" ", b" 9", 1)),
    *(WRITTEN, WRITTEN + b"[" * 100_000, WRITTEN + b"\xff", WRITTEN + b"9" * 5000, WRITTEN + b"[1", pickle.dumps(None)),
]


@pytest.mark.parametrize("data", MALFORMED, ids=lambda data: repr(data[:30]))
def test_what_another_program_has_written_to_the_store_is_not_run_and_is_named(data, monkeypatch):
    monkeypatch.setattr(exchange, "GRACE", 0.01)
    words = r"has b.* under '.*', the key of rank 0,.* Run the same version on all ranks"

    def rank(name: str) -> exchange.Exchange:
        store = Store({name: data})
        second = members(store)[1]
        second.call = exchange.Call(1)
        second.call.running = True
        return second

    with pytest.raises(RuntimeError, match=words):
        rank("1/1/0").gather("a step", None)
    ended = rank("1/end/0")
    assert re.search(words, ended.failed(ended.call)) and re.search(words, ended.end(None))
    ended.abort, ended.leave = Mock(), Mock()
    assert re.search(words, ended.end(OSError("of the test"))) and ended.abort.called
    for name in ("1/failed/0", "gone/0"):
        assert re.search(words, (one := rank(name)).failed(one.call))
    (one := rank("1/steps/0")).call.begun -= 2 * exchange.WAIT
    assert re.search(words, one.behind(one.call))
    assert not RAN


def test_an_error_that_some_ranks_share_does_not_hide_the_rank_that_has_ended():
    """Collectives of all ranks but one fail with the same words, which name no rank."""
    for each in members(Store(), 3)[:2]:
        each.call, each.processes = exchange.Call(1), types.SimpleNamespace(has_ended=lambda rank: rank == 2)
        failed = each.end(RuntimeError("Connection reset by peer"))
    assert failed == "The process of rank 2 has ended."


@pytest.mark.parametrize("communicates", [True, False])
def test_a_rank_whose_step_stopped_does_not_wait_long(communicates):
    """The others may be blocked in a collective, or in a capture that waits for this rank."""
    both, gather = ranks.Ranks.__new__(ranks.Ranks), Mock(side_effect=RuntimeError("Rank 1 did not reach it"))
    both.exchange = types.SimpleNamespace(gather=lambda what, mine, limit: gather(limit))
    for body in (fail, int):
        with pytest.raises(RuntimeError):
            both.attempt(lambda run: run(), body, communicates)
    assert [call.args for call in gather.call_args_list] == [(ranks.STOPPED,), (None,)]


def test_the_exit_of_a_process_waits_for_an_abort(monkeypatch):
    """NCCL's may take long. A thread that returns from it into an interpreter that exits would end the process by a signal."""
    done, joins, first = threading.Event(), [], []
    group = types.SimpleNamespace(abort=done.wait)
    monkeypatch.setattr(exchange, "GRACE", 0.01)
    monkeypatch.setattr(exchange.atexit, "register", lambda *call: joins.append(call))
    ours = types.SimpleNamespace(group=group, broken=None, drop_graphs=lambda: first.append("graphs"), end_waits=bool)
    exchange.Exchange.abort(ours, "of the test")
    assert ours.broken == "of the test" and first == ["graphs"]
    ((join, seconds),) = joins
    done.set()
    join(seconds)
    exchange.Exchange.abort(ours, "again")
    assert ours.broken == "of the test" and len(joins) == 1


def test_graphs_are_dropped_while_the_process_group_is_destroyed(monkeypatch):
    """NCCL waits in it until no graph with its collectives is left."""
    dropped, counts, meet = [], [], threading.Barrier(2, timeout=60)

    def destroy_process_group(group=None):
        meet.wait()
        meet.wait()

    def between_checks():
        for _ in range(2):  # the first may have been another group
            destroys = threading.Thread(target=destroy_process_group)
            destroys.start()
            meet.wait()
            yield
            meet.wait()
            destroys.join()
            yield
        ours.leave.alive = False  # this rank takes part in no further call
        yield

    ours = types.SimpleNamespace(leave=types.SimpleNamespace(alive=True), drop_graphs=lambda: dropped.append(None))
    step = between_checks()
    monkeypatch.setattr(torch.distributed, "destroy_process_group", destroy_process_group)
    monkeypatch.setattr(exchange, "time", types.SimpleNamespace(sleep=lambda _: counts.append(len(dropped)) or next(step)))
    exchange._guard(lambda: ours)
    assert counts == [0, 1, 1, 2, 2]


def test_memory_is_shared_by_gpus_that_see_each_other_over_nvlink(monkeypatch):
    symmetric = pytest.importorskip("hf_fastattn.kernels.host.symmetric")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(symmetric, "identity", lambda device: "abc"[device.index])
    monkeypatch.setattr(symmetric, "_by_nvlink", lambda here, there: (here, there) == (0, 1))
    first = torch.device("cuda", 0)
    assert symmetric.why_no_access(first, ["a", "b"]) is None
    assert symmetric.why_no_access(first, ["a", "b", "c"]) == "the GPUs 0 and 2 are not connected by NVLink"
    assert "does not see the GPU d of another rank (CUDA_VISIBLE_DEVICES)" in str(symmetric.why_no_access(first, ["a", "d"]))


def fail_in_a_layer(rank: int) -> str:
    scene = Scene(rank)
    with hf_fastattn.patch(scene.model, "lean"):
        if rank:
            vars(scene.model.model.layers[1].self_attn.q_proj)["forward"] = Mock(side_effect=MemoryError("for K and V"))
            generate(scene.model, scene.inputs)  # the process ends with its error
        return outcome(lambda: generate(scene.model, scene.inputs))


@pytest.mark.slow
def test_a_rank_whose_collective_fails_learns_why(tmp_path):
    of_family("llama")
    first, second = processes.run(tmp_path, 2, fail_in_a_layer)
    assert second.result is None and "MemoryError: for K and V" in second.output
    assert first.result == "RuntimeError: generate() ends on rank 0. Rank 1 failed during generate(): MemoryError: for K and V."


def test_shared_memory_needs_a_shared_model_and_fused_graphs_and_heads_that_can_be_divided():
    model = tiny("llama", num_key_value_heads=1)
    model._tp_size, model._device_mesh = 2, None
    with pytest.raises(ValueError, match="1 KV heads, which cannot be divided among 2 ranks"):
        hf_fastattn.patch(model, "lean")
    for options in ({}, {"fuse": False}):
        with pytest.raises(ValueError, match="peer_memory=True is for a model that several ranks share"):
            hf_fastattn.patch(tiny("llama"), "lean", peer_memory=True, **options)
    with pytest.raises(ValueError, match="needs graph=True and fuse=True"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "tensor_parallel_mesh", lambda model: types.SimpleNamespace(get_group=torch.distributed.get_rank))
        hf_fastattn.patch(tiny("llama"), "lean", peer_memory=True, fuse=False)


@pytest.mark.parametrize(("count", "by_kernels"), [(8, True), (5, False)])
def test_all_ranks_look_up_a_table_in_the_same_way(monkeypatch, count, by_kernels):
    """Of 5 rows the last of 4 ranks has none."""
    table, collectives = torch.nn.Embedding(count, 6), Mock()
    monkeypatch.setattr(sums, "sum_of", lambda x: x)
    whole, parts = table.weight, []
    for rank, rows in enumerate(whole.split(2)):
        monkeypatch.setattr(sums, "peers_of", lambda _, rank=rank: types.SimpleNamespace(rank=rank, world=4))
        table.weight = torch.nn.Parameter(rows)
        parts.append(sums._lookup(collectives, table)(torch.arange(count)))
    assert bool(collectives.called) != by_kernels
    assert torch.equal(sum(parts), whole) if by_kernels else collectives.call_count == len(parts)


# ---- fused layers ----


def fuse_linears(rank: int, name: str) -> dict:
    """Generate with the kernels of linear layers replaced by torch's, and count their calls."""
    from hf_fastattn.kernels import checks
    from hf_fastattn.kernels.decode import linear as kernel

    shapes: list[tuple[int, ...]] = []

    def linear(x, weight, bias):
        assert type(weight) is torch.Tensor
        shapes.append((*weight.shape, bias is not None))
        return torch.nn.functional.linear(x, weight, bias)

    def linears(x, weights, biases):
        return [linear(x, weight, bias) for weight, bias in zip(weights, biases or [None] * len(weights), strict=True)]

    def gated_linear(x, gate, up, name):
        shapes.append(("gated", *gate.shape))
        return torch.nn.functional.silu(linear(x, gate, None)) * linear(x, up, None)

    one, inputs = of_family(name), prompts("no_padding", "cpu", rows=1)
    model = shared(one)
    want = generate(one, inputs)
    before = {name: vars(module).get("forward") for name, module in model.named_modules()}
    with pytest.MonkeyPatch.context() as patch:
        fake_graph.only_steps(patch)
        patch.setattr(fuse.find, "__defaults__", (lambda device: True,))
        patch.setattr(subclass, "has_kernels", lambda tensor: type(tensor) in (torch.Tensor, torch.nn.Parameter))
        patch.setattr(checks, "LINEAR_DTYPES", (torch.float32,))
        for function in (linear, linears, gated_linear):
            patch.setattr(kernel, function.__name__, function)
        patch.setattr(fuse._FusedNorm, "__call__", lambda self, forward: forward)
        patch.setattr(fuse, "_fused_rotation", lambda functions: functions[0])
        subclass._fused_subclass.cache_clear()  # of classes that other tests of this process have fused
        with hf_fastattn.patch(model, "lean", keep_graphs=True) as patched:
            same = [torch.equal(generate(model, inputs), want) for _ in range(2)]
        changes = [str(change) for change in patched.changes]
    after = {name: vars(module).get("forward") for name, module in model.named_modules()}
    return {"same": same, "shapes": shapes, "changes": changes, "undone": before == after, "steps": patched.captures}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["starcoder2", "llama"])
def test_linear_layers_compute_with_the_part_of_the_rank(tmp_path, name):
    of_family(name)
    bias = name == "starcoder2"  # that of o_proj and of the MLP's second layer is added after their all-reduce
    attention = [(32, 64, bias), (16, 64, bias), (16, 64, bias), (64, 32, False)]
    up = [(48, 64, True)] if bias else [("gated", 48, 64), (48, 64, False), (48, 64, False)]
    layer = [*attention, *up, (64, 48, False)]
    for found in results(processes.run(tmp_path, 2, fuse_linears, name)):
        assert found["same"] == [True, True] and found["steps"] == 1 and found["undone"]
        captured = [*layer, *layer, (64, 64, False)]
        assert found["shapes"][-len(captured) :] == captured  # after the rehearsal
        assert any("queries, keys and values" in change and "(2)" in change for change in found["changes"])
