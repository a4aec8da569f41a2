"""Servers on a GPU through HTTP: the cases of measure.py, for models with random weights.

    python benchmarks/gpu_served.py [--models 0.5b qwen3-0.6b 1b 8b] [--cases bs1 conc16 conc64 conc256 prefix prefill8k offline]
                                    [--rounds 3] [--flags="--disable-cuda-graph"] [--out FILE.json] [--log FILE] [--spy py-spy]

Each case is played once before what is kept, for what is compiled or allocated when it is first seen, but for `offline`, which takes
longest and comes behind all others; prompts are new in each round. Under the rounds of a case stands what the engine's loop did in all
of them, in milliseconds a step: where it hardly waits for the device, it is the host's time that is measured. `--spy`: py-spy's samples
of both processes, beside the log: CASE.engine and CASE.front, a line for each stack and how often it was met.
A step that waits for nobody is `gpu.py`'s; what is more here is the scheduler, the wire and HTTP.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shlex
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil
import uvloop
from load.cases import CASES, plans
from load.client import Server
from load.summary import Summary
from measure import measure, table
from prometheus_client.parser import text_string_to_metric_families
from served import served
from shapes import SHAPES, describe, write_tokenizer

SNAPSHOT_S: Final = 0.3  # until what the engine counted has reached the front
STAGES: Final = ("recv", "schedule", "launch", "wait_device", "output")
CASES_ASKED: Final = ["bs1", "conc16", "conc64", "conc256", "prefix", "prefill8k", "offline"]


def middle(rounds: list[Summary]) -> Summary:
    """The round whose throughput is the median."""
    chosen = statistics.median_low([one.output_tokens_per_s for one in rounds])
    return next(one for one in rounds if one.output_tokens_per_s == chosen)


def played(url: str, case: str, rounds: int) -> dict[str, Summary]:
    unkept = 0 if case == "offline" else 1
    kept = []
    for seed in range(rounds + unkept):
        server = Server(url, "m", api_key="", extra={"ignore_eos": True})  # its connections belong to a loop
        kept.append(uvloop.run(measure(plans(case, seed), server, "ids")))
    return {name: middle([one[name] for one in kept[unkept:]]) for name in kept[0]}


def counted(url: str) -> dict[str, float]:
    """What the server has counted of its loop: steps by phase, seconds by stage, processor seconds by process."""
    named = {"banyan_steps_total": "phase", "banyan_scheduler_seconds_total": "stage", "banyan_process_cpu_seconds_total": "component"}
    found: dict[str, float] = {}
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            for sample in family.samples:
                if sample.name in named:
                    name = sample.labels[named[sample.name]]
                    found[name] = found.get(name, 0.0) + sample.value
    return found


def loop_between(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def told(loop: dict[str, float]) -> str:
    steps = loop["decode"] + loop["prefill"]
    stages = ", ".join(f"{name} {1e3 * loop[name] / max(steps, 1):.3f}" for name in STAGES)
    processor = f"{loop['engine']:.2f} s engine, {loop['api']:.2f} s front"
    return f"{loop['prefill']:.0f} + {loop['decode']:.0f} steps, ms a step: {stages}; processor {processor}"


@contextlib.contextmanager
def sampled(spy: str | None, process: int, into: Path) -> Iterator[None]:
    """The stacks of a server's front and engine meanwhile, 500 times a second, into files beside `into`."""
    if spy is None:
        yield
        return
    (engine,) = (
        each for each in psutil.Process(process).children(recursive=True) if "banyan_runtime.server.engine_process" in each.cmdline()
    )
    named = {"front": process, "engine": engine.pid}
    how = ["--format", "raw", "--rate", "500", "--duration", "600"]
    spies = [
        subprocess.Popen([spy, "record", *how, "--output", f"{into}.{name}", "--pid", str(pid)], stdout=subprocess.DEVNULL)
        for name, pid in named.items()
    ]
    time.sleep(1.0)  # until it looks
    try:
        yield
    finally:
        for each in spies:
            each.send_signal(signal.SIGINT)  # it writes down what it has
        for each in spies:
            each.wait(30)


def idle(process: int, seconds: float = 4.0) -> str:
    """What a server without requests takes, of processors and of the GPU."""

    def spent() -> float:
        server = psutil.Process(process)
        return sum(sum(each.cpu_times()[:2]) for each in (server, *server.children(recursive=True)))

    before = spent()
    time.sleep(seconds)
    asked = ["nvidia-smi", "--query-gpu=utilization.gpu,clocks.sm", "--format=csv,noheader"]
    gpu = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() if shutil.which(asked[0]) else ""
    return f"idle for {seconds:.0f} s: {100 * (spent() - before) / seconds:.2f} % of a processor, GPU {gpu or 'unknown'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--cases", nargs="+", default=CASES_ASKED, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--flags", type=shlex.split, default=[], help="more options of the server")
    parser.add_argument("--out", type=Path, help="file for the numbers, JSON")
    parser.add_argument("--log", type=Path, help="file for the server's log; that of the last model stays")
    parser.add_argument("--spy", help="the py-spy to sample with")
    options = parser.parse_args()
    if options.spy and not options.log:
        parser.error("--spy writes beside --log, which is missing")
    kept: dict[str, Any] = {}
    for name in options.models:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            describe(name, folder)
            write_tokenizer(SHAPES[name][1]["vocab_size"], folder)
            with served(folder, "--load-format", "dummy", "--device", options.device, *options.flags, kept=options.log) as (process, url):
                kept[name] = {}
                for case in options.cases:
                    before = counted(url)
                    with sampled(options.spy, process.pid, (options.log or folder / "log").with_name(case)):
                        found = played(url, case, options.rounds)
                    time.sleep(SNAPSHOT_S)
                    loop = loop_between(before, counted(url))
                    print(f"{name} {' '.join(options.flags)}\n{table(found)}\n{told(loop)}", flush=True)
                    kept[name] |= {plan: dataclasses.asdict(one) for plan, one in found.items()} | {f"{case} loop": loop}
                    if options.out:  # at once: what comes next may fail, and the machine be gone
                        options.out.write_text(json.dumps({"flags": options.flags, "models": kept}, indent=1) + "\n")

                print(idle(process.pid), flush=True)


if __name__ == "__main__":
    main()
