"""What the machine gives in this minute: bytes read and multiplications a second by the CPUs that servers are pinned to.

A busy or virtual machine changes within minutes, so every figure is read beside the probe of its round.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import psutil
from peers.peer import Setup
from peers.process import go_first

from comparison.limits import Machine

SCRIPT: Final = """
import json, sys, time
import numpy, torch
torch.set_num_threads(int(sys.argv[1]))
a, b = (torch.randn(1024, 1024) for _ in range(2))
pairs = [lambda: a @ b, lambda: a.bfloat16() @ b.bfloat16(), (lambda x, y: lambda: x @ y)(a.numpy(), b.numpy())]
def best(run, work, least_s=0.4):
    run()
    found, until = 0.0, time.perf_counter() + least_s
    while time.perf_counter() < until:
        began = time.perf_counter()
        run()
        found = max(found, work / (time.perf_counter() - began))
    return found
for line in sys.stdin:
    x = torch.ones(int(line) // 4)
    print(json.dumps([best(x.sum, x.numel() * 4), max(best(pair, 2 * 1024**3) for pair in pairs)]), flush=True)
    del x
"""
MOST_BYTES: Final = 1 << 30


class Probe:
    """A process that measures when it is asked, and rests in between."""

    def __init__(self, setup: Setup) -> None:
        threads = str(setup.threads)
        env = {**os.environ, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
        command = [*setup.place, sys.executable, "-c", SCRIPT, threads]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True)
        if setup.first:
            go_first(self._process.pid)

    def measure(self, working_set: float) -> Machine:
        """`working_set`: bytes that are read again and again; a small model's stay in the cache."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(min(MOST_BYTES, int(working_set)), file=self._process.stdin, flush=True)
        return Machine(*json.loads(self._process.stdout.readline()))

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def cpu_model() -> str:
    """As /proc/cpuinfo names it, with what matters of its flags."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    known = dict(line.split(":", 1) for line in lines if ":" in line)
    told = {key.strip(): value.strip() for key, value in known.items()}
    flags = told.get("flags", "").split()
    shown = [flag for flag in ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16") if flag in flags]
    return f"{told.get('model name', 'unknown')} (family {told.get('cpu family')}, model {told.get('model')}; {' '.join(shown)})"


def busy_seconds(cpus: str) -> float:
    """CPU seconds that anybody used of these CPUs since the start of the machine, those that its host took away included."""
    times = psutil.cpu_times(percpu=True)
    return sum(sum(times[int(cpu)]) - times[int(cpu)].idle - times[int(cpu)].iowait for cpu in cpus.split(","))
