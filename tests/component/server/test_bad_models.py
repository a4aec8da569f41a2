"""A model that cannot be served ends the real command with one line that names the file and the key, and the right exit code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.server.process import ServerProcess

StartServer = Callable[..., ServerProcess]
BAD_FILES, BAD_FIT = 65, 64


def change(file: str, **keys: Any) -> Callable[[Path], None]:
    """Replace keys of one of the model's JSON files."""

    def apply(model: Path) -> None:
        path = model / file
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | keys))

    return apply


def write(file: str, content: bytes) -> Callable[[Path], None]:
    def apply(model: Path) -> None:
        (model / file).write_bytes(content)

    return apply


def header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


MANY = b"{" + b",".join(b'"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % number for number in range(900_000)) + b"}"


@pytest.mark.long  # of these errors the gate has the one of test_lifecycle.py
@pytest.mark.parametrize(
    ("spoil", "code", "words"),
    [
        pytest.param(change("config.json", hidden_size=10**12), BAD_FILES, ["config.json", "'hidden_size'"], id="size"),
        pytest.param(
            change("config.json", rope_parameters={"rope_theta": float("nan")}), BAD_FILES, ["config.json", "'rope_theta'"], id="nan"
        ),
        pytest.param(write("config.json", b"[]"), BAD_FILES, ["config.json"], id="root"),
        pytest.param(
            change("generation_config.json", eos_token_id="</s>"), BAD_FILES, ["generation_config.json", "'eos_token_id'"], id="eos"
        ),
        pytest.param(change("tokenizer_config.json", eos_token=5), BAD_FILES, ["tokenizer_config.json", "'eos_token'"], id="token"),
        pytest.param(write("chat_template.jinja", b"\xff{{ x }}"), BAD_FILES, ["chat_template.jinja"], id="template"),
        pytest.param(
            change("model.safetensors.index.json", weight_map={"lm_head.weight": "../../etc/x.safetensors"}),
            BAD_FILES,
            ["model.safetensors.index.json", "'lm_head.weight'"],
            id="index",
        ),
        pytest.param(write("model.safetensors", header(MANY)), BAD_FILES, ["model.safetensors"], id="header"),
    ],
)
def test_bad_files_end_the_start_with_one_line_that_names_them(
    start_server: StartServer, tiny_chat: Path, tmp_path: Path, spoil: Callable[[Path], None], code: int, words: list[str]
) -> None:
    model = shutil.copytree(tiny_chat, tmp_path / "model", copy_function=shutil.copyfile)
    spoil(model)
    refused(start_server(model=model), code, words)


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        ("catalog://smollm3", BAD_FILES, "smollm3"),
        ("nowhere", BAD_FILES, "model_not_found"),
    ],
)
def test_a_mistyped_model_ends_the_start_with_one_line_and_no_other(start_server: StartServer, model: str, code: int, words: str) -> None:
    server = start_server(model=model)
    assert server.wait(60) == code
    assert server.log.startswith("FATAL: ")
    assert server.log.count("\n") == 1
    assert words in server.termination_log.read_text()


@pytest.mark.long
def test_a_model_that_is_too_large_for_the_machine_is_refused_before_anything_is_allocated(
    start_server: StartServer, tiny_chat: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_chat, tmp_path / "model", copy_function=shutil.copyfile)
    change("config.json", num_hidden_layers=1024, hidden_size=65536, intermediate_size=262144, layer_types=None)(model)
    refused(start_server("--load-format", "dummy", model=model), BAD_FIT, ["--dtype"])


def refused(server: ServerProcess, code: int, words: list[str]) -> None:
    assert server.wait(60) == code, server.log
    fatal = [line for line in server.lines if line.startswith("FATAL")]
    assert fatal == server.lines[-1:], server.log  # the last to be read
    assert all(word in fatal[0] for word in words), fatal
    assert "Traceback" not in server.log
