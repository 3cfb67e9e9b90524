"""The loop of generate() reads one step late whether it has ended, so that it does not wait for the device after every token."""

import copy
import threading

import fake_graph
import pytest
import torch
from calls import At
from cases import DEVICE, slow_unless
from models import OPT, prompts, tiny
from transformers import TemperatureLogitsWarper
from transformers.generation import utils
from transformers.generation.streamers import BaseStreamer

import hf_fastattn
from hf_fastattn import hf
from hf_fastattn.hf.generation import StopCheck
from hf_fastattn.patches.calls import calls

NEW = 12
ROWS = 2


class DeviceEvent(torch.Event):
    """Counts how often it is recorded."""

    recorded = 0

    def record(self):
        DeviceEvent.recorded += 1
        super().record()


Event = DeviceEvent if DEVICE == "cuda" else fake_graph.Event


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    if DEVICE == "cpu":
        fake_graph.use(monkeypatch)
        monkeypatch.setattr(calls, "records_events", lambda device: True)
    monkeypatch.setattr(torch, "Event", Event)
    Event.recorded = 0


@pytest.fixture(params=[{"model_type": "llama"}, {"model_type": "mistral", "sliding_window": 16}], ids=["llama", "mistral"])
def model(request):
    return tiny(attn_implementation="sdpa", device=DEVICE, **request.param)


@pytest.fixture
def one():
    """A prompt of one row."""
    return prompts("no_padding", DEVICE, rows=1)


def late(model, inputs, **options) -> torch.Tensor:
    """The result of a call whose loop reads late whether it has ended."""
    Event.recorded = 0
    found = model.generate(**inputs, **{"max_new_tokens": NEW, "do_sample": False, **options})
    assert Event.recorded
    return found


def ends(model, inputs, step, **options) -> tuple[int, int]:
    """The id that a row draws in this step, counted from 0, and the first step in which it does."""
    ids = model.generate(**inputs, max_new_tokens=NEW, **options)[0, inputs["input_ids"].shape[1] :].tolist()
    return ids[step], ids.index(ids[step])


def same(out, expected) -> None:
    assert torch.equal(out.sequences, expected.sequences) and out.sequences.is_contiguous()
    assert len(out.scores) == len(expected.scores)
    for mine, theirs in zip(out.scores, expected.scores, strict=True):
        # A graph adds in another order; the scores of another step differ by more.
        bounds = {"rtol": 0, "atol": 1e-3} if DEVICE == "cuda" else {}
        torch.testing.assert_close(mine, theirs, **bounds)


STEPS = [(step, padding) for step in (0, 1, 5, NEW - 2, NEW - 1) for padding in ("no_padding", "left_padding")]


@pytest.mark.parametrize("step, padding", slow_unless(STEPS[::3].__contains__, STEPS))
def test_the_step_too_many_leaves_nothing(model, step, padding):
    inputs, twin = prompts(padding, DEVICE, rows=1), copy.deepcopy(model)
    eos, step = ends(twin, inputs, step, do_sample=False)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": eos, "return_dict_in_generate": True}
    expected = twin.generate(**inputs, **options, output_scores=True)
    patched = hf_fastattn.patch(model, "lean")
    out = model.generate(**inputs, **options, output_scores=True)
    assert Event.recorded == min(step + 1 + (step >= 2), NEW)  # the first steps run from Python, and none follows them early
    assert patched.replays == max(0, Event.recorded - 2)
    same(out, expected)
    assert out.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
    more = torch.cat([out.sequences, torch.randint(2, 100, (1, 3), device=DEVICE)], 1)  # the returned cache goes on
    new = more.shape[1] - inputs["input_ids"].shape[1]
    rest = {k: torch.nn.functional.pad(v, (0, new), value=1) for k, v in inputs.items()} | {"input_ids": more}
    mine, theirs = (
        m.generate(**rest, max_new_tokens=4, do_sample=False, past_key_values=o.past_key_values)
        for m, o in ((model, out), (twin, expected))
    )
    assert torch.equal(mine, theirs)


def test_rows_that_end_in_other_steps(model):
    inputs, twin = prompts("left_padding", DEVICE, rows=ROWS), copy.deepcopy(model)
    ids = twin.generate(**inputs, max_new_tokens=NEW, do_sample=False)[:, -NEW:]
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": [int(ids[0, 3]), int(ids[1, 6])]}
    expected = twin.generate(**inputs, **options)
    hf_fastattn.patch(model, "lean")
    for _ in range(3):
        found = late(model, inputs, **options)
        assert torch.equal(found, expected) and found.is_contiguous()


def test_sampling_leaves_the_random_numbers_as_if_it_had_not_been_too_long(model, one):
    twin = copy.deepcopy(model)
    torch.manual_seed(7)
    eos, _ = ends(twin, one, 4, do_sample=True)
    options = {"max_new_tokens": NEW, "do_sample": True, "eos_token_id": eos}
    hf_fastattn.patch(model, "lean")
    random, found = hf.generator_of(one["input_ids"].device), []
    for each in (twin, model):
        torch.manual_seed(7)
        found.append([each.generate(**one, **options), random.get_state(), each.generate(**one, **options)])
    assert Event.recorded
    for theirs, mine in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


