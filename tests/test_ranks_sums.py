"""Decode steps of ranks that sum by kernels: no collective is left, and the tokens are the same."""

from contextlib import contextmanager

import processes
import pytest
import torch
from conftest import INTERPRETED
from models import tiny
from test_ranks import generate, of_family, results, shared
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

import hf_fastattn
from hf_fastattn import hf
from hf_fastattn.kernels.host import launch, symmetric
from hf_fastattn.patches.graphs import graphs as graph

INPUTS, WHOLE = {"input_ids": torch.tensor([[3, 100]])}, {"return_dict_in_generate": True, "output_logits": True}
pytestmark = [
    processes.HIDDEN,
    pytest.mark.slow,
    pytest.mark.skipif(not INTERPRETED, reason="kernels run on the CPU when interpreted"),
    pytest.mark.xdist_group("ranks"),
]


class Collectives(TorchDispatchMode):
    """The names of the collectives of torch.distributed that are called, and of activations that are not in a linear layer."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        if "c10d" in str(function) or "gelu" in str(function):
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class Rerun:
    """A substitute for CUDA graphs that runs a step again. seen: collectives and kernels of the last step."""

    seen: tuple = ()

    def __init__(self, device, shared):
        self.body = None

    def rehearse(self, body):
        return body()

    def capture(self, body):
        self.body, self.fresh = body, True
        self.result = self.run()
        return self.result

    def run(self):
        kernels, call = [], launch.Launch.__call__

        def count(run, *tensors):
            kernels.append(run.kernel.fn.__name__)
            return call(run, *tensors)

        with pytest.MonkeyPatch.context() as patch, Collectives() as collectives:
            patch.setattr(launch.Launch, "__call__", count)
            result = self.body()
        Rerun.seen = collectives.names, kernels
        return result

    def replay(self):
        if not self.fresh:
            self.result.logits.copy_(self.run().logits)
        self.fresh = False


def decode(rank: int, names: list[str], folder) -> list[dict]:
    return [decode_family(rank, name, folder / name) for name in names]


def decode_by_sequence(rank: int, kv_heads: int, folder) -> list[dict]:
    """Two calls of generate(), the second with other weights of keys and values."""
    one = tiny("llama", num_key_value_heads=kv_heads).half()
    found, model = [], shared(one).half()
    with patched_with_peers(model, rank, folder, kv_sharding="sequence") as patched:
        for _ in range(2):
            got, want = (generate(each, INPUTS, max_new_tokens=3, **WHOLE) for each in (model, one))
            found.append((got.logits, want.logits, Rerun.seen, patched.reasons))
            for changed in (model, one):
                for name, weight in changed.named_parameters():
                    if "k_proj" in name or "v_proj" in name:
                        hf.local(weight).data.mul_(-0.5)
    found.append([name for name, module in model.named_modules() if "hf_fastattn" in str(vars(module).get("forward"))])
    return found


@contextmanager
def patched_with_peers(model, rank: int, folder, **settings):
    """A patched model whose ranks share memory, in files of the folder. Its graphs run again."""
    from test_exchange_kernels import shared_memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "new_graph", Rerun)
        let_share(patch)
        patch.setattr(symmetric, "connect", lambda *_: shared_memory(folder, rank, 2, dtype=torch.float16, size=64))
        with hf_fastattn.patch(model, "lean", peer_memory=True, **settings) as patched:
            yield patched


def let_share(patch) -> None:
    patch.setattr(symmetric, "why_not", lambda device: None)
    patch.setattr(symmetric, "identity", lambda device: "")
    patch.setattr(symmetric, "why_no_access", lambda device, others: None)
    patch.setattr(symmetric, "allocate", lambda *_: torch.empty(0))


def no_memory_to_share(rank: int) -> list[str]:
    def allocate(*_):
        if rank:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    found = []
    with pytest.MonkeyPatch.context() as patch:
        let_share(patch)
        patch.setattr(symmetric, "allocate", allocate)
        patch.setattr(symmetric, "connect", lambda *_: found.append("connected"))
        with pytest.raises(ValueError) as refused:
            hf_fastattn.patch(shared(of_family("llama")), "lean", peer_memory=True)
    return [*found, str(refused.value)]


def decode_family(rank: int, name: str, folder) -> dict:
    folder.mkdir(exist_ok=True)
    model = shared(of_family(name).half()).half()
    with Collectives() as collectives:
        want = generate(model, INPUTS, max_new_tokens=4, **WHOLE)
    with patched_with_peers(model, rank, folder) as patched:
        got = generate(model, INPUTS, max_new_tokens=4, **WHOLE)
    return {
        "logits": ([x.float() for x in got.logits], [x.float() for x in want.logits]),
        "seen": Rerun.seen,
        "embeddings": "_c10d_functional.all_reduce" in str(collectives.names),
        "changes": [str(change) for change in patched.changes if "all ranks" in str(change)],
        "reasons": patched.reasons,
        "forwards": [name for name, module in model.named_modules() if "hf_fastattn" in str(vars(module).get("forward"))],
    }


def test_a_rank_without_memory_to_share_ends_patch_on_all(tmp_path):
    said = "peer_memory=True is not possible: on rank 1, CUDA out of memory. Leave it out; sums are then collectives."
    assert [each.result for each in processes.run(tmp_path, 2, no_memory_to_share)] == [[said], [said]]


def test_a_step_has_no_collectives_and_fewer_launches(tmp_path):
    names = ["llama", "gemma2", "starcoder2", "gpt_oss"]
    for name in names:
        of_family(name)
    for name, first, second in zip(names, *results(processes.run(tmp_path, 2, decode, names, tmp_path, limit=200)), strict=True):
        (got, want), (collectives, kernels) = first["logits"], first["seen"]
        assert not collectives and not first["reasons"] and not first["forwards"]
        assert "kernels that also add and normalise" in first["changes"][0]
        assert all(map(torch.equal, got, second["logits"][0]))
        for a, b in zip(got[:2], want[:2], strict=True):
            torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
        assert kernels.count("all_gather_kernel") == 1
        if name in ("llama", "gemma2"):  # the others add a bias between a sum and a norm
            sums = 4 + first["embeddings"]  # of attention and the MLP, and in newer Transformers of the embeddings
            assert kernels.count("residual_kernel") == sums + 1  # the first norm is alone
            assert "rms_norm_kernel" not in kernels


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_new_heads_and_results_of_shares_are_exchanged_by_kernels(tmp_path, kv_heads):
    first, second = results(processes.run(tmp_path, 2, decode_by_sequence, kv_heads, tmp_path, limit=120))
    assert first[-1] == second[-1] == []
    for (got, want, (collectives, kernels), reasons), other in zip(first[:-1], second[:-1], strict=True):
        assert not collectives and not reasons
        assert all(map(torch.equal, got, other[0]))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.float(), b.float(), atol=2e-2, rtol=2e-2)
        counts = [kernels.count(f"{name}_kernel") for name in ("gather_heads", "merge_ranks", "all_gather", "append", "linear")]
        # Both exchanges in each of two layers; columns of the logits; linear layers: q, k and v together, o, down; the logits.
        assert counts == [2, 2, 1, 0, 2 * 3 + 1], kernels
        assert "rms_norm_kernel" not in kernels
