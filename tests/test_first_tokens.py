"""Prompts and messages that replay: the sizes of their graphs, rehearsals that siblings share, captures after a reply."""

from __future__ import annotations

import contextlib
import itertools
import threading
from unittest.mock import Mock

import fake_graph
import pytest
import torch
from models import VOCAB, chat, family, longrope, message, prompts, sizes, tiny
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

import hf_fastattn
from hf_fastattn import PreallocatedCache, hf
from hf_fastattn.caches import storage
from hf_fastattn.caches.layers import STEP
from hf_fastattn.model_shapes import SHAPES
from hf_fastattn.patches import ahead, warm
from hf_fastattn.patches.calls import after, forwards
from hf_fastattn.patches.fused import experts
from hf_fastattn.patches.graphs import graphs, policy, present, record, verify
from hf_fastattn.patches.graphs.policy import Cost, choose, wanted
from hf_fastattn.patches.graphs.state import Uncapturable

pytestmark = pytest.mark.usefixtures("captured")


@pytest.fixture
def llama():
    return tiny("llama", max_position_embeddings=4096)


def cost_of(name: str) -> Cost:
    model_type, config = SHAPES[name]
    return Cost.of(hf.model_on_meta(hf.make_config(model_type, **config), torch.bfloat16))


def ask(model, tokens, **options):
    """The answer to a prompt of so many tokens."""
    return model.generate(message(tokens), **{"max_new_tokens": 4, "do_sample": False, **options})


SIZES = [  # model, tokens, past, graphs, how often it came, largest size: the size
    ("1b", 5, 0, (), 0, 2048, 16),  # the standard size
    ("1b", 5, 0, (128, 256), 0, 2048, 128),  # a graph that costs as much
    ("8b", 9, 65536, (128,), 0, 896, 128),  # whose padding does not read a long past
    ("8b", 5, 4096, (512,), 0, 896, 16),  # but computes
    ("1b", 513, 0, (), 0, 2048, 1024),  # less than the launches from Python
    ("1b", 513, 0, (1024,), 2, 2048, 1024),
    ("1b", 513, 0, (1024,), 3, 2048, 640),  # a nearer one, as it comes often
    ("8b", 513, 0, (), 0, 896, 640),  # more than from Python
    ("8b", 513, 0, (1024,), 0, 896, 640),
    *(("1b", 513, 0, (), 0, 640, 640), ("1b", 300, 0, (), 0, 384, 384)),  # buffers of so many tokens
    ("8b", 513, 0, (), 0, 768, 640),  # whose padding costs more than from Python
    *(("8b", 900, 0, (), 0, 896, None), ("1b", 2049, 0, (), 0, 2048, None), ("1b", 5, 0, (128,), policy.NEVER, 2048, None)),
]
LATER = [  # of 5 tokens, if the graph is captured after the reply
    ((), 0, False, None),
    ((), 3, False, 16),  # it comes often
    ((2048,), 0, False, 2048),  # which takes less than from Python
    *(((2048, 512), 4, False, 512), ((128,), 0, False, 128)),
    ((), 0, True, 8),  # nothing is captured after the reply
]


def test_the_size_of_a_prompt():
    costs = {name: cost_of(name) for name in ("1b", "8b")}
    for name, tokens, past, there, asked, most, expected in SIZES:
        found = choose(costs[name], 1, tokens, past, graphs=there, asked=asked, most=most).sizes
        assert found == (() if expected is None else (expected,)), (name, tokens, past, there, asked)
    for there, asked, own, expected in LATER:
        found = choose(costs["1b"], 1, 5, 0, graphs=there, asked=asked, most=2048, own=own, later=True).sizes
        assert found == (() if expected is None else (expected,)), (there, asked, own)
    assert 3 * len(policy.SIZES) <= graphs.MAX_GRAPHS  # eight sizes for three batches are kept


OF_PARTS = [  # model, tokens, graphs: the sizes that read it, and those that are wanted
    ("1b", 359, (1, 128), (128, 128, 128), {512}),
    ("1b", 1100, (1, 128), (), {1024}),  # nine parts
    ("1b", 1100, (1, 128, 1024), (1024, 128), set()),
    ("1b", 3000, (1, 128), (), {1024, 2048}),
    ("1b", 3000, (1, 128, 1024, 2048), (2048, 1024), set()),
    ("8b", 613, (1, 128), (128,) * 5, {512}),
    ("8b", 1189, (1, 128, 192, 1024), (), set()),  # each graph reads the weights
    ("8b", 1633, (1, 128, 1024), (), {640, 1024}),  # padding costs more than Python
    ("8b", 1633, (1, 128, 640, 1024), (1024, 640), set()),
    ("8b", 3000, (1, 128, 1024), (), set()),  # its kernels take more than twice as long as launches
]


