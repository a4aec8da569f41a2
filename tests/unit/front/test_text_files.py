"""The text files of a model are not trusted: what is wrong is one line that names the file and the key."""

from __future__ import annotations

import json
import logging
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ModelError
from banyan_runtime.front.chat.template import ChatTemplate
from banyan_runtime.front.prepare.clock import trial
from banyan_runtime.front.text.defaults import GenerationDefaults
from banyan_runtime.front.text.text import Text
from banyan_runtime.front.text.tokenizer import Tokenizer
from tests.unit.front import support

CONFIG: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def load(folder: Path) -> Text:
    return Text.load(ServerConfig(model_path=str(folder)), folder)


def rewrite(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | keys))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    support.byte_level(tmp_path)
    rewrite(tmp_path / "config.json", **CONFIG)
    return tmp_path


@pytest.mark.parametrize("make", [support.byte_level, support.byte_fallback, support.word_pieces])
def test_a_tokenizer_taken_over_from_another_process_is_the_one_that_was_loaded(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    folder = make(tmp_path)
    loaded = Tokenizer.load(folder)
    assert loaded.whole is not None
    ours = Tokenizer.restored(folder, loaded.whole)
    text = "play chess, a 你 and wörds!<|im_end|> ▁a\n"
    for special in (False, True):
        ids = loaded.encode(text, add_special_tokens=special)
        assert ours.encode(text, add_special_tokens=special) == ids
        assert ours.decode(ids, skip_special_tokens=special) == loaded.decode(ids, skip_special_tokens=special)
    assert (ours.size, ours.added, ours.special_ids, ours.eos_id, ours.named) == (
        loaded.size, loaded.added, loaded.special_ids, loaded.eos_id, loaded.named,
    )  # fmt: skip
    assert [ours.token_bytes(token) for token in range(ours.size)] == [loaded.token_bytes(token) for token in range(ours.size)]


@pytest.mark.parametrize(
    "keys",
    [{"vocab_size": "x"}, {"rope_parameters": [1]}, {"num_labels": "abc"}, {"id2label": 3}, {"auto_map": 3}, {"model_type": "nosuch"}],
)
def test_a_key_of_config_json_that_only_transformers_minds_breaks_no_tokenizer(folder: Path, keys: dict[str, Any]) -> None:
    plain = Tokenizer.load(folder)
    rewrite(folder / "config.json", **keys)
    assert Tokenizer.load(folder).encode("hello <|im_end|>", add_special_tokens=True) == plain.encode(
        "hello <|im_end|>", add_special_tokens=True
    )


@pytest.mark.parametrize(
    ("file", "keys", "message"),
    [
        ("config.json", {"model_type": 5}, "'model_type' is 5"),
        ("config.json", {"eos_token_id": "</s>"}, "'eos_token_id' is '</s>'"),
        ("config.json", {"eos_token_id": -1}, "'eos_token_id' is -1"),
        ("config.json", {"eos_token_id": [2, 2**40]}, "'eos_token_id' is [2, 1099511627776]"),
        ("generation_config.json", {"eos_token_id": {"a": 1}}, "'eos_token_id' is {'a': 1}"),
        ("generation_config.json", {"temperature": "hot"}, "temperature is 'hot'"),
        ("generation_config.json", {"temperature": float("nan")}, "temperature is nan"),
        ("generation_config.json", {"top_k": 10**400}, "top_k is 1000"),
        ("tokenizer_config.json", {"eos_token": 5}, "'eos_token' is 5"),
        ("tokenizer_config.json", {"pad_token": {"content": None}}, "'pad_token' is {'content': None}"),
        ("tokenizer_config.json", {"tokenizer_class": ["x"]}, "'tokenizer_class' is ['x']"),
        ("tokenizer_config.json", {"chat_template": 7}, "'chat_template' is 7"),
        ("tokenizer_config.json", {"chat_template": [{"name": ["a"]}]}, "'chat_template' is [{"),
        ("tokenizer_config.json", {"added_tokens_decoder": {str(2**32): {"content": "x"}}}, "'added_tokens_decoder' is"),
        ("tokenizer_config.json", {"chat_template": "{% for a in b %}" * 30 + "{% endfor %}" * 30}, "chat template"),
        ("tokenizer_config.json", {"chat_template": "{{" + "(" * 5000}, "chat template"),
        ("special_tokens_map.json", {"bos_token": 1.5}, "'bos_token' is 1.5"),
        ("tokenizer.json", {"model": {"type": "Nonsense"}}, "tokenizer.json"),
        ("tokenizer.json", {"model": {"type": "WordLevel", "vocab": {"a": 2**32 - 1}, "unk_token": "a"}}, "4294967295"),
    ],
)
def test_a_wrong_value_is_named_with_its_file(folder: Path, file: str, keys: dict[str, Any], message: str) -> None:
    rewrite(folder / file, **keys)
    with pytest.raises(ModelError) as error:
        load(folder)
    assert file in str(error.value)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b"[]"),
        ("generation_config.json", b"\xff"),
        ("tokenizer.json", b"\xff{"),
        ("tokenizer.json", b'{"a":' + b"[" * 100_000),
        ("chat_template.jinja", b"\xff{{ x }}"),
    ],
)
def test_content_that_is_no_json_or_no_text_is_named_with_its_file(folder: Path, file: str, content: bytes) -> None:
    (folder / file).write_bytes(content)
    with pytest.raises(ModelError) as error:
        load(folder)
    assert f"{folder / file}: " in str(error.value)


