"""Runs the tests that compare numbers with the rounding of other CPUs, for `make test-cpus`.

torch selects its CPU kernels by the instruction sets of the CPU, and ATEN_CPU_CAPABILITY makes it select those of an older CPU;
MKL_CBWR=COMPATIBLE does the same for MKL's products. Two threads split sums in two. A test that passes under only one setting
depends on rounding.

    python tests/cpus.py [pytest's arguments]    without arguments: WIDE on one thread, NARROW on two
"""

import os
import subprocess
import sys
import time

import torch

WIDE = [
    f"tests/test_{name}.py"
    for name in ("rounding", "evaluate", "patches", "generate", "backends", "streaming", "fuse", "caches", "kernels")
]
NARROW = [f"tests/test_{name}.py" for name in ("rounding", "evaluate", "caches")]
# SmolLM2's tests take minutes each, and tiny models make the same comparisons. The other test starts another process.
LEFT_OUT = ["-k", "not smollm2 and not interpreted_kernels"]
CAPABILITIES = ("default", "avx2", "avx512")  # in ascending order
SETTINGS = [{"ATEN_CPU_CAPABILITY": name} for name in CAPABILITIES] + [{"MKL_CBWR": "COMPATIBLE"}]


def why_not(setting: dict[str, str]) -> str | None:
    """The reason why this CPU or this torch does not support a setting; None if it does."""
    if "MKL_CBWR" in setting:
        return None if torch.backends.mkl.is_available() else "this torch has no MKL"
    wanted, has = setting["ATEN_CPU_CAPABILITY"], torch.backends.cpu.get_cpu_capability().lower()
    if wanted != "default" and (has not in CAPABILITIES or CAPABILITIES.index(wanted) > CAPABILITIES.index(has)):
        return f"this CPU has no {wanted.upper()}; torch finds {has.upper()}"
    return None


def main(arguments: list[str]) -> int:
    cores, said, failed = os.cpu_count() or 1, [], False
    for threads in (1, 2):
        for setting in SETTINGS:
            name = f"{' '.join('='.join(item) for item in setting.items())} OMP_NUM_THREADS={threads}"
            if (reason := why_not(setting)) is not None:
                said.append(f"skipped  {name}: {reason}")
                continue
            print(f"\n=== {name}", flush=True)
            which = arguments or (WIDE if threads == 1 else NARROW)
            workers = ["-n", str(max(1, min(8, cores // threads))), "--dist=loadgroup"]
            command = [sys.executable, "-m", "pytest", "-q", *workers, *LEFT_OUT, *which]
            began = time.perf_counter()
            own = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}  # processes share the cores
            code = subprocess.run(command, env={**os.environ, **setting, **own}).returncode
            failed |= code != 0
            said.append(f"{'FAILED ' if code else 'passed '}  {name}: {time.perf_counter() - began:.0f} s")
    print("\n" + "\n".join(said))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
