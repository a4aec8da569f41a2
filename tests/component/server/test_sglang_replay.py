"""The calls of five SGLang tutorials, in their order, through the real `openai` package, compared with what SGLang logged.

With the Qwen2.5 tokenizer, dummy weights and the tutorials' flags, the scheduler must print SGLang's own numbers: how many prompt
tokens each call computes and how many the prefix cache already holds. (Weights decide when a text ends, so the lengths of
the answers are not SGLang's; everything that depends on prompts alone is.)
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

MODEL = "qwen/qwen2.5-0.5b-instruct"
TUTORIAL_FLAGS = [
    "--mem-fraction-static", "0.8", "--max-running-requests", "200", "--max-total-tokens", "20480", "--disable-cuda-graph",
    "--chunked-prefill-size", "8192", "--max-prefill-tokens", "16384", "--page-size", "1",
    "--random-seed", "42", "--drain-linger-seconds", "0",
]  # fmt: skip


pytestmark = pytest.mark.long  # two servers with the tokenizers of Qwen


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    log: Path
    url: str = ""

    def wait(self) -> None:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            text = self.log.read_text()
            if "The server is fired up and ready to roll!" in text:
                found = re.search(r"Uvicorn running on (http://[\d.:]+)", text)
                assert found, text
                self.url = found.group(1)
                return
            assert self.process.poll() is None, text
            time.sleep(0.1)
        raise AssertionError(f"not ready in 120 s:\n{self.log.read_text()}")

    def prefills(self) -> list[tuple[int, int]]:
        """(new, cached) tokens of each prefill line so far."""
        pairs = re.findall(r"Prefill batch\. #new-seq: \d+, #new-token: (\d+), #cached-token: (\d+)", self.log.read_text())
        return [(int(new), int(cached)) for new, cached in pairs]


def start(folder: Path, log: Path, *flags: str) -> Server:
    command = [
        sys.executable,
        "-m",
        "banyan_runtime",
        "serve",
        "--model-path",
        str(folder),
        "--load-format",
        "dummy",
        "--port",
        "0",
        *flags,
    ]
    server = Server(subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT), log)
    server.wait()
    return server


def qwen2_folder(folder: Path, tokenizer: Path, **config: object) -> Path:
    """The tokenizer of a real model beside the config of a tiny one of the same family and vocabulary."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    base = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": 151645,
        "bos_token_id": 151643, "use_sliding_window": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(base | config))
    return folder


@pytest.fixture(scope="module")
def tutorial_server(tmp_path_factory: pytest.TempPathFactory, qwen25_tokenizer: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tutorials")
    model = qwen2_folder(folder / "qwen2.5", qwen25_tokenizer)
    server = start(model, folder / "server.log", "--served-model-name", MODEL, *TUTORIAL_FLAGS)
    yield server
    server.process.terminate()
    assert server.process.wait(30) == 0


def test_the_tutorials_calls_print_sglangs_numbers(tutorial_server: Server) -> None:
    client = openai.Client(base_url=f"{tutorial_server.url}/v1", api_key="None")

    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "List 3 countries and their capitals."}], temperature=0, max_tokens=64
    )
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == 37
    assert chat.choices[0].message.role == "assistant"
    assert isinstance(chat.choices[0].message.content, str)
    assert chat.choices[0].matched_stop is None or isinstance(chat.choices[0].matched_stop, int)  # type: ignore[attr-defined]
    assert chat.choices[0].message.reasoning_content is None  # type: ignore[attr-defined]

    history = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "You are a knowledgeable historian who provides concise responses."},
            {"role": "user", "content": "Tell me about ancient Rome"},
            {"role": "assistant", "content": "Ancient Rome was a civilization centered in Italy."},
            {"role": "user", "content": "What were their major achievements?"},
        ],
        temperature=0.3,
        max_tokens=128,
        top_p=0.95,
        presence_penalty=0.2,
        frequency_penalty=0.2,
        n=1,
        seed=42,
    )
    assert history.usage is not None
    assert history.usage.prompt_tokens == 54
    assert history.usage.completion_tokens <= 128
    assert history.usage.prompt_tokens_details is not None
    assert history.usage.prompt_tokens_details.cached_tokens == 5

    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Say this is a test"}], stream=True, max_tokens=64
    )
    deltas = []
    for chunk in stream:
        if chunk.choices[0].delta.content is not None:  # no chunk without choices, as the tutorial expects
            deltas.append(chunk.choices[0].delta.content)
    assert "".join(deltas)

    completion = client.completions.create(
        model=MODEL, prompt="List 3 countries and their capitals.", temperature=0, max_tokens=64, n=1, stop=None
    )
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == 8
    assert isinstance(completion.choices[0].text, str)

    story = client.completions.create(
        model=MODEL,
        prompt="Write a short story about a space explorer.",
        temperature=0.7,
        max_tokens=150,
        top_p=0.9,
        stop=["\n\n", "THE END"],
        presence_penalty=0.3,
        frequency_penalty=0.3,
        n=1,
        seed=123,
    )
    assert story.usage is not None
    assert story.usage.prompt_tokens == 9

    # warm-up; chat; history; stream; completions; story
    assert tutorial_server.prefills() == [(6, 0), (37, 0), (49, 5), (10, 24), (8, 0), (9, 0)]


