"""The command line of the server: every option is checked, and others are refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from banyan_runtime.arguments import add_options, parse
from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError
from banyan_runtime.options import flag
from banyan_runtime.server.clients import Wake
from banyan_runtime.server.grammars import grammars_of
from banyan_runtime.step import RunnerInfo

GOLDEN = Path(__file__).parent / "options.golden"


def asked(*words: str) -> ServerConfig:
    return parse(["--model-path", "folder", *words])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--tp", "2"], "one device"),
        (["--nnodes=2"], "one device"),
        (["--dist-init-addr", "10.0.0.1:5000"], "one device"),
        (["--lora-paths", "a=/a", "b=/b"], "adapters"),
        (["--max-loras-per-batch", "4"], "adapters"),
        (["--speculative-draft-model-path", "folder"], "drafts"),
    ],
)
def test_an_option_that_banyan_does_not_have_yet_is_refused_with_its_reason(words: list[str], reason: str) -> None:
    with pytest.raises(ConfigError) as told:
        asked(*words)
    assert told.value.field == words[0].partition("=")[0]
    assert reason in told.value.message


def test_options_that_ask_for_what_there_is_are_accepted() -> None:
    assert asked("--tp", "1", "--enable-metrics", "--nnodes=1", "--node-rank", "0", "--enable-cache-report") == asked()


@pytest.mark.parametrize(("option", "closest"), [("--enable-nan-detection", "--enable-"), ("--context-len", "--context-length")])
def test_an_unknown_option_is_told_with_the_closest_one(option: str, closest: str) -> None:
    with pytest.raises(ConfigError) as told:
        asked(option, "7")
    assert (option in str(told.value), f"closest one is {closest}" in str(told.value)) == (True, True)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--port", "70000"], "--port=70000"),
        (["--port", "many"], "--port"),
        (["--page-size", "3"], "--page-size=3"),
        (["--chunked-prefill-size", "0"], "--chunked-prefill-size=0"),
        (["--chunked-prefill-size", "40", "--page-size", "16"], "--chunked-prefill-size=40"),
        (["--mem-fraction-static", "1.5"], "--mem-fraction-static=1.5"),
        (["--json-model-override-args", "[1]"], "--json-model-override-args=[1]"),
        (["--file-storage-path", "s3:/b/x"], "--file-storage-path=s3:/b/x"),
        (["--response-store-path", "s3://b/x"], "--response-store-path=s3://b/x"),
        (["--schedule-policy", "random"], "--schedule-policy=random"),
        (["--api-key", "a", "--api-keys-file", "b"], "--api-keys-file"),
        (["--admin-api-key", "a", "--admin-api-keys-file", "b"], "--admin-api-keys-file"),
        (["--request-timeout", "nan"], "--request-timeout=nan"),
        (["--no-such-option"], "--no-such-option"),
        (["stray"], "stray"),
    ],
)
def test_a_bad_value_is_named_with_its_option(words: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as told:
        asked(*words)
    assert named in str(told.value)


def test_a_model_is_served_under_its_path_or_its_name_in_the_catalog_unless_it_is_given_names() -> None:
    assert parse(["--model-path", "some/folder"]).names == ("some/folder",)
    assert parse(["--model-path", "catalog://smollm2-135m"]).names == ("smollm2-135m",)
    assert parse(["--model-path", "catalog://smollm2-135m", "--served-model-name", "a", "b"]).names == ("a", "b")


def test_the_model_is_required() -> None:
    with pytest.raises(ConfigError, match="--model-path"):
        parse([])


def test_every_option_says_what_it_does() -> None:
    import argparse

    parser = argparse.ArgumentParser(prog="serve")
    add_options(parser)
    text = parser.format_help()
    for field in dataclasses.fields(ServerConfig):
        assert flag(field.name) in text
        assert len(field.metadata["help"]) > 10
    assert "--dtype {auto,float32,float,bfloat16,float16,half}" in text


def test_names_and_defaults_are_those_of_the_golden_file() -> None:
    fields = dataclasses.fields(ServerConfig)
    lines = [flag(field.name) + ("" if field.default is dataclasses.MISSING else f" {field.default!r}") for field in fields]
    assert "\n".join(lines) + "\n" == GOLDEN.read_text(), "scripts name these options: change the golden file by hand, and keep old names"


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://chat.example/app", ""])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="--cors-allow-origins"):
        asked("--cors-allow-origins", "http://localhost:3000", origin)


def test_secrets_reach_neither_the_log_nor_the_engine() -> None:
    config = asked("--api-key", "s3cret-key", "--admin-api-key", "s3cret-key-too")
    assert (config.api_key, config.admin_api_key) == ("s3cret-key", "s3cret-key-too")
    for shown in (repr(config), str(config.public()), config.engine_json()):
        assert "s3cret-key" not in shown


def test_the_engine_gets_the_same_options() -> None:
    config = asked("--served-model-name", "a", "b", "--page-size", "16", "--dtype", "float32", "--cors-allow-origins", "*")
    assert ServerConfig.from_engine_json(config.engine_json()) == config


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_the_log_says_what_computes_grammars_where_another_library_was_asked_for(
    tiny_chat: Path, caplog: pytest.LogCaptureFixture, backend: str
) -> None:
    config = asked("--grammar-backend", backend)
    info = RunnerInfo("A", "a", 832, 4096, 0, "bfloat16", "cpu", "native", 0, 0, 0)
    with caplog.at_level("INFO", "banyan"):
        assert grammars_of(config, tiny_chat, tiny_chat, info, Wake(list)) is not None
    assert ("llguidance" in caplog.text) == (backend == "xgrammar")
