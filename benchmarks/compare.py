"""Banyan beside llama.cpp's server, OpenVINO GenAI, vLLM for CPU and transformers, on the same CPUs, with the same weights.

    python benchmarks/compare.py [--models 0.5b smollm2 7m] [--cases bs1 conc16 prefix] [--peers banyan llama.cpp openvino vllm]
                                 [--weights bf16] [--rounds 3] [--cpus 0,1] [--first] [--out STEM]

Peers that are not there are fetched, or built, into ~/.cache/banyan/bench; one that cannot be had is named with the reason. All are
loaded, and all but the one that is measured are stopped. Each case goes round the peers before the next one begins, A B A B, with
prompts that are new in each round, and a probe of the machine before each. `banyan-torch` and the like are Banyan with `--runner torch`.
Writes STEM.json, STEM.md (the table) and STEM.svg.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Final

import shapes
from comparison.chart import chart
from comparison.limits import Machine, Shape, least_s
from comparison.probe import Probe, busy_seconds, cpu_model
from comparison.result import Compared, Result, Round, shown, table, value
from load.cases import UnknownCase, plans
from load.plan import Ask, Plan, Session
from load.summary import Summary
from peers.banyan import Banyan
from peers.llama_cpp import IkLlama, LlamaCpp, gguf
from peers.openvino import OpenVino
from peers.peer import Peer, Running, Setup, Unavailable
from peers.process import InProcess, go_first
from peers.transformers import Transformers
from peers.vllm import Vllm

PEERS: Final[dict[str, Callable[[], Peer]]] = {
    "llama.cpp": LlamaCpp, "ik_llama.cpp": IkLlama, "openvino": OpenVino, "vllm": Vllm, "transformers": Transformers,
}  # fmt: skip
SETTLE_S: Final = 0.3  # after a peer was continued, before it is asked
IDLE_AFTER_S: Final = 2.0  # what a start left to do is over
IDLE_S: Final = 5.0
WARM_UP_PROMPT: Final = 128  # tokens, in the round that does not count: every number of requests together is met once
WARM_UP_TOKENS: Final = 4  # of output
TEMPLATE_TOKENS: Final = 64
DISTURBED: Final = 0.25  # of the CPUs: where others had more, a case is played again. A server that lets them idle invites others
CLIENT_PRIORITY: Final = 10
TRIES: Final = 2  # of which the least disturbed counts
AGAIN_SEED: Final = 10_000_019  # prompts that no cache has seen


def peer(name: str, flags: tuple[str, ...]) -> Peer:
    if name == "banyan" or name.startswith("banyan-"):
        return Banyan(name.partition("-")[2], flags)
    if name not in PEERS:
        sys.exit(f"there is no peer {name!r}; there are banyan, banyan-RUNNER, {', '.join(PEERS)}")
    return PEERS[name]()


def longest(plan: Plan) -> int:
    """Tokens of the longest sequence, some more for conversations, whose text is not tokens."""
    if plan.conversation:
        return 2 * max(sum(len(ask.prompt) + ask.max_tokens for ask in session.asks) for session in plan.sessions)
    return max(len(ask.prompt) + ask.max_tokens for ask in plan.asks)


def warm_up(plan: Plan) -> Plan:
    """As many requests together, shorter ones."""

    def short(ask: Ask) -> Ask:
        return Ask(ask.prompt[-WARM_UP_PROMPT:], min(ask.max_tokens, WARM_UP_TOKENS))

    sessions = tuple(Session(tuple(map(short, session.asks)), session.due_s) for session in plan.sessions)
    return dataclasses.replace(plan, sessions=sessions)


def limit_s(case: list[Plan], place: int, shape: Shape, machine: Machine) -> float | None:
    plan = case[place]
    if plan.name == "bs1":
        ask = plan.asks[0]
        return shape.decode_s(machine, 1, len(ask.prompt) + ask.max_tokens / 2)
    return least_s(plan, shape, machine, case[:place])


def idle(running: Running) -> float:
    """CPU seconds a second of a peer that nobody asks anything."""
    time.sleep(IDLE_AFTER_S)
    used = running.cpu_seconds()
    time.sleep(IDLE_S)
    return (running.cpu_seconds() - used) / IDLE_S


def turn(running: Running, plan: Plan, cpus: str, least: float | None) -> Round:
    """Let one peer play one plan."""
    running.resume()
    try:
        time.sleep(SETTLE_S)
        busy, used = busy_seconds(cpus), running.cpu_seconds()
        summary = Summary.of(running.play(plan))
        spent = running.cpu_seconds() - used
        others = busy_seconds(cpus) - busy - spent
    finally:
        running.pause()
    share = others / (summary.wall_s * (cpus.count(",") + 1))
    return Round(summary, spent, max(0.0, share), os.getloadavg()[0], least)


def compare(model: str, peers: list[Peer], options: argparse.Namespace, probe: Probe, found: Compared) -> None:
    """Measure all peers with one model into `found`, which holds what there is when this is interrupted."""
    folder = shapes.folder(model)
    shape = Shape.of(json.loads((folder / "config.json").read_text()))
    if options.weights != "bf16":  # models of `shapes` have one matrix for embedding and head
        parameters = shape.block_parameters + shape.head_parameters
        shape = dataclasses.replace(shape, weight_bytes=gguf(folder, options.weights).stat().st_size / parameters)
    cases = {case: plans(case, 0) for case in options.cases}
    asked = [plan for case in cases.values() for plan in case]
    setup = Setup(options.cpus, max(map(longest, asked)) + TEMPLATE_TOKENS, max(plan.concurrent for plan in asked), options.first)
    with contextlib.ExitStack() as stack:
        running: dict[str, Running] = {}
        for one in peers:
            print(f"{model}: starting {one.name}", file=sys.stderr, flush=True)
            try:
                running[one.name] = stack.enter_context(one.start(one.convert(folder, options.weights), setup))
            except Unavailable as reason:
                found.missing[one.name] = str(reason)
                continue
            found.about[one.name] = f"{running[one.name].about}; idle, it uses {idle(running[one.name]):.1%} of a CPU"
            running[one.name].pause()
        for number in range(options.rounds + 1):
            for case in options.cases:
                machine = probe.measure(shape.streamed_bytes)
                found.probes.append(machine)
                play_case(case, number, running, shape, machine, options, found)


def play_case(
    case: str, number: int, running: dict[str, Running], shape: Shape, machine: Machine, options: argparse.Namespace, found: Compared
) -> None:
    """One round of a case: round 0 warms up and is not kept. Who goes first changes from round to round."""
    order = list(running)
    order = order[number % len(order) :] + order[: number % len(order)] if order else order
    for name in order:
        tries: list[dict[str, Round]] = []
        for again in range(TRIES if number else 1):
            try:
                tries.append(
                    play(plans(case, options.seed + number + AGAIN_SEED * again), running[name], number, shape, machine, options.cpus)
                )
            except Unavailable as reason:
                found.missing[name] = f"in {case}: {reason}"
                del running[name]
                break
            if disturbance(tries[-1]) <= DISTURBED:
                break
        if not number or not tries:
            continue
        for plan, one in min(tries, key=disturbance).items():
            found.rounds.setdefault(plan, {}).setdefault(name, []).append(one)
            print(
                f"round {number}, {plan:12} {name:14} {shown(value(plan, one.summary)):>7}  "
                f"(load {one.load_average:.1f}, others {one.others:.0%}, {machine.bytes_s / 1e9:.0f} GB/s, "
                f"{machine.flop_s / 1e9:.0f} GFLOP/s){' ' + str(one.summary.errors) if one.summary.errors else ''}",
                file=sys.stderr,
                flush=True,
            )


def play(case: list[Plan], running: Running, number: int, shape: Shape, machine: Machine, cpus: str) -> dict[str, Round]:
    """All plans of a case by one peer."""
    found = {}
    for place, plan in enumerate(case):
        if not (plan.conversation and isinstance(running, InProcess)):  # a library is given token ids
            found[plan.name] = turn(running, plan if number else warm_up(plan), cpus, limit_s(case, place, shape, machine))
    return found


def disturbance(rounds: dict[str, Round]) -> float:
    return max((one.others for one in rounds.values()), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.5b", "smollm2", "7m"], choices=list(shapes.TITLES))
    parser.add_argument("--cases", nargs="+", default=["bs1", "conc16", "prefix", "prefill8k"], help="see benchmarks/measure.py --list")
    parser.add_argument("--peers", nargs="+", default=["banyan", "llama.cpp", "openvino", "vllm"])
    parser.add_argument("--weights", default="bf16", help="bf16, or a type of GGUF's such as Q4_K_M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpus", default="0,1", help="what the servers are pinned to; this client takes the others")
    parser.add_argument("--first", action="store_true", help="servers and client before all other processes (root), where others are busy")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6, help="of the prompts")
    parser.add_argument("--banyan-flags", default="", help="more flags for banyan's serve")
    stem = Path(__file__).parent / "results" / f"{datetime.now():%Y-%m-%d-%H%M}-peers"
    parser.add_argument("--out", type=Path, default=stem, metavar="STEM")
    options = parser.parse_args()
    try:
        for case in options.cases:
            plans(case, 0)
    except UnknownCase as error:
        sys.exit(str(error))
    if left := os.sched_getaffinity(0) - {int(cpu) for cpu in options.cpus.split(",")}:
        os.sched_setaffinity(0, left)
    if options.first:
        os.setpriority(os.PRIO_PROCESS, 0, -20)  # what is started inherits it
        go_first(os.getpid())
        # The client is seldom there and briefly: nothing that computes, of whatever priority, shall delay its clock.
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(CLIENT_PRIORITY))
    result = Result(f"{datetime.now():%Y-%m-%d %H:%M}", cpu_model(), options.cpus, shlex.join(["compare.py", *sys.argv[1:]]), {}, {}, {})
    peers = []
    for one in [peer(name, tuple(shlex.split(options.banyan_flags))) for name in options.peers]:
        try:
            result.versions[one.name] = one.get()
            peers.append(one)
        except Unavailable as reason:
            result.missing[one.name] = str(reason)
    nobody = Setup(options.cpus, 0, 0, options.first)
    probe = Probe(nobody)
    try:
        for model in options.models:
            result.models[model] = Compared(shapes.TITLES[model])
            compare(model, peers, options, probe, result.models[model])
    finally:
        probe.end()
        if result.models:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            text = table(result, options.peers[0])
            Path(f"{options.out}.json").write_bytes(result.to_json() + b"\n")
            Path(f"{options.out}.md").write_text(text)
            Path(f"{options.out}.svg").write_text(chart(result))
            print(text)


if __name__ == "__main__":
    main()
