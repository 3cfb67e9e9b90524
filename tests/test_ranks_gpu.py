"""Ranks on several GPUs, over NCCL and over memory that they share."""

import functools
import hashlib
import os
import re
import signal
import time
import warnings

import processes
import pytest
import test_ranks
import torch
import torch.distributed as dist
from conftest import DEVICE
from models import COMMON, FAMILIES, prompts, tiny
from test_ranks import NEW, divided, generate, graphs_of, outcome, results, tokens_and_logits
from transformers.distributed import DistributedConfig
from transformers.utils import logging

import hf_fastattn
from hf_fastattn.context_parallel import ORDERS, positions, ring_attention
from hf_fastattn.kernels.decode import all_gather, all_reduce, residual
from hf_fastattn.kernels.host import symmetric

GPUS = torch.cuda.device_count() if DEVICE == "cuda" else 0
SHARE = os.environ.get("RANKS_SHARE_GPUS") == "1" and GPUS > 0  # ranks without a GPU of their own share one; without NCCL


def needs(count: int):
    return pytest.mark.skipif(count > GPUS and not SHARE, reason=f"needs {count} GPUs")


pytestmark = needs(2)
MODES = {
    "collectives": {"peer_memory": False},
    "peer memory": {"peer_memory": True},
    "sequence": {"kv_sharding": "sequence"},
    "sequence over collectives": {"kv_sharding": "sequence", "peer_memory": False},
}
NAMES = {2: test_ranks.SHARED, 4: ["llama", "qwen2", "gpt_oss"], 8: ["llama", "qwen2", "gpt_oss"]}  # by the number of ranks
NO_NCCL = "Ranks share GPUs, which those of NCCL cannot."
OWN_GPUS = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
EIGHT = {"num_attention_heads": 8, "head_dim": 16}  # for eight ranks
COUNTS = [pytest.param(count, marks=needs(count)) for count in NAMES]
SIZES = (8, 1000, 2048, 4096, 8192)
DTYPES = (torch.float32, torch.bfloat16)
REPLAYS, CALLS, SUMS = (250, 4, 300) if SHARE else (2500, 4, 3000)  # ranks on the same GPU take turns of milliseconds
KEPT = []  # until the process ends


def own_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def without_nccl(count: int, mode: str) -> bool:
    return count > GPUS and MODES[mode].get("peer_memory") is False


def pair(name: str, dtype: torch.dtype = torch.float32, **own):
    """A tiny model on the GPU of the rank, and its copy that all ranks share."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model_type, config = test_ranks.BIASES.get(name) or FAMILIES[name]
    one = tiny(model_type, device=own_device(), **{**config, **own}).to(dtype)
    return one, divided(one, DistributedConfig(tp_size=dist.get_world_size()), dtype=dtype)


def bits(tensors) -> str:
    digest = hashlib.sha256()
    for x in tensors:
        digest.update(x.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def errors_of(found, want) -> torch.Tensor:
    """The largest differences of two calls' logits, (steps, rows), up to the first token that differs in any row."""
    new = len(want.logits)
    differ = (found.sequences != want.sequences)[:, -new:].any(0).nonzero().flatten().tolist()
    steps = differ[0] + 1 if differ else new
    return (torch.stack(found.logits[:steps]).float() - torch.stack(want.logits[:steps]).float()).abs().amax(2)


def error_of(found, want) -> float:
    return errors_of(found, want).max().item()


# ---- tokens ----


