"""A server of a `.gguf` file, from the command line to the client."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest

from tests.support.models import ggufs
from tests.support.server.process import MODEL, ServerProcess, StartServer

QUESTIONS = ("What is your name?", "Count to ten.", "Tell me about trees.")
EXIT_CONFIG, EXIT_MODEL = 64, 65


def answers(server: ServerProcess) -> list[str | None]:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    return [
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": question}], max_tokens=40, temperature=0
        ).choices[0].message.content
        for question in QUESTIONS
    ]  # fmt: skip


@pytest.fixture(scope="module")
def quantized(tiny_chat: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ggufs.write(tiny_chat, tmp_path_factory.mktemp("quantized") / "tiny.Q8_0.gguf", lambda name: "Q8_0")


@pytest.mark.long
def test_an_unquantized_file_answers_as_the_folder_that_it_was_made_of(
    start_server: StartServer, server: ServerProcess, tiny_chat: Path, tmp_path: Path
) -> None:
    file = ggufs.write(tiny_chat, tmp_path / "tiny.gguf", lambda name: "BF16")
    found = start_server("--dtype", "float32", "--reasoning-parser", "qwen3", model=file).ready()
    expected = answers(server)
    assert answers(found) == expected
    assert len(set(expected)) == len(QUESTIONS)
    assert found.get("/v1/models").json()["data"][0]["root"] == str(file)
    assert "Using model weights format ['*.gguf']" in found.log


@pytest.mark.long
def test_a_quantized_file_is_served_by_the_torch_runner(start_server: StartServer, quantized: Path) -> None:
    server = start_server("--runner", "torch", "--dtype", "float32", model=quantized).ready()
    assert all(answers(server))
    assert "Weights are quantized: matrices 29 in Q8_0" in server.log


@pytest.mark.long
def test_weights_are_quantized_at_load(start_server: StartServer) -> None:
    server = start_server("--quantization", "w8a16").ready()
    assert all(answers(server))
    assert server.get("/server_info").json()["quantization"] == "w8a16"
    assert "in Q8_0" in server.log


@pytest.mark.long
def test_a_quantized_file_is_not_quantized_again(start_server: StartServer, quantized: Path) -> None:
    server = start_server("--quantization", "w4a16", model=quantized)
    assert server.wait(60) == EXIT_CONFIG
    assert "tiny.Q8_0.gguf" in server.log
    assert json.loads(server.termination_log.read_text())["code"] == "invalid_flag"


@pytest.mark.long
def test_a_tokenizer_that_is_not_known_ends_the_start_with_what_to_do_and_that_helps(
    start_server: StartServer, tiny_chat: Path, tmp_path: Path
) -> None:
    file = ggufs.write(tiny_chat, tmp_path / "odd.gguf", lambda name: "BF16", pre="viking")
    refused = start_server(model=file)
    assert refused.wait(60) == EXIT_MODEL
    words = json.loads(refused.termination_log.read_text())
    assert words["code"] == "invalid_model"
    assert all(word in words["message"] for word in ("odd.gguf", "'viking'", "--tokenizer-path"))
    assert all(answers(start_server("--tokenizer-path", str(tiny_chat), model=file).ready()))


@pytest.mark.long
def test_a_damaged_file_ends_the_start_with_its_name(start_server: StartServer, quantized: Path, tmp_path: Path) -> None:
    file = tmp_path / "half.gguf"
    file.write_bytes(quantized.read_bytes()[:-100_000])
    server = start_server(model=file)
    assert server.wait(60) == EXIT_MODEL
    assert "half.gguf" in json.loads(server.termination_log.read_text())["message"]