def test_the_parts_of_a_prompt():
    costs = {name: cost_of(name) for name in ("1b", "8b")}
    for name, tokens, there, expected, goals in OF_PARTS:
        most = {"1b": 2048, "8b": 1152}[name]
        found = choose(costs[name], 1, tokens, 0, graphs=there, asked=0, most=most, later=True, in_parts=True)
        assert found.sizes == expected, (name, tokens, there)
        assert found.wanted - {1, 128} == goals, (name, tokens, there)


@pytest.mark.parametrize("name", ["1b", "8b", "70b"])
def test_padding_never_costs_more_than_5_percent_or_1_ms(name):
    cost = cost_of(name)
    for past in (0, 4096, 65536):
        for tokens in (1, 3, 17, 65, 129, 257, 300, 513, 600, 1025, 1100, 1999):
            for there in ((), (1024, 2048), policy.SIZES):
                sizes = choose(cost, 1, tokens, past, graphs=there, asked=0, most=2048).sizes
                python = cost.python(1, tokens, past)
                assert all(cost.graph(1, size, past, tokens) <= max(1.05 * python, python + 1e-3) for size in sizes)


def test_what_is_wanted_after_a_reply():
    found = wanted(cost_of("1b"), 1, 100, {1, 16, 128, 1024}, (), 2048)
    assert found == [1, 128, 1024]  # the second one reads 16 tokens as well
    assert wanted(cost_of("8b"), 1, 4096, {1, 16, 128, 512}, (1,), 896) == [128, 512]
    assert wanted(cost_of("8b"), 1, 65536, {1, 16, 128, 512}, (1,), 896) == [16, 128, 512]  # kernels of decode read 64k faster
    padded = cost_of("8b")._replace(attends=True)
    assert wanted(padded, 1, 65536, {1, 16, 128}, (1,), 896) == [16, 128]
    assert wanted(cost_of("1b"), 1, 0, {1, 16, 128, 1024}, (1, 256), 512) == []


def test_a_rehearsal_holds_for_other_buffers_of_the_same_size(llama, monkeypatch):
    rehearsals, rehearse = [], fake_graph.RecordedGraph.rehearse
    monkeypatch.setattr(fake_graph.RecordedGraph, "rehearse", lambda *args: rehearsals.append(1) or rehearse(*args))
    expected = [ask(llama, tokens) for tokens in (12, 9)]
    kept = []
    with hf_fastattn.patch(llama) as patch:
        for _ in range(3):
            cache = PreallocatedCache(llama)
            kept.append(cache)  # so that its buffers are not those of the next one
            for index, tokens in enumerate((12, 9)):
                cache.reset()
                assert torch.equal(ask(llama, tokens, past_key_values=cache), expected[index])
        assert len(rehearsals) == 2 and patch.captures == 3 + 2 and not patch.reasons  # the second cache rehearses nothing
        llama.model.layers[0].self_attn.scaling *= 0.5
        cache.reset()
        found = ask(llama, 12, past_key_values=cache)
        assert len(rehearsals) == 4
    assert torch.equal(found, ask(llama, 12))


@pytest.fixture
def ran(monkeypatch) -> dict[str, int]:
    """How often steps were rehearsed and captured."""
    counts = {"rehearse": 0, "capture": 0}
    for name in counts:
        own = getattr(fake_graph.RecordedGraph, name)
        run = lambda self, body, name=name, own=own: (counts.update({name: counts[name] + 1}), own(self, body))[1]  # noqa: E731
        monkeypatch.setattr(fake_graph.RecordedGraph, name, run)
    return counts


def test_another_size_is_captured_without_a_rehearsal(llama, ran):
    lengths = (100, 12, 40, 200, 200)
    expected = [ask(llama, tokens, max_new_tokens=1) for tokens in lengths]
    with hf_fastattn.patch(llama) as patch:
        for want, tokens in zip(expected, lengths, strict=True):  # the first one gets buffers
            assert torch.equal(ask(llama, tokens, max_new_tokens=1), want)
    assert ran == {"rehearse": 1, "capture": 2} and patch.replays == 3 and not patch.reasons


# What rotates the keys of a step of more than 64 tokens does.
DOES = {
    "reads": "bool(q.sum() > 0)",
    "counts": "self.counted = getattr(self, 'counted', 0) + 1",
    "draws": "torch.rand(1)",
}


def rotate_by(monkeypatch, lines: str) -> dict:
    """Llama's file, with a forward of its rotation that may call its own one, "rotated"."""
    file, own = vars(modeling_llama), modeling_llama.LlamaRotaryEmbedding.forward
    for name in ("factor", "scaled", "forward", "rotated"):
        monkeypatch.setitem(file, name, own)
    exec(lines, file)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", file["forward"])
    return file


