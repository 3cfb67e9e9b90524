"""Functions that run in several processes at once, as the ranks of a process group."""

import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.tensor  # before the processes are forked, which then need not import it

HERE = Path(__file__).parent
HIDDEN = pytest.mark.skipif(torch.cuda.is_available() or not hasattr(os, "fork"), reason="ranks on the CPU, in forked processes")


class Ended(NamedTuple):
    """A process that has ended: the result of its function, None if it raised; what it printed; after how many seconds."""

    result: object
    output: str
    seconds: float


def run(folder: Path, count: int, function, *args, limit: float = 60.0) -> list[Ended]:
    """Run function(rank, *args) in `count` forked processes, the ranks of a gloo group. Fails after `limit` seconds.

    The store of the group is a file. A TCPStore would have a thread here, and a process forked while it holds a lock hangs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("store", *(f"{rank}.pickle" for rank in range(count))):  # of an earlier run
        (folder / name).unlink(missing_ok=True)
    pids = {}
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            _be(rank, count, folder, function, args)
        pids[rank] = pid
    begin, seconds = time.monotonic(), {}
    while len(seconds) < count and time.monotonic() < begin + limit:
        for rank in pids.keys() - seconds.keys():
            ended, status = os.waitpid(pids[rank], os.WNOHANG)
            if ended:
                seconds[rank] = time.monotonic() - begin
                if code := os.waitstatus_to_exitcode(status):
                    _say(folder / f"{rank}.txt", code)
        time.sleep(0.02)
    late = sorted(pids.keys() - seconds.keys())
    for rank in late:
        os.kill(pids[rank], signal.SIGUSR1)  # which writes where the rank is
        time.sleep(0.5)
        os.kill(pids[rank], signal.SIGKILL)
        os.waitpid(pids[rank], 0)
    return _ended(folder, count, late, limit, seconds)


def _say(path: Path, code: int) -> None:
    """Append how a process ended. code: negative for that of a signal."""
    with path.open("a") as out:
        out.write(f"\nexit code {code}")


def _ended(folder: Path, count: int, late: list[int], limit: float, seconds: dict[int, float]) -> list[Ended]:
    output = [(folder / f"{rank}.txt").read_text() for rank in range(count)]
    assert not late, "\n".join(f"rank {rank} was still running after {limit} seconds:\n{output[rank]}" for rank in late)
    ended = []
    for rank in range(count):
        result = folder / f"{rank}.pickle"
        ended.append(Ended(pickle.loads(result.read_bytes()) if result.exists() else None, output[rank], seconds[rank]))
    return ended


def run_on_gpus(folder: Path, count: int, function, *args, limit: float = 120.0) -> list[Ended]:
    """Run function(rank, *args) in `count` new processes, the ranks of an NCCL group, each with a GPU.

    If there are fewer GPUs, ranks share them, in a gloo group: NCCL has one rank on a GPU. Kernels that wait for each other take
    turns there. It fails after `limit` seconds. Processes cannot be forked from one that has used a GPU. They find the function
    by its name, in the folder of the tests.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():  # of an earlier run
        path.unlink()
    (folder / "call").write_bytes(pickle.dumps((function, args)))
    begins = f"import processes; from pathlib import Path; processes._be_on_gpu(Path({str(folder)!r}), {count})"
    shared = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"} if count > torch.cuda.device_count() else {}
    environment = {**os.environ, **shared, "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path]), "WORLD_SIZE": str(count)}
    running, begin, seconds = {}, time.monotonic(), {}
    for rank in range(count):
        with (folder / f"{rank}.txt").open("wb") as out:
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank % torch.cuda.device_count())}
            running[rank] = subprocess.Popen([sys.executable, "-c", begins], stdout=out, stderr=out, env=own, cwd=HERE)
    while len(seconds) < count and time.monotonic() < begin + limit:
        for rank in running.keys() - seconds.keys():
            if (code := running[rank].poll()) is not None:
                seconds[rank] = time.monotonic() - begin
                if code:
                    _say(folder / f"{rank}.txt", code)
        time.sleep(0.02)
    late = sorted(running.keys() - seconds.keys())
    for rank in late:
        running[rank].send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        running[rank].kill()
        running[rank].wait()
    return _ended(folder, count, late, limit, seconds)


def _be_on_gpu(folder: Path, count: int) -> None:
    """Be one rank, until the end of the function. The process ends as that of a script does."""
    faulthandler.register(signal.SIGUSR1, file=2)
    function, args = pickle.loads((folder / "call").read_bytes())
    rank, device = int(os.environ["RANK"]), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    store = dist.FileStore(str(folder / "store"), count)
    nccl = {"backend": "nccl", "device_id": device} if count <= torch.cuda.device_count() else {"backend": "gloo"}
    dist.init_process_group(store=store, rank=rank, world_size=count, **nccl)
    if count > torch.cuda.device_count():
        funcol.all_gather_tensor = _gather_on_the_host
    result = function(rank, *args)
    (folder / f"{rank}.part").write_bytes(pickle.dumps(result))
    (folder / f"{rank}.part").rename(folder / f"{rank}.pickle")


def _gather_on_the_host(tensor: torch.Tensor, gather_dim: int, group, tag: str = "") -> torch.Tensor:
    """The collective that gloo has not for tensors of a GPU."""
    parts = [torch.empty(tensor.shape, dtype=tensor.dtype) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.cpu().contiguous())
    return torch.cat(parts, gather_dim).to(tensor.device)


def _be(rank: int, count: int, folder: Path, function, args) -> None:
    """Be one rank, until the end of this process."""
    code = 1
    try:
        out = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
        faulthandler.enable(file=2)  # if a signal ends the process
        faulthandler.register(signal.SIGUSR1, file=2)
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
        store = dist.FileStore(str(folder / "store"), count)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(hours=2))
        result = function(rank, *args)
        (folder / f"{rank}.part").write_bytes(pickle.dumps(result))
        (folder / f"{rank}.part").rename(folder / f"{rank}.pickle")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
