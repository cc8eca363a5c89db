"""Run the numerical tests as other processors would: with other vector units and thread counts.

python tests/portable.py [pytest's arguments]

A processor's results differ from another's in the order of their sums. torch, oneDNN and MKL each
choose their kernels by the vector unit they find, and can be told to find a lesser one. What this
processor does not have is left out, and said.
"""

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOMS = ("models", "surgery", "envelopes", "data/eeg")
MODULES = {
    "flow": ("activity", "judge", "measurements", "probe", "tensors", "watch"),
    "training": ("distributed", "evaluate"),
    "training/batches": ("batch", "packing", "prefix"),
    "training/step": ("captured", "compiled", "envelope_loss", "head_loss", "objective",
                      "optimizer"),
}  # fmt: skip
# What the processor must have, how many tests at once, and what the libraries are told. Threads
# that outnumber the cores must not spin while they wait.
WAYS: list[tuple[str, int, dict[str, str]]] = [
    ("", 2, {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41",
             "MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"}),
    ("avx2", 1, {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2",
                 "MKL_CBWR": "AVX2", "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}),
    ("avx512f", 1, {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
                    "OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "PASSIVE"}),
]  # fmt: skip


def vector_units() -> set[str]:
    """The flags of this processor; none where they are not known."""
    if platform.machine() not in ("x86_64", "AMD64") or not Path("/proc/cpuinfo").exists():
        return set()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def main() -> None:
    failed, known = [], vector_units()
    modules = [f"{room}/test_{name}.py" for room, names in MODULES.items() for name in names]
    for needed, at_once, settings in WAYS:
        words = " ".join(f"{key}={value}" for key, value in settings.items())
        if needed and needed not in known:
            print(f"left out, this processor has no {needed}: {words}", flush=True)
            continue
        print(words, flush=True)
        command = [
            sys.executable, "-m", "pytest", "-n", str(at_once), "-m", "not slow and not gpu",
            *(str(HERE / place) for place in (*ROOMS, *modules)), *sys.argv[1:],
        ]  # fmt: skip
        began = time.monotonic()
        if subprocess.run(command, env=os.environ | settings, check=False).returncode:
            failed.append(words)
        print(f"{time.monotonic() - began:.0f} s", flush=True)
    if failed:
        sys.exit("failed with " + "; with ".join(failed))


if __name__ == "__main__":
    main()