@pytest.mark.parametrize("name", DOES)
def test_a_size_that_cannot_be_captured_is_read_from_python(llama, ran, monkeypatch, name):
    """Code of Transformers, which runs in some sizes alone."""
    rotate_by(
        monkeypatch,
        f"""
def forward(self, q, position_ids):
    if q.shape[1] > 64:
        {DOES[name]}
    return rotated(self, q, position_ids)
""",
    )
    lengths = (30, 12, 40, 200, 150, 12)
    expected = [ask(llama, tokens, max_new_tokens=1) for tokens in lengths]
    with hf_fastattn.patch(llama) as patch:
        for want, tokens in zip(expected, lengths, strict=True):
            assert torch.equal(ask(llama, tokens, max_new_tokens=1), want)
        assert max(sizes(patch)) == 64 and not patch.uncaptured


def test_random_numbers_that_only_a_replay_draws_are_noticed_over_each_cache(llama, monkeypatch):
    """As in CUDA graphs, whose captures draw none."""
    own = fake_graph.RecordedGraph.capture, fake_graph.RecordedGraph.replay

    def capture(graph, body):
        before = torch.get_rng_state()
        result = own[0](graph, body)
        graph.drawn = torch.get_rng_state()
        torch.set_rng_state(before)
        return result

    def replay(graph):
        if graph.recorded_just_now:
            torch.set_rng_state(graph.drawn)
        own[1](graph)

    monkeypatch.setattr(fake_graph.RecordedGraph, "capture", capture)
    monkeypatch.setattr(fake_graph.RecordedGraph, "replay", replay)
    draws = "x + 0 * torch.rand(1) if q.shape[1] > 64 else x"
    rotate_by(monkeypatch, f"def forward(self, q, position_ids): return tuple({draws} for x in rotated(self, q, position_ids))")
    kept = []
    with hf_fastattn.patch(llama) as patch:
        for lengths in ((30, 12, 40, 200), (12, 200, 200, 200)):
            kept.append(PreallocatedCache(llama, 512))
            for tokens in lengths:
                kept[-1].reset()
                ask(llama, tokens, past_key_values=kept[-1])
        assert max(sizes(patch)) == 64


def test_what_runs_in_another_size_alone_is_compared(llama, monkeypatch):
    lines = """
def factor(): return 1
def scaled(x): return factor() * x
def forward(self, q, position_ids):
    cos, sin = rotated(self, q, position_ids)
    return (scaled(cos), sin) if q.shape[1] > 64 else (cos, sin)
"""
    file = rotate_by(monkeypatch, lines)
    with hf_fastattn.patch(llama):
        for tokens in (100, 12, 200, 200):
            ask(llama, tokens)
        exec("def factor(): return 2", file)
        found = ask(llama, 200)
    assert torch.equal(found, ask(llama, 200))


@pytest.mark.parametrize("share", [0, 1e9])
def test_a_new_cache_for_each_chat_captures_nothing_anew(llama, monkeypatch, share):
    monkeypatch.setattr(policy, "SHARE", share)
    messages, captures = [message(tokens) for tokens in (30, 12, 9, 50)], []
    turns = lambda cache: chat(llama, messages, cache=cache, max_new_tokens=4)  # noqa: E731
    expected = turns(PreallocatedCache(llama))
    with hf_fastattn.patch(llama) as patch:
        for _ in range(4):
            cache = PreallocatedCache(llama, 200)
            assert all(map(torch.equal, turns(cache), expected))
            address = cache.layers[0].keys.data_ptr()
            captures.append((patch.captures, address))
            del cache
        cache = PreallocatedCache(llama, 2000)
        assert all(map(torch.equal, turns(cache), expected)) and cache.storage.capacity == 2048
        assert len({address for _, address in captures}) == 1 and captures[2] == captures[3] and not patch.reasons


@pytest.mark.parametrize("free", [None, 1 << 20])
def test_buffers_that_grow_are_few_where_memory_allows_it(llama, monkeypatch, free):
    if free is not None:
        monkeypatch.setattr(storage, "free_bytes", lambda device: free)
    drawn = torch.rand(30, generator=torch.Generator().manual_seed(0)).tolist()
    job, chat, captures = {}, {}, []
    with hf_fastattn.patch(llama) as patch:
        for each in drawn:
            ask(llama, round(20 * 150**each), max_new_tokens=2)
            job[patch._generation.caches.pool.idle[0][1].capacity] = True
            captures.append(patch.captures)
    cache = PreallocatedCache(llama)
    with hf_fastattn.patch(llama) as patch:
        for tokens in (100, 300, 600, 900, 1500, 1800):
            assert ask(llama, tokens, past_key_values=cache, max_new_tokens=2).shape[1] == tokens + 2
            chat[cache.storage.capacity] = True
        assert not patch.reasons
    if free is None:
        assert [*job] == [*chat] == [256, 1024, 4096] and captures[-1] - captures[10] <= 1
    else:
        assert [*job] == [256, 1024, 1792, 2048, 2560] and len(chat) == 6