class Streamed(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], 0

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended += 1


def test_a_streamer_gets_the_same_tokens(model, one, monkeypatch):
    monkeypatch.setattr(Streamed, "__module__", "transformers.generation.streamers")  # one of Transformers
    twin = copy.deepcopy(model)
    eos, _ = ends(twin, one, 5, do_sample=False)
    hf_fastattn.patch(model, "lean")
    for options in ({}, {"eos_token_id": eos}):
        streamers = Streamed(), Streamed()
        for each, streamer in zip((twin, model), streamers, strict=True):
            each.generate(**one, max_new_tokens=NEW, do_sample=False, streamer=streamer, **options)
        assert streamers[0].tokens == streamers[1].tokens and streamers[1].ended == 1
    assert Event.recorded


def test_the_loop_waits_for_code_of_the_caller_and_processors_with_a_state(model, one):
    eos, step = ends(model, one, 5, do_sample=False)
    hf_fastattn.patch(model, "lean")
    Event.recorded = 0
    for processor in (At(-1, None), TemperatureLogitsWarper(0.5)):
        model.generate(**one, max_new_tokens=NEW, do_sample=False, eos_token_id=eos, logits_processor=[processor])
        assert not Event.recorded and getattr(processor, "calls", step + 1) == step + 1


# Within the window, and far behind it; a rolling cache has no limit of positions.
WINDOWS = [(16, 20), (6, 512), (16, 512), (6, 20)]


@pytest.mark.parametrize("window, positions", slow_unless(WINDOWS[0].__eq__, WINDOWS))
def test_a_rolling_cache_drops_the_token_of_the_step_too_many(window, positions):
    """It has overwritten the oldest token of the window, which no later token sees."""
    model = tiny("llama", "sdpa", DEVICE, max_position_embeddings=positions)
    inputs = prompts("no_padding", DEVICE, rows=1)
    hf_fastattn.patch(model, "streaming", window=window, sinks=4)
    eos, step = ends(model, inputs, 5, do_sample=False)
    texts = []
    for waits in (False, True):
        Event.recorded = 0
        cache = hf_fastattn.RollingCache(model)
        options = {"do_sample": False, "past_key_values": cache, "logits_processor": [At(-1, None)] if waits else None}
        ids = model.generate(**inputs, **options, eos_token_id=eos, max_new_tokens=NEW)
        assert cache.get_seq_length() == inputs["input_ids"].shape[1] + step == ids.shape[1] - 1 > 20
        assert Event.recorded == (0 if waits else step + 2)  # each step, and the one too many
        ids = torch.cat([ids, inputs["input_ids"][:, :7]], 1)  # a message
        ids = model.generate(input_ids=ids, **options, eos_token_id=None, max_new_tokens=NEW)
        texts.append(ids.tolist())
    assert texts[0] == texts[1]
    Event.recorded = 0
    found = model.generate(**inputs, do_sample=False, eos_token_id=eos, max_new_tokens=NEW)  # over a cache of its own
    assert found.shape[1] == inputs["input_ids"].shape[1] + step + 1 and Event.recorded


def test_the_step_too_many_does_not_drop_the_first_token_of_a_rolling_cache(one):
    """After it the caller could remove one token at most."""
    model = tiny("llama", "sdpa", DEVICE)
    eos, step = ends(model, one, 5, do_sample=False)
    hf_fastattn.patch(model, "streaming", window=one["input_ids"].shape[1] + step - 4, sinks=4)
    cache = hf_fastattn.RollingCache(model)
    model.generate(**one, do_sample=False, eos_token_id=eos, max_new_tokens=NEW, past_key_values=cache)
    assert cache.get_seq_length() == cache.storage.capacity
    cache.crop(-3)


def test_other_models_and_models_without_graphs_wait(model, one):
    options = {"max_new_tokens": 3, "do_sample": False}
    with hf_fastattn.patch(model, "lean"):
        tiny("llama", "sdpa", DEVICE).generate(**one, **options)
    model.generate(**one, **options)
    hf_fastattn.patch(model, "lean", graph=False)
    model.generate(**one, **options)
    assert not Event.recorded


def test_the_class_of_transformers_is_back_after_the_last_call(model, one, monkeypatch):
    inputs, own = one, utils.DeferredStopCheck
    started, ended = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60)
    seen, check, first = [], StopCheck.__init__, threading.current_thread()

    def meet(self, *args):
        check(self, *args)
        seen.append(utils.DeferredStopCheck)
        started.wait()
        if threading.current_thread() is first:
            ended.wait()

    monkeypatch.setattr(StopCheck, "__init__", meet)
    hf_fastattn.patch(model, "lean")
    twin = copy.deepcopy(model)
    assert utils.DeferredStopCheck is own

    def short():
        twin.generate(**inputs, max_new_tokens=3, do_sample=False)
        seen.append(utils.DeferredStopCheck)
        ended.wait()

    other = threading.Thread(target=short)
    other.start()
    model.generate(**inputs, max_new_tokens=3, do_sample=False)
    other.join()
    assert seen == [StopCheck] * 3 and utils.DeferredStopCheck is own