def test_the_tutorials_poll_for_models_and_the_warm_up_call_work(tutorial_server: Server) -> None:
    client = openai.Client(base_url=f"{tutorial_server.url}/v1", api_key="None")
    assert [model.id for model in client.models.list()] == [MODEL]
    model = client.models.retrieve(MODEL)
    assert model.id == MODEL
    assert model.max_model_len == 20_480, "what the pool holds, not the context"  # type: ignore[attr-defined]


def test_the_log_reads_in_sglangs_order(tutorial_server: Server) -> None:
    """But for the warm-up's line, which another process writes than the last one: on a busy machine it may come behind that."""
    text = tutorial_server.log.read_text()
    expected = [
        r"server_args=ServerArgs\(",
        r"Load weight begin\. avail mem=[\d.]+ GB",
        r"Load weight end\. type=Qwen2ForCausalLM, dtype=torch\.\w+, avail mem=[\d.]+ GB, mem usage=[\d.]+ GB\.",
        r"KV Cache is allocated\. #tokens: 20480, K size: [\d.]+ GB, V size: [\d.]+ GB",
        r"Memory pool end\. avail mem=[\d.]+ GB",
        r"max_total_num_tokens=20480, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=200, context_len=32768",
        r"WARNING: .* 20480 .* 32768.* --max-total-tokens",
        r"INFO:     Started server process \[\d+\]",
        r"INFO:     Waiting for application startup\.",
        r"INFO:     Application startup complete\.",
        r"INFO:     Uvicorn running on http://127\.0\.0\.1:\d+ \(Press CTRL\+C to quit\)",
    ]
    last = [
        r"Prefill batch\. #new-seq: 1, #new-token: 6, #cached-token: 0, token usage: 0\.00, #running-req: 0, #queue-req: 0",
        r"The server is fired up and ready to roll!",
    ]
    position = 0
    for pattern in expected:
        found = re.compile(pattern).search(text, position)
        assert found, f"{pattern!r} is missing after {text[max(0, position - 200) : position]!r}"
        position = found.end()
    for pattern in last:
        assert re.compile(pattern).search(text, position), f"{pattern!r} is missing after {text[max(0, position - 200) : position]!r}"


def test_the_thinking_example_runs_with_its_fields(tmp_path: Path, qwen3_tokenizer: Path) -> None:
    name = "Qwen/Qwen3-0.6B"
    model = qwen2_folder(tmp_path / "qwen3", qwen3_tokenizer, architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=16)
    server = start(model, tmp_path / "server.log", "--served-model-name", name, "--reasoning-parser", "qwen3", "--max-total-tokens", "4096")
    try:
        client = openai.OpenAI(api_key="EMPTY", base_url=f"{server.url}/v1")
        response = client.chat.completions.create(
            model=name,
            messages=[{"role": "user", "content": "9.11 and 9.8, which is greater?"}],
            max_tokens=64,
            extra_body={"chat_template_kwargs": {"enable_thinking": True}, "separate_reasoning": True},
        )
        message = response.choices[0].message
        assert hasattr(message, "reasoning_content")
        assert hasattr(message, "content")
        off = client.chat.completions.create(
            model=name,
            messages=[{"role": "user", "content": "9.11 and 9.8, which is greater?"}],
            max_tokens=16,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
        assert off.usage is not None
        assert response.usage is not None
        assert off.usage.prompt_tokens == response.usage.prompt_tokens + 4  # the template writes an empty think block
        assert off.choices[0].message.reasoning_content is None  # type: ignore[attr-defined]
    finally:
        server.process.terminate()
        server.process.wait(30)
