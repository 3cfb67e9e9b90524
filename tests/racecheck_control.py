"""False positives of NVIDIA's racecheck, in minimal kernels:

compute-sanitizer --tool racecheck python tests/racecheck_control.py

hand_over: one warp stores an integer for four others, and mbarriers order store and load as documented; racecheck reports it,
like `pipe.send_item` and `pipe.receive_item`. take_turns: two groups of warps alternate at named barriers and share no memory;
racecheck reports the bytes with which Triton dispatches work to warps, which it does not report without the named barriers.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from hf_fastattn.kernels.attention.prefill_hopper.pipe import FIRST_TURN, named_barrier, warpgroup_barrier


@gluon.jit
def _give(smem, full, empty, count):
    for i in range(count):
        mbarrier.wait(empty, (i & 1) ^ 1)
        smem.store(gl.zeros([1], gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + i)
        warpgroup_barrier()
        mbarrier.arrive(full, count=1)


@gluon.jit
def _get(smem, full, empty, count, Out):
    for i in range(count):
        mbarrier.wait(full, i & 1)
        value = gl.max(smem.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        warpgroup_barrier()
        mbarrier.arrive(empty, count=1)
        gl.store(Out + i, value)


@gluon.jit
def hand_over(Out, count):
    smem = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    gl.warp_specialize([(_get, (smem, full, empty, count, Out)), (_give, (smem, full, empty, count))], [1], [24])


@gluon.jit
def _turns(Out, count, WG: gl.constexpr, NAMED: gl.constexpr, FIRST_TURN: gl.constexpr = FIRST_TURN):
    x = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    if NAMED and WG == 1:
        named_barrier("arrive", FIRST_TURN)
    for i in range(count):
        if NAMED:
            named_barrier("sync", FIRST_TURN + WG)
        gl.store(Out + WG * 128 + x, x + i)
        if NAMED:
            named_barrier("arrive", FIRST_TURN + 1 - WG)
    if NAMED and WG == 0:
        named_barrier("sync", FIRST_TURN)


@gluon.jit
def _apart(Out):
    x = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    gl.store(Out + 256 + x, x)


@gluon.jit
def take_turns(Out, count, NAMED: gl.constexpr):
    gl.warp_specialize(
        [(_turns, (Out, count, 0, NAMED)), (_turns, (Out, count, 1, NAMED)), (_apart, (Out,))],
        [4, 1],
        [64, 64],
    )


if __name__ == "__main__":
    for name, run in (
        ("hand_over", lambda out: hand_over[(1,)](out, 20, num_warps=4)),
        ("take_turns, without named barriers", lambda out: take_turns[(4,)](out, 20, False, num_warps=4)),
        ("take_turns", lambda out: take_turns[(4,)](out, 20, True, num_warps=4)),
    ):
        run(torch.zeros(512, device="cuda", dtype=torch.int32))
        torch.cuda.synchronize()
        print("ran", name, flush=True)
