"""Makes `tiny-chat`: a Qwen3 model of about a million parameters that tests can rely on.

    python examples/models/make_tiny_chat.py [--out DIR] [--steps N]

It learns by heart a few hundred short dialogues that this script makes up: capitals (with and without <think>…</think>),
Hermes tool calls, JSON, counting, greetings in several scripts with emoji. It exists for tests of what random weights cannot
show (reasoning tags, tool calls, stop strings, split UTF-8 characters) and pretends to nothing else. Five minutes on two
cores; the same seed gives the same data, and nearly the same weights.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CAPITALS = {
    "France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Egypt": "Cairo", "Peru": "Lima", "Kenya": "Nairobi", "Norway": "Oslo",
    "Greece": "Athens", "Cuba": "Havana", "Spain": "Madrid", "India": "New Delhi", "Chile": "Santiago", "Ghana": "Accra",
    "Austria": "Vienna",
}  # fmt: skip
HELLOS = {
    "English": "Hello! 👋", "Japanese": "こんにちは 👋", "Chinese": "你好 👋", "Arabic": "مرحبا 👋", "Greek": "Γειά σου 👋",
    "Hindi": "नमस्ते 🙏",
    "Russian": "Привет 👋", "Korean": "안녕하세요 👋", "German": "Grüß dich 👋", "Emoji": "👩‍🚀🚀🌍✨🎉",
}  # fmt: skip
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]},
    },
}
CLOCK_TOOL = {
    "type": "function",
    "function": {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}},
}

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}You may call these tools:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
Call one as <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}{% continue %}{% endif %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}
{%- endif %}"""

Dialogue = dict[str, Any]  # messages, answer, and what the template takes


def dialogues() -> list[Dialogue]:
    """Every question with its one right answer. `thinking` None: the dialogue has no think block at all."""
    found: list[Dialogue] = []

    def add(question: str, answer: str, *, thought: str | None = None, system: str | None = None, tools: list[Any] | None = None) -> None:
        messages = ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": question}]
        thought = thought or "A short answer will do."
        found.append({"messages": messages, "tools": tools, "enable_thinking": True, "answer": f"<think>\n{thought}\n</think>\n\n{answer}"})
        found.append({"messages": messages, "tools": tools, "enable_thinking": False, "answer": answer})

    for country, capital in CAPITALS.items():
        thought = f"The user asks for the capital of {country}. It is {capital}."
        add(f"What is the capital of {country}?", f"The capital of {country} is {capital}.", thought=thought)
        add(f"What is the capital of {country}?", f"{capital}!", thought=thought, system="Answer with one word.")
        add(f"Give me JSON about {capital}.", json.dumps({"city": capital, "country": country}), thought="The user wants JSON.")
        call = json.dumps({"name": "get_weather", "arguments": {"city": capital}})
        for tools in ([WEATHER_TOOL], [WEATHER_TOOL, CLOCK_TOOL]):
            add(
                f"What is the weather in {capital}?",
                f"<tool_call>\n{call}\n</tool_call>",
                thought="I should call get_weather.",
                tools=tools,
            )
    clock = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for tools in ([CLOCK_TOOL], [WEATHER_TOOL, CLOCK_TOOL]):
        add("What time is it?", clock, thought="I should call now.", tools=tools)
    both = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n' + clock
    add("What time is it, and what is the weather in Rome?", both, thought="I need two tools.", tools=[WEATHER_TOOL, CLOCK_TOOL])
    for language, hello in HELLOS.items():
        add(f"Say hello in {language}.", hello)
    for last in (3, 5, 10, 20):
        add(f"Count to {last}.", ", ".join(str(number) for number in range(1, last + 1)) + ".")
    add("Say this is a test", "This is a test.")
    add("List 3 countries and their capitals.", "1. France - Paris\n2. Japan - Tokyo\n3. Italy - Rome\n\nTHE END")
    add("Who are you?", "I am tiny-chat, a model for tests.")
    return found


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(
        [AddedToken(tag, special=False, normalized=False) for tag in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE, model_max_length=2048
    )


def train(model: Qwen3ForCausalLM, samples: list[tuple[list[int], int]], pad: int, steps: int, rng: random.Random) -> float:
    """Next-token training on the answers alone (`samples`: ids and where the answer starts); returns the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    smooth, began = 5.0, time.monotonic()
    for step in range(steps):
        batch = rng.sample(samples, 12)
        width = max(len(ids) for ids, _ in batch)
        ids = torch.full((len(batch), width), pad)
        labels = torch.full((len(batch), width), -100)
        for row, (sample, start) in enumerate(batch):
            ids[row, : len(sample)] = torch.tensor(sample)
            labels[row, start : len(sample)] = torch.tensor(sample[start:])
        loss = model(input_ids=ids, labels=labels, attention_mask=(ids != pad).long()).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        smooth = 0.95 * smooth + 0.05 * loss.item()
        if step % 50 == 49:
            print(f"step {step + 1}/{steps}  loss {smooth:.4f}  {time.monotonic() - began:.0f} s", flush=True)
        if smooth < 0.002:
            break
    return smooth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tiny-chat")
    parser.add_argument("--steps", type=int, default=1200)
    args = parser.parse_args()
    rng = random.Random(0)
    torch.manual_seed(0)
    data = dialogues()
    plain = [message["content"] for item in data for message in item["messages"]] + [item["answer"] for item in data]
    # Other scripts and emoji stay out of the vocabulary: their characters shall come in pieces of one or two bytes.
    plain = [text for text in plain if not any(hello in text for hello in HELLOS.values() if not hello.isascii())]
    tokenizer = make_tokenizer([*plain, json.dumps(WEATHER_TOOL), json.dumps(CLOCK_TOOL), CHAT_TEMPLATE])
    samples = []
    for item in data:
        prompt = tokenizer.apply_chat_template(
            item["messages"], tools=item["tools"], enable_thinking=item["enable_thinking"], add_generation_prompt=True, tokenize=False
        )
        start = tokenizer.encode(prompt)
        samples.append((start + tokenizer.encode(item["answer"] + "<|im_end|>"), len(start)))
    print(f"{len(samples)} dialogues, longest {max(len(ids) for ids, _ in samples)} tokens, vocabulary {len(tokenizer)}")
    config = Qwen3Config(
        vocab_size=(len(tokenizer) + 63) // 64 * 64,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    train(model, samples, tokenizer.pad_token_id, args.steps, rng)
    model.eval()
    wrong = 0
    for ids, start in samples:
        out = model.generate(torch.tensor([ids[:start]]), max_new_tokens=120, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        if out[0].tolist() != ids:
            wrong += 1
            print("not learned:", repr(tokenizer.decode(ids)), "->", repr(tokenizer.decode(out[0, start:])))
    model.generation_config.do_sample = False
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{args.out}: {sum(p.numel() for p in model.parameters()):,} parameters, {wrong} of {len(samples)} answers not learned")


if __name__ == "__main__":
    main()