@pytest.mark.parametrize("file", ["tokenizer.json", "merges.txt", "generation_config.json", "chat_template.jinja"])
def test_a_file_of_a_terabyte_is_refused_unread(folder: Path, file: str) -> None:
    with (folder / file).open("wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(ModelError, match=file):
        load(folder)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", " 2 s"),
        ("{% set ns = namespace(x='a' * 1000000) %}{% for i in range(10) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "MemoryError"),
        ("{{ x }}" * 50_000, "262144"),
    ],
    ids=["endless", "huge", "a long source"],
)
def test_a_template_that_takes_too_much_is_refused_at_the_start(folder: Path, source: str, message: str) -> None:
    (folder / "chat_template.jinja").write_text(source)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(ModelError, match=rf"chat_template.jinja.*{message}"):
        Text.load(ServerConfig(model_path=str(folder)), folder, guard=trial)
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


@pytest.mark.parametrize("layout", ["files", "list"])
def test_a_model_with_a_template_of_its_own_for_tools_renders_them_with_that(folder: Path, layout: str) -> None:
    plain, with_tools = "\n {{ messages[0].content }} \n", " {{ tools[0].name }}: {{ messages[0].content }}\n \n"
    if layout == "files":
        (folder / "chat_template.jinja").write_text(plain)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(with_tools)
    else:
        listed = [{"name": "tool_use", "template": with_tools}, {"name": "default", "template": plain}]
        rewrite(folder / "tokenizer_config.json", chat_template=listed)
    template = load(folder).template
    assert template is not None
    hello = [{"role": "user", "content": "Hello"}]
    for tools, source in ((None, plain), ([{"name": "now"}], with_tools)):
        expected = ChatTemplate(source, {}).render(hello, add_generation_prompt=True, variables={"tools": tools})
        assert template.render(hello, add_generation_prompt=True, variables={"tools": tools}) == expected


def test_a_template_for_tools_alone_serves_requests_without_them_too(folder: Path) -> None:
    source = "{% for tool in tools %}{{ tool.name }}: {% endfor %}{{ messages[0].content }}"
    rewrite(folder / "tokenizer_config.json", chat_template=[{"name": "tool_use", "template": source}])
    template = load(folder).template
    assert template is not None
    hello = [{"role": "user", "content": "Hello"}]
    for tools, expected in ((None, "Hello"), ([{"name": "now"}], "now: Hello")):
        assert template.render(hello, add_generation_prompt=True, variables={"tools": tools}) == expected


def test_who_renders_nothing_does_not_even_compile_the_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% broken")
    assert Text.load(ServerConfig(model_path=str(folder)), folder, guard=None).template is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["content", "name", "template", "1"]), inner, max_size=4),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(keys=st.dictionaries(st.sampled_from(["eos_token_id", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"]), VALUES))
def test_any_generation_config_is_read_or_refused(tmp_path: Path, keys: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(keys))
    found = outcome(tmp_path)
    if isinstance(found, ModelError):
        assert str(tmp_path / "generation_config.json") in str(found)
    else:
        assert all(0 <= token < 1 << 31 for token in found.eos_ids)
        assert all(abs(value) < 1 << 31 for value in found.openai.values())


def outcome(folder: Path) -> GenerationDefaults | ModelError:
    try:
        return GenerationDefaults.load(ServerConfig(model_path="x"), folder, None)
    except ModelError as error:
        return error


@pytest.mark.parametrize(
    ("template", "level"),
    [
        (support.CHATML, logging.WARNING),
        ("{{ tools }}" + support.CHATML, logging.INFO),
        ("{{ documents }}" + support.CHATML, logging.WARNING),
        ("{{ tools }}{{ documents }}" + support.CHATML, None),
    ],
)
def test_a_template_that_shows_no_tools_is_told_of_once(
    folder: Path, caplog: pytest.LogCaptureFixture, template: str, level: int | None
) -> None:
    with caplog.at_level(logging.INFO, "banyan"):
        Text.load(ServerConfig(model_path=str(folder), chat_template=template), folder)
        Text.load(ServerConfig(model_path=str(folder), chat_template=template), folder, guard=None)  # as the processes beside it do
    told = [record for record in caplog.records if "chat template" in record.getMessage()]
    assert [record.levelno for record in told] == ([] if level is None else [level])