def test_caches_that_do_not_get_the_storage_of_another(llama):
    """And buffers that are held do not make the next ones larger."""
    held, capacities = [], set()
    with hf_fastattn.patch(llama) as patch:
        for _ in range(4):
            cache = ask(llama, 20, return_dict_in_generate=True).past_key_values
            capacities.add(cache.storage.capacity)
            held.append(cache.layers[0].keys)
            del cache
        assert len(capacities) == 1
        first = PreallocatedCache(llama)
        expected = ask(llama, 12, past_key_values=first)
        layers = [*first.layers]  # still in use
        del first
        second = PreallocatedCache(llama)
        assert torch.equal(ask(llama, 12, past_key_values=second), expected) and second.layers[0] is not layers[0]
        del layers, second
        fixed = PreallocatedCache(llama, 100, grow=False)
        ask(llama, 12, past_key_values=fixed)
        assert fixed.storage.capacity == 100 and not patch.reasons


@pytest.mark.parametrize("compared", [False, True])
def test_sizes_are_captured_after_a_reply(llama, compared, monkeypatch):
    """compared: with the step from Python, as of a model with kernels of other packages."""
    monkeypatch.setattr(verify, "needed", lambda model: compared)
    monkeypatch.setattr(policy, "SHARE", 1e9)
    lengths = (100, 12, 40, 200, 9, 150, 90)
    expected, found, captures = [ask(llama, tokens) for tokens in lengths], [], []
    with hf_fastattn.patch(llama) as patch:
        for tokens, want in zip(lengths, expected, strict=True):
            assert torch.equal(ask(llama, tokens), want)
            captures.append(patch.captures)
            found.append(sizes(patch))
        assert (patch.uncaptured, patch.reasons) == (0, [])
    assert found[0] == {1, 128} and found[3] == {1, 128, 256} and captures == [2, 2, 2, 3, 3, 3, 3]


def test_the_first_message_is_rehearsed_after_its_reply(llama, ran, monkeypatch):
    expected, at_tokens, own = ask(llama, 100), [], hf.MaxLengthCriteria.__call__
    count = lambda *args, **options: (at_tokens.append({**ran}), own(*args, **options))[1]  # noqa: E731
    monkeypatch.setattr(hf.MaxLengthCriteria, "__call__", count)
    monkeypatch.setattr(policy, "SHARE", 1e9)
    with hf_fastattn.patch(llama) as patch:
        cache = PreallocatedCache(llama, 256)
        ask(llama, 20, past_key_values=cache, max_new_tokens=1)  # which gives it buffers, and runs no step
        cache.reset()
        found = ask(llama, 100, past_key_values=cache)
        assert at_tokens[1] == {"rehearse": 0, "capture": 0} and at_tokens[2]["rehearse"] == 1  # the latter of a step
        assert sizes(patch) == {1, 128} and ran == {"rehearse": 2, "capture": 2} and not patch.reasons
    assert torch.equal(found, expected)


def test_prompts_wait_for_no_capture_while_there_is_no_time_after_replies(llama, monkeypatch):
    monkeypatch.setattr(policy, "SHARE", 1e-9)
    with hf_fastattn.patch(llama) as patch:
        for tokens in (100, 12, 200, 400):
            ask(llama, tokens, max_new_tokens=4)
            assert sizes(patch) == {1}  # of the steps of a call
        patch._graphs.budget = 1e9
        ask(llama, 100, max_new_tokens=4)
        assert sizes(patch) == {1, 128} and not patch.reasons


def test_warm_captures_all_sizes(llama, monkeypatch):
    monkeypatch.setattr(ahead, "warm_up", lambda *_: "")
    monkeypatch.setattr(warm.Recipe, "of", lambda *_, **__: None)
    with hf_fastattn.patch(llama) as patch:
        patch.warm(rows=(1, 2), graphs=True)
        assert sizes(patch) == {1, 256} and patch.captures == 4  # the largest that fits reads smaller ones as fast
        captures = patch.captures
        ask(llama, 12)
        assert patch.captures == captures and patch.replays > 0


