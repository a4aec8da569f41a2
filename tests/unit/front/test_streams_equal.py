"""A streamed answer, put together as a client does it, is the whole answer: text, reasoning, calls, log probabilities, usage.

Over real HTTP, with real templates and tokenizers; the test plays the engine and sends tokens as it likes.
"""

from __future__ import annotations

import dataclasses
import json
import random
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from banyan_runtime import wire
from banyan_runtime.front.plan import ChatPlan, Endpoint, Plan
from banyan_runtime.front.prepare.planner import Planner
from banyan_runtime.front.text.tokenizer import Tokenizer
from tests.unit.front import real
from tests.unit.front.support import Connection, FakeEngine, Front, columns, finish, run
from tests.unit.front.test_chat_templates import TOOLS
from tests.unit.front.test_real_tokenizers import strings

ANSWERS: Final = 40  # of each family, each of them whole and in three ways streamed
WORDS: Final = tuple(unicodedata.normalize("NFC", text) for text in strings(300))  # as tokenizers have it
PLACES: Final = (
    {},
    {"city": "Zürich"},
    {"city": "東京 🗼👨‍👩‍👧", "days": -3.5e2, "deep": [{"a": None}, '}"', "</tool_call>"]},
    {"city": "a\nb\t\u2028"},
)
MARKS: Final = (
    *("<think>", "</think>", "<thi", "</", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<｜tool▁call▁begin｜>", "<|python_tag|>"),
    *("[", "{", '{"name"', "\n"),
)
Calls = Sequence[tuple[str, str]]


def hermes(calls: Calls) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in calls)


def llama3(calls: Calls) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in calls)


def mistral(calls: Calls) -> str:
    return "[TOOL_CALLS][" + ", ".join(f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls) + "]"


def deepseek(calls: Calls) -> str:
    one = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
    return "<｜tool▁calls▁begin｜>" + "\n".join(one.format(*call) for call in calls) + "<｜tool▁calls▁end｜>"


@dataclass(frozen=True)
class Family:
    name: str
    write: Callable[[Calls], str]
    reasoning: str = ""  # its parser
    opened: bool = False  # reasoning begins without a marker
    before: bool = True  # calls may stand behind words


FAMILIES: Final = (
    Family("qwen3", hermes, "qwen3"),
    Family("llama3.2", llama3, before=False),
    Family("mistral-nemo", mistral),
    Family("deepseek-v3", deepseek, "deepseek-r1", opened=True),
)


@dataclass(frozen=True)
class Answer:
    """What the model writes, and what the request asked for."""

    ids: list[int]
    code: wire.FinishCode
    fields: dict[str, Any]
    content: str | None = None  # of an answer that is well formed; None: nobody can tell
    reasoning: str = ""
    calls: Calls = ()


def words(dice: random.Random) -> str:
    return " ".join(dice.choices(WORDS, k=dice.randrange(1, 4))).replace("{", "(").replace("<", "(").replace("[", "(")


def some_calls(dice: random.Random) -> list[tuple[str, str]]:
    return [
        (dice.choice(("get_weather", "now", "get_weather")), json.dumps(dice.choice(PLACES), ensure_ascii=dice.random() < 0.3))
        for _ in range(dice.choice((0, 1, 1, 2, 3)))
    ]


def spelt(tokenizer: Tokenizer, text: str, dice: random.Random) -> list[int]:
    """Ids of a text, sometimes in other tokens than the tokenizer would choose."""
    if dice.random() < 0.5:
        return tokenizer.encode(text, add_special_tokens=False)
    ids: list[int] = []
    at = 0
    while at < len(text):
        size = dice.randrange(1, 30)
        ids += tokenizer.encode(text[at : at + size], add_special_tokens=False)
        at += size
    return ids


def well_formed(family: Family, tokenizer: Tokenizer, dice: random.Random) -> Answer:
    reasoning = words(dice) if family.reasoning and dice.random() < 0.7 else ""
    calls = some_calls(dice)
    content = words(dice) if not calls or (family.before and dice.random() < 0.5) else ""
    said, fields = content, dict[str, Any]()
    if content and not calls and dice.random() < 0.7:
        starts = [dice.randrange(len(content)) for _ in range(dice.randrange(1, 4))]
        fields["stop"] = [content[start : start + dice.randrange(1, 12)] for start in starts]
        end, _, stop = min((content.find(stop) + len(stop), order, stop) for order, stop in enumerate(fields["stop"]))
        content = content[: end - len(stop)]
        reasoning += stop.strip() if reasoning else ""  # where it ends nothing
    thought = ("" if family.opened else "<think>\n") + f"{reasoning}\n</think>\n\n" if reasoning or family.opened else ""
    text = thought + said + (("\n" if said else "") + family.write(calls) if calls else "")
    ids = tokenizer.encode(text, add_special_tokens=False)
    return Answer([*ids, tokenizer.eos_id or 0], wire.FinishCode.STOP, fields, content, reasoning, calls)


