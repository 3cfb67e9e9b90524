"""A layer in one file that caches one tensor: the latents of K and V, and the rotated part of K, side by side."""

import pytest
import torch
from models import PADDINGS, prompts, tiny

import hf_fastattn
from hf_fastattn import PreallocatedCache, hf
from hf_fastattn.caches.layers import Layer
from hf_fastattn.caches.storage import PreallocatedStorage

SHAPE = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
MODEL = {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}


class LatentLayer(Layer):
    names = ("latents",)

    def joined(self, keys, values):
        self.width = keys.shape[3]
        return (torch.cat([keys, values], 3),)

    def split(self, latents):
        return latents[..., : self.width], latents[..., self.width :]


class LatentStorage(PreallocatedStorage):
    def make_layer(self, index, track):
        return LatentLayer(index, track)


class LatentCache(PreallocatedCache):
    def __init__(self):
        self._adopt(LatentStorage([hf.Kind("full")] * 2, 64))


@pytest.fixture
def model(captured):
    return tiny("deepseek_v3", **SHAPE, **MODEL, moe_intermediate_size=32, first_k_dense_replace=9)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("padding", PADDINGS)
def test_a_latent_layer_runs_under_patch_with_a_graph(model, padding, beams):
    inputs, greedy = prompts(padding, "cpu", length=60), {"max_new_tokens": 8, "do_sample": False}
    expected = [model.generate(**inputs, **greedy, num_beams=each) for each in (beams, 1)]
    with hf_fastattn.patch(model) as patch:
        cache = LatentCache()  # it grows at the first layer that has no room
        assert torch.equal(model.generate(**inputs, **greedy, num_beams=beams, past_key_values=cache), expected[0])
        parts = [(part.layer, part.name, tuple(part.tensor.shape), part.slots) for part in cache.storage.memory()]
        assert parts == [(layer, "latents", (3 * beams, 1, 256, 24), 67) for layer in range(2)]
        assert patch.replays == 6 and not patch.reasons
        cache.crop(-8)
        cache.batch_select_indices(torch.arange(0, 3 * beams, beams))
        assert torch.equal(model.generate(**inputs, **greedy, past_key_values=cache), expected[1])
