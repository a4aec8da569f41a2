"""Drives an engine by a script of arrivals and collects its log lines in a short form, to compare them with logged schedules.

P new/tokens/cached/usage/running/queue · D running/#token · R retracted old → new
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from banyan_runtime.engine.limits import EngineLimits
from banyan_runtime.engine.loop import Engine
from banyan_runtime.engine.rules import SchedulingRules
from banyan_runtime.step import I32, RunnerInfo, Step, StepResult, TableShape, TokenLogprobs
from banyan_runtime.wire import Failed, LogprobRequest, Sampling, StepOutput, Submit, pack_ids
from tests.unit.engine.fake import FakeRunner

PREFILL = re.compile(
    r"Prefill batch\. #new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+), token usage: (\d\.\d\d), "
    r"#running-req: (\d+), #queue-req: (\d+)"
)
DECODE = re.compile(
    r"Decode batch\. #running-req: (\d+), #token: (\d+), token usage: (\d\.\d\d), cuda graph: False, "
    r"gen throughput \(token/s\): (\d+\.\d\d), #queue-req: (\d+)"
)
RETRACT = re.compile(r"KV cache pool is full\. Retract requests\. #retracted_reqs: (\d+), #new_token_ratio: (\d\.\d{4}) -> (\d\.\d{4})")


class _Done:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class SilentRunner:
    """Samples token 0 for ever, and once, in decode step number `stop_in`, the stop token 1 for `stop_rows` rows."""

    def __init__(self, info: RunnerInfo) -> None:
        self.info = info
        self.counts = {"prefill": 0, "decode": 0}
        self.prefilled = 0
        self.stop_in: int | None = None
        self.stop_rows = 0

    def prepare(self, shape: TableShape) -> None:
        pass

    def launch(self, step: Step) -> _Done:
        self.counts[step.mode] += 1
        if step.mode == "prefill":
            self.prefilled += len(step.token_ids)
        logprobs = None
        if step.top_logprobs is not None:
            count, width = int(step.samples[step.top_logprobs >= 0].sum()), int(step.top_logprobs.max())
            logprobs = TokenLogprobs(
                np.zeros(count, dtype=np.float32),
                np.zeros((count, width), dtype=np.int32),
                np.zeros((count, width), dtype=np.float32),
            )
        ids: I32 = np.zeros(int(step.samples.sum()), dtype=np.int32)
        if step.mode == "decode" and self.counts["decode"] == self.stop_in:
            ids[-self.stop_rows :] = 1
        return _Done(StepResult(token_ids=ids, failed=np.zeros(len(step.rows), dtype=np.bool_), logprobs=logprobs))


class Replay:
    """An engine with the silent runner. `lines` grows with the log."""

    def __init__(self, limits: EngineLimits, rules: SchedulingRules | None = None) -> None:
        self.lines: list[str] = []
        self.now = 0.0
        self.runner = SilentRunner(FakeRunner(limits.pool_tokens, limits.page_size, limits.context_len).info)
        self.engine = Engine(self.runner, limits, lambda: self.now, self._log, rules=rules)
        self.cached = 0
        self.turns = 0
        self.done: dict[int, tuple[int, int]] = {}  # by id: the turn in which it ended, its retractions
        self._next_id = 0

    def _log(self, line: str) -> None:
        if match := PREFILL.fullmatch(line):
            self.lines.append("P " + "/".join(match.groups()))
            self.cached += int(match[3])
        elif match := DECODE.fullmatch(line):
            self.lines.append(f"D {match[1]}/{match[2]}")
        elif match := RETRACT.fullmatch(line):
            self.lines.append(f"R {match[1]} {match[2]} → {match[3]}")
        else:
            raise AssertionError(f"a line of no known form: {line}")

    def submit(self, prompt: Sequence[int], max_new: int = 128, *, penalty: float = 1.0, logprobs: LogprobRequest | None = None) -> int:
        self._next_id += 1
        sampling = Sampling(max_new_tokens=max_new, stop_token_ids=(1,), repetition_penalty=penalty)
        self.engine.handle(Submit(id=self._next_id, token_ids=pack_ids(list(prompt)), sampling=sampling, logprobs=logprobs))
        return self._next_id

    def turn(self) -> None:
        self.turns += 1
        self.now += 0.01
        for message in self.engine.turn():
            assert not isinstance(message, Failed), message
            if isinstance(message, StepOutput):
                for finish in message.finished:
                    self.done[finish.id] = (self.turns, finish.retractions)

    def drain(self) -> None:
        while self.engine.has_work:
            self.turn()

    def take(self) -> list[str]:
        """The lines since the last call."""
        lines, self.lines = self.lines, []
        return lines