def any_answer(family: Family, tokenizer: Tokenizer, dice: random.Random) -> Answer:
    """Pieces of everything in any order, broken off, with ids that are no text, stop strings and other wishes."""
    ids: list[int] = []
    text = ""
    for _ in range(dice.randrange(1, 7)):
        calls, broken = some_calls(dice) or [("now", "{}")], [("now", '{"a":')]
        piece = dice.choice((words(dice), family.write(calls), family.write(broken), dice.choice(MARKS)))
        if dice.random() < 0.2:
            piece = piece[: dice.randrange(len(piece) + 1)]
        if family.reasoning and not ids and dice.random() < 0.6:
            piece = f"<think>{piece}</think>"
        text += piece
        ids += spelt(tokenizer, piece, dice)
        if dice.random() < 0.3:
            ids += [dice.randrange(tokenizer.size) for _ in range(dice.randrange(1, 4))]
    fields: dict[str, Any] = {}
    if text and dice.random() < 0.5:
        starts = [dice.randrange(len(text)) for _ in range(dice.randrange(1, 4))]
        fields["stop"] = [text[start : start + dice.randrange(1, 12)] for start in starts]
    wishes: dict[str, Any] = {
        "min_tokens": dice.randrange(8), "include_stop_str_in_output": True, "skip_special_tokens": False, "separate_reasoning": False,
        "stream_reasoning": False, "parallel_tool_calls": False, "tool_choice": "none", "include_reasoning": False,
    }  # fmt: skip
    fields |= {name: value for name, value in wishes.items() if dice.random() < 0.15}
    ends = (wire.FinishCode.STOP, wire.FinishCode.LENGTH, wire.FinishCode.ABORT)
    code = dice.choice(ends)
    return Answer([*ids, tokenizer.eos_id or 0] if code is wire.FinishCode.STOP else ids, code, fields)