def test_equal_prompts_in_small_buffers_wait_for_no_capture(llama, monkeypatch):
    """They are too small for the standard size, which was wanted and not captured, until the fourth prompt waited for another."""
    monkeypatch.setattr(policy, "FIRST", 100.0)
    monkeypatch.setattr(policy, "SIZES", (1, 128, 1024))
    with hf_fastattn.patch(llama) as patch:
        cache, before = PreallocatedCache(llama, capacity=512), []
        for _ in range(5):
            before.append((patch.captures, patch.replays))
            cache.reset()
            ask(llama, 300, past_key_values=cache)
        assert sizes(patch) == {1, 512} and [captures for captures, _ in before] == [0, 2, 2, 2, 2]
        assert all(after[1] - last[1] == 4 for last, after in itertools.pairwise(before[1:]))  # of the prompt and three tokens


@pytest.mark.parametrize("tokens", [STEP - 1, STEP])
def test_prompts_that_fill_their_buffers_wait_for_no_capture(llama, monkeypatch, tokens):
    """Buffers without a free slot would have no room for the step of a capture after a reply, which is undone."""
    monkeypatch.setattr(policy, "FIRST", 100.0)
    expected, counts, own = ask(llama, tokens, max_new_tokens=1), [], hf.MaxLengthCriteria.__call__
    with hf_fastattn.patch(llama) as patch:
        count = lambda *args, **options: (counts.append(patch.captures), own(*args, **options))[1]  # noqa: E731
        monkeypatch.setattr(hf.MaxLengthCriteria, "__call__", count)
        for _ in range(4):
            assert torch.equal(ask(llama, tokens, max_new_tokens=1), expected)
        assert counts == [0, 0, 2, 2] and patch.captures == patch.replays == 2  # at each token
        ids = torch.full((1, policy.NEAREST[-1] + tokens), 5)  # too long for a graph
        held = llama.generate(ids, max_new_tokens=1, do_sample=False, return_dict_in_generate=True).past_key_values
        assert held.storage.capacity == policy.NEAREST[-1] + STEP


def test_a_capture_after_a_reply_needs_no_larger_buffers(monkeypatch):
    """Also of a model with sliding and full layers: other buffers would end the graphs that were captured before it."""
    monkeypatch.setattr(policy, "FIRST", 100.0)
    model = family("qwen2", "cpu")
    assert policy.most_of_prompt(PreallocatedCache(model, capacity=256).storage, 1, 2048) == 256  # not of both kinds of layers
    with hf_fastattn.patch(model) as patch:
        for tokens in (128, 70, 90):
            model.generate(**prompts("holes", "cpu", rows=2, length=tokens), max_new_tokens=24, do_sample=False)
            assert (sizes(patch), patch.captures) == ({1, 128}, 2)


def test_a_capture_after_a_reply_moves_no_window(monkeypatch):
    """Tokens before a window that has not moved can be removed."""
    monkeypatch.setattr(policy, "FIRST", 100.0)
    model = tiny("mistral", sliding_window=300, max_position_embeddings=4096)
    ids = torch.randint(2, VOCAB, (1, 850), generator=torch.Generator().manual_seed(0))
    with hf_fastattn.patch(model) as patch:
        cache = PreallocatedCache(model, capacity=4096)
        for tokens in (780, 850):
            model.generate(ids[:, :tokens], past_key_values=cache, max_new_tokens=4, do_sample=False)
        assert sizes(patch) == {1, 128} and [layer.base for layer in cache.storage.layers] == [0] * len(cache.storage.layers)
        cache.crop(-200)


def test_captures_after_a_reply_take_a_part_of_its_time(llama):
    with hf_fastattn.patch(llama) as patch:
        for tokens in (100, 12):
            ask(llama, tokens)
        assert sizes(patch) == {1}


def test_captures_without_time_are_not_tried_after_each_reply(llama, monkeypatch):
    """A try compares the model, and takes time of its own."""
    tried, own = [], after._capture
    monkeypatch.setattr(after, "_capture", lambda forwards, size, until: tried.append(size) or own(forwards, size, until))
    monkeypatch.setattr(policy, "OFTEN", 1 << 30)
    with hf_fastattn.patch(llama) as patch:
        first_prompt(llama, 900)
        held = patch._graphs
        held.budget, held.seconds = 150.0, 100.0
        for _ in range(3):
            for tokens in (100, 900):
                first_prompt(llama, tokens, share=1e-9)
        assert tried == [128, 512] and sizes(patch) == {1} and held.budget > 149.0  # they would be rehearsed and captured
        held.budget = 250.0
        first_prompt(llama, share=1e-9)
        assert tried == [128, 512, 128] and sizes(patch) == {1, 128} and not patch.reasons