def test_a_version_without_the_class_and_another_package_with_its_own(model, one, monkeypatch):
    own, other = utils.DeferredStopCheck, type("Other", (utils.DeferredStopCheck,), {})
    hf_fastattn.patch(model, "lean")
    with monkeypatch.context() as patch:
        patch.delattr(utils, "DeferredStopCheck")
        with hf.late_stop_checks(lambda *_: None):
            assert not hasattr(utils, "DeferredStopCheck")
        assert not hasattr(utils, "DeferredStopCheck")
    monkeypatch.setattr(utils, "DeferredStopCheck", other)
    model.generate(**one, max_new_tokens=3, do_sample=False)
    assert utils.DeferredStopCheck is other is not own and not Event.recorded


def test_torchs_default_device_is_not_that_of_the_flags(model, one, monkeypatch):
    hf_fastattn.patch(model, "lean")
    init, devices = StopCheck.__init__, []

    def elsewhere(self, *args):
        with torch.device("meta"):
            init(self, *args)
        devices.extend(flag.device.type for slot in self.slots for flag in slot[:2])

    monkeypatch.setattr(StopCheck, "__init__", elsewhere)
    late(model, one)
    assert set(devices) == {"cpu"}


def test_a_full_cache_that_does_not_grow():
    model, inputs = tiny("llama", "sdpa", DEVICE), prompts("no_padding", DEVICE, rows=1)
    eos, step = ends(model, inputs, 6, do_sample=False)
    want = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=eos)
    hf_fastattn.patch(model, "lean")
    for _ in range(2):
        cache = hf_fastattn.PreallocatedCache(model, capacity=inputs["input_ids"].shape[1] + step, grow=False)
        assert torch.equal(late(model, inputs, eos_token_id=eos, past_key_values=cache), want)


@pytest.mark.parametrize("rolling", [False, True])
def test_the_last_row_of_a_table_of_positions(rolling):
    """A step too many would read beyond the table. Rolling, its rows are zero: they look like no positions."""
    inputs, model = prompts("no_padding", DEVICE, rows=1), tiny("opt", "sdpa", DEVICE, **OPT)
    table, length = model.model.decoder.embed_positions, inputs["input_ids"].shape[1]
    patch = lambda: hf_fastattn.patch(model, **{"backend": "streaming", "window": 6, "sinks": 2} if rolling else {})  # noqa: E731
    if rolling:
        table.weight.data.zero_()
        patch()
    new = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[0, length:].tolist()
    step = next(step for step in range(4, NEW - 1) if new.index(new[step]) == step)
    if rolling:
        hf_fastattn.unpatch(model)
    table.weight = torch.nn.Parameter(table.weight[: length + step + 2])  # the first two rows are for padding
    model.config.max_position_embeddings = length + step
    patch()
    if rolling:
        options = {"do_sample": False, "past_key_values": hf_fastattn.RollingCache(model)}
        found = model.generate(**inputs, **options, eos_token_id=new[step], max_new_tokens=NEW)
    else:
        found = late(model, inputs, eos_token_id=new[step])
    assert found[0, length:].tolist() == new[: step + 1]


def test_the_models_code_does_not_run_once_more_and_a_cache_without_tokens_is_not_cropped(model, one):
    calls = []
    eos, step = ends(model, one, 5, do_sample=False)
    hook = model.lm_head.register_forward_hook(lambda *_: calls.append(1))  # of the caller: no step is captured
    with hook, hf_fastattn.patch(model, "lean"):
        late(model, one, eos_token_id=eos)
    assert len(calls) == step + 1
    model.train()
    model.gradient_checkpointing_enable()
    hf_fastattn.patch(model, "lean")
    late(model, one, eos_token_id=eos, return_dict_in_generate=True)


@pytest.mark.parametrize("sampled", [False, True])
def test_numbers_that_another_thread_draws_are_not_drawn_again(model, one, sampled, monkeypatch):
    random, finish, after = hf.generator_of(one["input_ids"].device), StopCheck.finish, []
    torch.manual_seed(3)
    eos, _ = ends(model, one, 5, do_sample=sampled)
    hf_fastattn.patch(model, "lean")

    def draws_before(self):
        torch.rand(3, device=DEVICE)
        after.append(random.get_state())
        return finish(self)

    monkeypatch.setattr(StopCheck, "finish", draws_before)
    torch.manual_seed(3)
    late(model, one, eos_token_id=eos, do_sample=sampled)
    assert torch.equal(random.get_state(), after[0])