class Preparer:
    """Plans as the workers do, but here; `interval`: tokens per event."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self.interval = 1

    async def plan(self, endpoint: Endpoint, body: bytes | bytearray, request_id: str) -> Plan:
        plan = self._planner.plan(endpoint, body, request_id)
        assert isinstance(plan, ChatPlan)
        requests = [
            msgspec.structs.replace(request, stream_interval=self.interval if plan.envelope.stream else 0) for request in plan.requests
        ]
        return msgspec.structs.replace(plan, requests=tuple(requests))


async def play(engine: FakeEngine, answers: Sequence[Answer], cuts: Sequence[int]) -> None:
    """Answer the next request, a choice each, in steps of so many tokens."""
    submits: list[wire.Submit] = []
    while len(submits) < len(answers):
        message = await engine.next()
        if isinstance(message, wire.Submit):  # an end that was asked for before is over
            submits.append(message)
    at, left = 0, {submit.id: answer for submit, answer in zip(submits, answers, strict=True)}
    for step in range(1 + max(len(answer.ids) for answer in answers)):
        size = cuts[step % len(cuts)]
        rows = {number: answer.ids[at : at + size] for number, answer in left.items()}
        over = [number for number, answer in left.items() if at + size >= len(answer.ids)]
        tokens = [token_id for row in rows.values() for token_id in row]
        likely = [[(token_id, -1.0 - token_id % 7), ((token_id * 7) % 1000, -0.5)] for token_id in tokens]
        scored = {
            "scored": wire.pack_ids(list(range(len(tokens)))),
            "logprobs": columns([-1.0 - token_id % 7 for token_id in tokens], likely),
        }
        with_tokens = {number: row for number, row in rows.items() if row}
        ends = [finish(number, left[number].code) for number in over]
        await engine.step(with_tokens, *ends, **(scored if submits[0].logprobs is not None and tokens else {}))
        for number in over:
            del left[number]
        at += size
        if not left:
            return


def assembled(events: Sequence[Any], choices: int) -> list[dict[str, Any]]:
    """What a client makes of a stream: of each choice the message, how it ended and its log probabilities."""
    found: list[dict[str, Any]] = [{"content": "", "reasoning": "", "calls": [], "logprobs": [], "ends": []} for _ in range(choices)]
    for event in events:
        assert "error" not in event, event
        for choice in event["choices"]:
            one, delta = found[choice["index"]], choice["delta"]
            assert not one["ends"], "something behind the end"
            one["content"] += delta.get("content") or ""
            one["reasoning"] += delta.get("reasoning_content") or ""
            assert delta.get("reasoning", delta.get("reasoning_content")) == delta.get("reasoning_content")
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(one["calls"]):
                    assert call["id"]
                    one["calls"].append([call["function"]["name"], ""])
                one["calls"][call["index"]][1] += call["function"]["arguments"]
            one["logprobs"] += (choice["logprobs"] or {}).get("content") or ()
            if choice["finish_reason"] is not None:
                one["ends"].append((choice["finish_reason"], choice.get("matched_stop"), choice.get("stop_reason")))
    return found


def told(body: Any) -> list[dict[str, Any]]:
    """The same of a whole answer."""
    return [
        {
            "content": choice["message"]["content"] or "",
            "reasoning": choice["message"]["reasoning_content"] or "",
            "calls": [[call["function"]["name"], call["function"]["arguments"]] for call in choice["message"]["tool_calls"] or ()],
            "logprobs": (choice["logprobs"] or {}).get("content") or [],
            "ends": [(choice["finish_reason"], choice.get("matched_stop"), choice.get("stop_reason"))],
        }
        for choice in body["choices"]
    ]


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_streamed_answer_put_together_is_the_whole_answer(family: Family, tmp_path: Path) -> None:
    flags = {"reasoning_parser": family.reasoning} if family.reasoning else {}
    text, preparer = real.text(family.name, **flags), Preparer(real.planner(family.name, **flags))
    tokenizer = text.needed_tokenizer

    async def ask(engine: FakeEngine, address: tuple[str, int], body: dict[str, Any], answers: list[Answer], cuts: list[int]) -> Any:
        connection = await Connection.post(address, "/v1/chat/completions", json.dumps(body).encode())
        try:
            await play(engine, answers, cuts)
            if not body["stream"]:
                return await connection.json()
            await connection.head()
            return await connection.events()
        finally:
            connection.close()

    async def compare(engine: FakeEngine, address: tuple[str, int], seed: int) -> None:
        dice = random.Random(f"{family.name} {seed}")
        make = well_formed if seed % 3 == 0 else any_answer
        first = make(family, tokenizer, dice)
        answers = [first]
        if dice.random() < 0.2:
            answers.append(dataclasses.replace(any_answer(family, tokenizer, dice), fields=first.fields))
        messages = [{"role": "user", "content": "Hi"}]
        body: dict[str, Any] = {
            "messages": messages,
            "tools": TOOLS,
            "max_tokens": 4000,
            "n": len(answers),
            **first.fields,
            "stream": False,
        }
        if dice.random() < 0.6:
            body |= {"logprobs": True, "top_logprobs": dice.choice((0, 2))}
        whole = await ask(engine, address, body, answers, [10_000])
        expected = told(whole)
        if first.content is not None:
            assert expected[0]["content"].strip() == first.content.strip()
            assert expected[0]["reasoning"].strip() == first.reasoning.strip()
            found = [(name, json.loads(arguments)) for name, arguments in expected[0]["calls"]]
            assert found == [(name, json.loads(arguments)) for name, arguments in first.calls]
            assert expected[0]["ends"][0][0] == ("tool_calls" if first.calls else "stop")
        for cuts in ([1], [dice.randrange(1, 6) for _ in range(7)], [10_000]):
            preparer.interval = dice.choice((1, 1, 2, 5))
            usage = {"include_usage": True}
            events = await ask(engine, address, {**body, "stream": True, "stream_options": usage}, answers, cuts)
            for found, wanted in zip(assembled(events, len(answers)), expected, strict=True):
                assert found == wanted
            assert events[-1]["usage"] == whole["usage"]

    for start in range(0, ANSWERS, 10):

        async def some(start: int = start) -> None:
            async with FakeEngine(tmp_path) as engine:
                front = Front(engine, tokenizer)
                front.context.text, front.context.preparer = text, preparer
                async with front.served() as address:
                    for seed in range(start, start + 10):
                        try:
                            await compare(engine, address, seed)
                        except BaseException as error:
                            error.add_note(f"answer {seed} of {family.name}")
                            raise

        run(some)