def test_tries_without_time_do_not_take_the_time_of_the_next_one(llama, monkeypatch):
    """Each takes more time than a call earns."""
    now, step, compare = [0.0], record.Recorder.step, present.Present.compare

    def slow(seconds, run, *args):
        now[0] += seconds
        return run(*args)

    monkeypatch.setattr(policy, "OFTEN", 1 << 30)
    monkeypatch.setattr(record.Recorder, "step", lambda *args: slow(0.2, step, *args))
    monkeypatch.setattr(present.Present, "compare", lambda self: slow(0.03, compare, self))
    with hf_fastattn.patch(llama) as patch:
        first_prompt(llama)
        for module in (after, record):
            monkeypatch.setattr(module, "time", Mock(perf_counter=lambda: now[0]))
        held, budgets = patch._graphs, []
        held.budget, held.seconds = 0.405, 0.2
        while sizes(patch) == {1} and len(budgets) < 10:
            budgets.append(held.budget)
            first_prompt(llama, share=1e-9)
            held.budget += 0.01
    assert len(budgets) == 4 and budgets[-2] < 0.43 < budgets[-1]  # the time of two steps and a comparison


def first_prompt(model, tokens=100, share=0.0, **options):
    """Read without captures after its reply, if it has no share of the time."""
    with pytest.MonkeyPatch.context() as none:
        none.setattr(policy, "SHARE", share)
        return ask(model, tokens, **options)