def decode_family(rank: int, name: str, dtype: torch.dtype) -> dict:
    count = dist.get_world_size()
    heads = {2: {}, 4: {"num_key_value_heads": 4}, 8: {"num_key_value_heads": 8, **EIGHT}}[count]
    one, model = pair(name, dtype, **heads)
    found = {}
    for padding in ("no_padding", "left_padding"):
        inputs = prompts(padding, one.device)
        want = generate(one, inputs, return_dict_in_generate=True, output_logits=True)
        plain = generate(model, inputs, return_dict_in_generate=True, output_logits=True)
        for mode, options in MODES.items():
            if without_nccl(count, mode):
                found[padding, mode] = NO_NCCL
                continue
            try:
                patch = hf_fastattn.patch(model, "lean", **options)
            except ValueError as error:
                found[padding, mode] = str(error)
                continue
            with patch:
                calls = [tokens_and_logits(model, inputs) for _ in range(4)]
                early = {"eos_token_id": want.sequences[:, -NEW // 2].tolist(), "pad_token_id": 0}
                ended = [generate(each, inputs, **early) for each in (model, one)]
            found[padding, mode] = {
                "ends": torch.equal(*ended),
                "tokens": all(torch.equal(each.sequences, want.sequences) for each in calls),
                "repeats": torch.equal(calls[2].sequences, calls[3].sequences),  # the third call captures the prompt
                "error": max(error_of(each, want) for each in calls),
                "usual error": max(errors_of(each, want).median().item() for each in calls),
                "plain error": error_of(plain, want),
                "largest": want.logits[0].abs().max().item(),
                "logits": bits(logits for each in calls for logits in each.logits),
                "steps": (patch.captures, patch.uncaptured),
                "reasons": patch.reasons,
                "captured": 1 if mode.startswith("sequence") or count > GPUS else 2,  # a step, and the prompt without gloo
            }
    return found


def decode(rank: int, names: list[str], dtype: torch.dtype) -> dict:
    return {name: decode_family(rank, name, dtype) for name in names}


DECODED = [
    pytest.param((count, dtype), marks=[pytest.mark.xdist_group(f"{count} {dtype}"), needs(count)])
    for count in NAMES
    for dtype in DTYPES
]


@pytest.fixture(scope="module", params=DECODED, ids=str)
def decoded(request, tmp_path_factory):
    count, dtype = request.param
    folder = tmp_path_factory.mktemp("decode")
    return dtype, results(processes.run_on_gpus(folder, count, decode, NAMES[count], dtype, limit=280))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", test_ranks.SHARED)
def test_tokens_are_those_of_one_gpu_and_logits_the_same_bits_on_all_ranks(decoded, name, mode):
    dtype, found = decoded
    if name not in found[0]:
        pytest.skip("not with so many ranks")
    for padding in ("no_padding", "left_padding"):
        mine, *others = (each[name][padding, mode] for each in found)
        if isinstance(mine, str):
            assert mode.startswith("sequence") or mine == NO_NCCL, mine
            assert all(mine == other for other in others), mine
            pytest.skip(mine)
        assert mine["steps"] == (mine["captured"], 0), mine
        assert not mine["reasons"] or len(found) > GPUS, mine  # of the prompt
        assert all(mine["logits"] == other["logits"] for other in others)
        assert mine["repeats"]
        if dtype == torch.float32:
            assert mine["tokens"] and mine["ends"]
        else:  # other sums than on one GPU; for some tokens they decide which experts of gpt_oss compute them
            error = mine["usual error" if name == "gpt_oss" else "error"]
            allowed = 3 * mine["plain error"] + 8 * torch.finfo(dtype).eps * mine["largest"]
            assert error <= allowed, (error, mine["plain error"], mine["largest"])


def decode_few_heads(rank: int, dtype: torch.dtype) -> list:
    """A model with fewer KV heads than ranks."""
    one, model = pair("llama", dtype, **(EIGHT if dist.get_world_size() == 8 else {}))
    found = []
    for padding in ("no_padding", "left_padding"):
        inputs = prompts(padding, one.device)
        want = generate(one, inputs, return_dict_in_generate=True, output_logits=True)
        with hf_fastattn.patch(model, "lean", kv_sharding="sequence") as patch:
            first, again = (generate(model, inputs, return_dict_in_generate=True, output_logits=True) for _ in range(2))
        assert patch.captures and not patch.uncaptured, patch.reasons
        tokens, error = torch.equal(first.sequences, want.sequences), error_of(first, want)
        found.append((bits(first.logits), bits(again.logits), tokens, error))
    return found


@pytest.mark.parametrize("count", COUNTS[1:])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fewer_kv_heads_than_ranks(tmp_path, dtype, count):
    if count > GPUS and dtype == torch.float32:
        pytest.skip(f"K and V of linear layers in float32 are gathered by collectives. {NO_NCCL}")
    for found in zip(*results(processes.run_on_gpus(tmp_path, count, decode_few_heads, dtype)), strict=True):
        assert len({logits for logits, _, _, _ in found} | {again for _, again, _, _ in found}) == 1
        assert all(error < 1e-3 if dtype == torch.float32 else error < 0.5 for _, _, _, error in found)
        assert dtype != torch.float32 or all(tokens for _, _, tokens, _ in found)


# ---- many steps ----


def replay(rank: int, mode: str) -> dict:
    _, model = pair("llama", torch.bfloat16, hidden_size=512, num_attention_heads=8, num_key_value_heads=8, head_dim=64)
    model.config.max_position_embeddings = REPLAYS + 200
    inputs = prompts("left_padding", own_device(), rows=2)
    options = {"max_new_tokens": REPLAYS + 2, "return_dict_in_generate": True, "output_logits": True}
    with hf_fastattn.patch(model, "lean", **MODES[mode]) as patch:
        found = [generate(model, inputs, **options) for _ in range(CALLS)]
        replays = patch.replays
    return {
        "replays": replays,
        "same": all(torch.equal(each.sequences, found[0].sequences) for each in found),
        "logits": [bits(each.logits) for each in found],
    }


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("mode", MODES)
def test_many_replays_have_the_same_bits_on_all_ranks(tmp_path, mode, count):
    if without_nccl(count, mode):
        pytest.skip(NO_NCCL)
    first, *others = results(processes.run_on_gpus(tmp_path, count, replay, mode, limit=200))
    assert first["replays"] >= REPLAYS * CALLS
    assert first["same"] and all(first == other for other in others)


# ---- sums and columns ----


def exchange_many(rank: int, dtype: torch.dtype) -> list[str]:
    """Sums and columns of random sizes, with random pauses of either GPU before them."""
    device, world = own_device(), dist.get_world_size()
    block = all_reduce.block_bytes(8192, dtype)
    peers = symmetric.connect(dist.group.WORLD, block, symmetric.allocate(world, block, device))
    both, own = (torch.Generator().manual_seed(seed) for seed in (0, rank + 1))
    draw = lambda generator, limit: int(torch.randint(limit, (1,), generator=generator))  # noqa: E731
    count = torch.zeros(2, dtype=torch.int64, device=device)
    for _ in range(SUMS):
        rows, size = 1 + draw(both, 64), SIZES[draw(both, len(SIZES))]
        on_gpu = torch.Generator(device).manual_seed(draw(both, 1 << 30))
        parts = torch.randn(world, rows, size, device=device, generator=on_gpu).to(dtype)
        if not draw(own, 8):
            torch.cuda._sleep(draw(own, 200_000))
        x = parts[rank].clone()
        if draw(both, 3):
            residual.run(residual.Chain(x, peers=peers))
            count[0] += (x != functools.reduce(torch.add, parts.float().unbind()).to(dtype)).any()
        else:
            columns = all_gather.all_gather(x, peers)
            count[1] += (columns != torch.cat(parts.unbind(), 1)).any()
    sums, columns = count.tolist()
    return [f"{sums} sums", f"{columns} columns"]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_and_columns_of_any_size_are_right_on_all_gpus(tmp_path, dtype, count):
    for found in results(processes.run_on_gpus(tmp_path, count, exchange_many, dtype)):
        assert found == ["0 sums", "0 columns"]


def with_gradients(attention, given, dout) -> list[torch.Tensor]:
    given = [x.detach().requires_grad_() for x in given]
    out = attention(*given)
    return [out.detach(), *torch.autograd.grad(out, given, dout.to(out.dtype))]


def attend_in_rings(rank: int) -> dict:
    sdpa = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    device, found, world = own_device(), {}, dist.get_world_size()
    for dtype, tokens in ((torch.bfloat16, 4096), (torch.float32, 512)):
        torch.manual_seed(0)
        *text, dout = (torch.randn(2, heads, tokens, 64, dtype=dtype).to(device) for heads in (8, 2, 2, 8))
        want, plain = with_gradients(sdpa, [x.double() for x in text], dout), with_gradients(sdpa, text, dout)
        for order in ORDERS:
            at = positions(order, rank, world, tokens // world).to(device)
            mine = with_gradients(functools.partial(ring_attention, order=order), [x[:, :, at] for x in text], dout[:, :, at])
            for name, one, right, peer in zip(("out", "dq", "dk", "dv"), mine, want, plain, strict=True):
                found[order, str(dtype), name] = (
                    (one - right[:, :, at]).abs().max().item(),
                    (peer - right).abs().max().item() + 4 * torch.finfo(dtype).eps * max(1.0, right.abs().max().item()),
                )
    return found


@pytest.mark.parametrize("count", COUNTS)
def test_rings_over_nccl_are_right(tmp_path, count):
    if count > GPUS:
        pytest.skip(NO_NCCL)
    for found in results(processes.run_on_gpus(tmp_path, count, attend_in_rings)):
        for error, allowed in found.values():
            assert error <= 2 * allowed, found


# ---- failures ----


class Stops(test_ranks.StopsAt):
    def __call__(self, ids, scores, **kwargs):
        return super().__call__(ids, scores).to(ids.device)


class Kills(test_ranks.Puts):
    """Kills its process with the third token."""

    def __init__(self):
        super().__init__(lambda: os.kill(os.getpid(), signal.SIGKILL))


def fail(rank: int, how: str, mode: str) -> list:
    one, model = pair("llama")
    inputs = prompts("left_padding", one.device)
    puts = lambda act: lambda: test_ranks.Puts(act)  # noqa: E731
    act = {"raises": puts(test_ranks.divide_by_zero), "is interrupted": puts(test_ranks.interrupt), "is killed": Kills}.get(how)
    with warnings.catch_warnings(action="ignore"), hf_fastattn.patch(model, "lean", **MODES[mode]) as patch:
        for _ in range(3):  # the third one captures the prompt, whose sums are collectives
            generate(model, inputs)
        options = {"stopping_criteria": [Stops(100 - rank)]} if act is None else {}
        if rank and act is not None:
            options["streamer"] = act()
        begin = time.monotonic()
        try:
            first = outcome(lambda: generate(model, inputs, max_new_tokens=200, **options))
        except KeyboardInterrupt:
            first = "KeyboardInterrupt"
        seconds = time.monotonic() - begin
        return [first, seconds, outcome(lambda: generate(model, inputs)), len(graphs_of(patch))]


@OWN_GPUS
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["raises", "is interrupted", "is killed", "stops earlier"])
def test_the_other_rank_ends_with_a_sentence(tmp_path, how, mode):
    first, second = processes.run_on_gpus(tmp_path, 2, fail, how, mode)
    assert first.result is not None, first.output
    said, seconds, again, graphs = first.result
    assert re.match(r"RuntimeError: .*([Rr]ank 1)", said), said
    assert seconds < 10 and not graphs
    assert "aborted" in again or "rank 1" in again.lower(), again
    if how == "is killed":
        assert second.result is None
    else:
        assert second.result is not None, second.output


def leave_the_patch(rank: int, mode: str, destroys: bool) -> bool:
    one, model = pair("llama")
    KEPT.append((model, hf_fastattn.patch(model, "lean", **MODES[mode])))
    inputs = prompts("no_padding", one.device)
    want = generate(one, inputs)
    found = all(torch.equal(generate(model, inputs), want) for _ in range(3))  # the third one captures the prompt
    if destroys:
        dist.destroy_process_group()
    return found


@OWN_GPUS
@pytest.mark.parametrize("destroys", [False, True], ids=["exits", "destroys the group"])
@pytest.mark.parametrize("mode", ["collectives", "peer memory", "sequence"])
def test_a_process_ends_although_the_model_is_still_patched(tmp_path, mode, destroys):
    ended = processes.run_on_gpus(tmp_path, 2, leave_the_patch, mode, destroys, limit=90)
    assert results(ended) == [True, True]
    assert not any("exit code" in each.output for each in ended), "\n".join(each.output for each in ended)


@OWN_GPUS
def test_differences_are_refused_and_the_group_continues(tmp_path):
    for found in results(processes.run_on_gpus(tmp_path, 2, differ)):
        assert re.match("ValueError: .*input_ids, a tensor of shape .3, 96. and int64, has other values on rank 1", found[0])
        assert found[1:] == [True, True]


def differ(rank: int) -> list:
    one, model = pair("llama")
    inputs = prompts("no_padding", one.device)
    with hf_fastattn.patch(model, "lean"):
        ids = inputs["input_ids"].clone()
        ids[0, -1] = (ids[0, -1] + rank) % COMMON["vocab_size"]
        refused = outcome(lambda: generate(model, {"input_ids": ids}))
        torch.manual_seed(rank)
        sampled = generate(model, inputs, do_sample=True)
        both = [torch.empty_like(sampled) for _ in range(2)]
        dist.all_gather(both, sampled)
        return [refused, torch.equal(*both), torch.equal(generate(model, inputs), generate(one, inputs))]
