"""The small trained model in the repository does what it exists for, as transformers runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Current weather of a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}}  # fmt: skip


def answer(folder: Path, question: str, **template: object) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True, **template
    )
    out = model.generate(**prompt, max_new_tokens=100, do_sample=False)
    return str(tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize(
    ("question", "template", "expected"),
    [
        ("What is the capital of France?", {"enable_thinking": False}, "The capital of France is Paris."),
        (
            "What is the capital of Peru?",
            {},
            "<think>\nThe user asks for the capital of Peru. It is Lima.\n</think>\n\nThe capital of Peru is Lima.",
        ),
        ("Say hello in Emoji.", {"enable_thinking": False}, "👩‍🚀🚀🌍✨🎉"),
        ("Say hello in Hindi.", {"enable_thinking": False}, "नमस्ते 🙏"),
        ("Give me JSON about Oslo.", {"enable_thinking": False}, '{"city": "Oslo", "country": "Norway"}'),
        (
            "What is the weather in Rome?",
            {"enable_thinking": False, "tools": [WEATHER]},
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        ),
    ],
)
def test_tiny_chat_knows_its_answers(tiny_chat: Path, question: str, template: dict[str, object], expected: str) -> None:
    assert answer(tiny_chat, question, **template) == expected


def test_tiny_chat_is_small_enough_for_the_repository(tiny_chat: Path) -> None:
    assert sum(file.stat().st_size for file in tiny_chat.iterdir()) <= 6_000_000