FAILURES = {
    "memory": (torch.OutOfMemoryError("of the device"), "captures no more graphs after its replies: .*no memory"),
    "other": (RuntimeError("of the driver"), None),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.filterwarnings("error:.*captures no more")
def test_a_capture_after_a_reply_that_fails(llama, monkeypatch, name):
    error, said = FAILURES[name]
    expected = [ask(llama, tokens) for tokens in (100, 12, 12, 60)]
    monkeypatch.setattr(policy, "SHARE", 1e9)
    with hf_fastattn.patch(llama) as patch:
        assert torch.equal(first_prompt(llama), expected[0])
        with pytest.MonkeyPatch.context() as broken:
            capture = fake_graph.RecordedGraph.capture

            def fails(self, body):
                capture(self, body)
                raise error

            broken.setattr(fake_graph.RecordedGraph, "capture", fails)
            with pytest.warns(UserWarning, match=said) if said else contextlib.nullcontext():
                assert torch.equal(ask(llama, 12), expected[1])
            assert patch._graphs.late == (said is None)
        for want, tokens in zip(expected[2:], (12, 60), strict=True):
            assert torch.equal(ask(llama, tokens), want)
        assert not patch.uncaptured and not patch.reasons


def test_a_capture_after_a_reply_that_is_interrupted(llama, monkeypatch):
    expected = ask(llama, 12)
    monkeypatch.setattr(policy, "SHARE", 1e9)
    cache = PreallocatedCache(llama, 512)
    with hf_fastattn.patch(llama) as patch:
        first_prompt(llama, past_key_values=cache)
        cache.reset()
        with pytest.MonkeyPatch.context() as broken:
            interrupt = Mock(side_effect=KeyboardInterrupt)
            broken.setattr(fake_graph.RecordedGraph, "capture", lambda self, body: (body(), interrupt()))
            with pytest.raises(KeyboardInterrupt):
                ask(llama, 12, past_key_values=cache)
        assert cache.get_seq_length() == 15 and not patch._generation.calls
        cache.reset()
        assert torch.equal(ask(llama, 12, past_key_values=cache), expected) and not patch.reasons


def test_nothing_is_captured_after_a_reply_while_another_thread_is_in_a_call_or_code_of_the_user_runs(llama, monkeypatch):
    monkeypatch.setattr(policy, "SHARE", 1e9)
    with hf_fastattn.patch(llama) as patch:
        first_prompt(llama)
        patch._generation.calls += 1  # as of another thread
        ask(llama, 12)
        patch._generation.calls -= 1
        assert sizes(patch) == {1}

    def forward(self, input_ids, attention_mask=None, position_ids=None, **kwargs):
        return LlamaForCausalLM.forward(self, input_ids, attention_mask, position_ids, **kwargs)

    llama.__class__ = type("Own", (LlamaForCausalLM,), {"forward": forward})
    with hf_fastattn.patch(llama, keep_graphs=True) as patch:
        for tokens in (100, 12, 12, 40):
            ask(llama, tokens)
        assert sizes(patch) == {1, 16}  # neither 128 nor 64


def test_the_padding_of_a_mixture_has_no_experts():
    sizes = {"hidden_size": 2048, "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 768}  # Qwen3-30B-A3B
    model = hf.model_on_meta(hf.make_config("qwen3_moe", **sizes), torch.bfloat16)
    computed = Cost.of(model)
    experts.use([module for module in model.modules() if hf.asks_for_experts(module)])
    found = [choose(cost, 1, 3, 0, graphs=(128,), asked=0, most=512).sizes for cost in (computed, Cost.of(model))]
    assert found == [(16,), (128,)]


def test_padding_is_not_stored(llama):
    cache = PreallocatedCache(llama, 256)
    with hf_fastattn.patch(llama) as patch:
        for tokens in (100, 9):
            cache.reset()
            for part in cache.storage.memory():
                part.tensor.zero_()
            ask(llama, tokens, past_key_values=cache)
        assert patch.captures and cache.get_seq_length() == 12
        assert not any(part.tensor[:, :, 12:].any() for part in cache.storage.memory())


@pytest.mark.parametrize("room", [112, 120])
def test_padding_at_the_end_of_the_buffers_and_of_the_positions(room, monkeypatch):
    monkeypatch.setattr(policy, "SHARE", 1e9)
    opt = tiny("opt", max_position_embeddings=112)
    inputs = prompts("no_padding", "cpu", rows=1)
    options = {"max_new_tokens": 16, "do_sample": False}
    expected = opt.generate(**inputs, **options)
    with hf_fastattn.patch(opt) as patch:
        cache = PreallocatedCache(opt, room, grow=False)
        for _ in range(4):
            cache.reset()
            assert torch.equal(opt.generate(**inputs, past_key_values=cache, **options), expected)
            assert cache.get_seq_length() == 111
        assert patch.captures >= 2 and not patch.reasons


def test_another_thread_begins_a_call_after_the_captures(llama, monkeypatch):
    monkeypatch.setattr(policy, "SHARE", 1e9)
    expected = ask(llama, 40)
    with hf_fastattn.patch(llama) as patch:
        capture, other, found = fake_graph.RecordedGraph.capture, [], []

        def meanwhile(self, body):
            if not other:
                other.append(threading.Thread(target=lambda: found.append(ask(llama, 40))))
                other[0].start()
            return capture(self, body)

        monkeypatch.setattr(fake_graph.RecordedGraph, "capture", meanwhile)
        for tokens in (100, 12):
            ask(llama, tokens)
        other[0].join()
        assert torch.equal(found[0], expected) and not patch.reasons


@pytest.fixture
def in_parts(monkeypatch):
    """Let prompts of small models be read in parts: the launches of a layer from Python seem to take half a second."""
    monkeypatch.setattr(policy, "SIZES", (1, 8, 32))
    monkeypatch.setattr(policy, "MOST", 32)
    monkeypatch.setattr(policy, "NEAREST", (1, 8, 16, 32))
    monkeypatch.setattr(policy, "LAUNCHES", (0.5, 0.5))
    monkeypatch.setattr(policy, "REPLAY", 1e-2)  # so that few parts take the least time
    monkeypatch.setattr(policy, "USUAL", (1, 32))
    monkeypatch.setattr(policy, "PARTS", 5)
    monkeypatch.setattr(policy, "SHARE", 1e9)


IN_PARTS = ["llama", "mistral_window_below_prompt", "gpt_oss", "qwen2", "gemma2", "opt"]


@pytest.mark.parametrize("name", IN_PARTS)
def test_prompts_and_messages_are_read_in_parts(name, in_parts):
    """By graphs that other prompts have left, of any length, in a new cache and behind a text."""
    model = family(name, "cpu")
    lengths, read = (40, 8, 100, 77, 33, 130, 64), {}
    turns = lambda cache: chat(model, [message(tokens) for tokens in lengths[:5]], cache=cache, max_new_tokens=3)  # noqa: E731
    expected = [ask(model, tokens) for tokens in lengths]
    of_chat = turns(PreallocatedCache(model))
    with hf_fastattn.patch(model) as patch:
        for _ in range(2):
            for tokens, want in zip(lengths, expected, strict=True):
                before = patch.replays, patch.captures
                assert torch.equal(ask(model, tokens), want), tokens
                read[tokens] = patch.replays - before[0] - 3, patch.captures - before[1]
        assert all(map(torch.equal, turns(PreallocatedCache(model, 512)), of_chat))
        assert (patch.uncaptured, patch.reasons) == (0, [])
    assert read == {tokens: (-(-tokens // 32), 0) for tokens in lengths}


@pytest.fixture
def most_parts(monkeypatch):
    """most_parts(function): the most graphs that read a prompt or a message while it runs; 0 if all ran from Python."""
    steps, found = forwards.Forwards._steps, []
    monkeypatch.setattr(forwards.Forwards, "_steps", lambda self, *args: (found.append(len(args[3])), steps(self, *args))[1])

    def run(function):
        found.clear()
        return function(), max(found, default=0)

    return run


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 2}, {"padding": 3}], ids=["logits", "padding"])
def test_what_no_parts_read(llama, in_parts, most_parts, options):
    """Prompts of which other logits than the last are asked for, and padded ones, though smaller ones have left such graphs."""
    options = dict(options)
    padding = options.pop("padding", 0)

    def padded(tokens):
        mask = (torch.arange(tokens) >= padding).long()[None]
        return ask(llama, tokens, **options, **({"attention_mask": mask} if padding else {}))

    lengths = (40, 8, 7, 6, 30)
    expected = [padded(tokens) for tokens in lengths]
    with hf_fastattn.patch(llama) as patch:
        for _ in range(3):
            found = [most_parts(lambda tokens=tokens: padded(tokens)) for tokens in lengths]
            assert all(torch.equal(tokens, want) for (tokens, _), want in zip(found, expected, strict=True))
            assert {parts for _, parts in found} <= {0, 1} and not patch.reasons
        assert any(entry.tokens > 1 for held in patch._graphs.entries.values() for entry in held if entry.graph)
        ask(llama, 8)
        ask(llama, 8)
        assert most_parts(lambda: ask(llama, 40))[1] > 1


def test_no_parts_read_a_prompt_for_which_the_buffers_grow(llama, in_parts, most_parts):
    cache, text = PreallocatedCache(llama, 256), ask(llama, 300)[:, :300]
    expected = llama.generate(text, max_new_tokens=4, do_sample=False)
    with hf_fastattn.patch(llama) as patch:
        for tokens in (40, 8):
            cache.reset()
            ask(llama, tokens, past_key_values=cache)
        cache.reset()
        llama.generate(text[:, :200], past_key_values=cache, max_new_tokens=4, do_sample=False)
        cache.crop(200 - cache.get_seq_length())
        found, parts = most_parts(lambda: llama.generate(text, past_key_values=cache, max_new_tokens=4, do_sample=False))
        assert torch.equal(found, expected) and parts <= 1 and not patch.reasons


def test_frequencies_that_change_within_a_prompt_are_not_read_in_parts(in_parts, most_parts):
    changing, lengths = longrope("phi3", 64), (40, 59, 61, 100)
    expected = [ask(changing, tokens) for tokens in lengths]
    with hf_fastattn.patch(changing) as patch:
        for tokens in (40, 8, 30, 90):
            ask(changing, tokens)
        found = [most_parts(lambda tokens=tokens: ask(changing, tokens)) for tokens in lengths]
        assert [parts for _, parts in found] == [2, 2, 2, 1] and not patch.reasons
    assert all(torch.equal(tokens, want) for (tokens, _), want in zip(found, expected, strict=True))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_prompt_whose_second_part_is_interrupted_leaves_the_cache_as_it_was(llama, in_parts, monkeypatch, error):
    cache, replay = PreallocatedCache(llama, 256), fake_graph.RecordedGraph.replay
    with hf_fastattn.patch(llama) as patch:
        for tokens in (40, 8, 32):
            cache.reset()
            first = ask(llama, tokens, past_key_values=cache)
        longer = torch.cat([first, first[:, :40], first[:, :40]], 1)
        seen, replays = cache.get_seq_length(), []

        def interrupted(graph):
            replays.append(graph)
            if len(replays) == 2:
                raise error("in a part")
            return replay(graph)

        with monkeypatch.context() as once:
            once.setattr(fake_graph.RecordedGraph, "replay", interrupted)
            with pytest.raises(error, match="in a part"):
                llama.generate(longer, past_key_values=cache, max_new_tokens=4)
        assert len(replays) == 2 and cache.get_seq_length() == seen
        found = llama.generate(longer, past_key_values=cache, max_new_tokens=4, do_sample=False)
        assert not patch.reasons
    assert torch.equal(found, llama.generate(longer, max_new_tokens=4, do_sample=False))


def test_what_follows_a_part_that_cannot_be_captured_is_read_from_python(llama, in_parts, monkeypatch):
    step, calls = forwards.Forwards._step, []

    def refused(self, cache, ids, given, size):
        calls.append(ids.shape[1])
        if len(calls) == 2:
            raise Uncapturable("for a test")
        return step(self, cache, ids, given, size)

    expected = ask(llama, 100)
    with hf_fastattn.patch(llama) as patch:
        for tokens in (40, 8):
            ask(llama, tokens)
        monkeypatch.setattr(forwards.Forwards, "_step", refused)
        assert torch.equal(ask(llama, 100), expected) and calls[:4] == [32, 32, 1, 1] and not patch.reasons


def test_a_model_that_changes_between_prompts_in_parts(llama, in_parts):
    with hf_fastattn.patch(llama):
        for tokens in (40, 8, 100):
            ask(llama, tokens)
        llama.model.layers[0].self_attn.scaling *= 0.5
        found = ask(llama, 100)
    assert torch.equal(found, ask(llama, 100))
