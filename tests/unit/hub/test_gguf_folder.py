"""A GGUF file becomes a small folder that everything else reads as it reads any model's."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as library
import numpy as np
import pytest
import tokenizers

from banyan_runtime.errors import ModelError, UnavailableError
from banyan_runtime.front.text.tokenizer import Tokenizer
from banyan_runtime.hub import check, resolve
from banyan_runtime.hub.gguf import config, header, tokenizer
from banyan_runtime.hub.gguf.files import find
from banyan_runtime.hub.gguf.header import Fields
from banyan_runtime.hub.inspect import inspect
from banyan_runtime.models import registry
from banyan_runtime.models.config import LinearRope, RopeScaling, YarnRope
from tests.conftest import npm_tokenizer
from tests.support.models import ggufs

MADE = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
TEXTS = (
    "Hello, world!  Two spaces,\ttabs\n\n\nlines \r\n and an end ",
    "It's 12345 o'clock; we'LL see 3.14159 or 1,000,000.00 at ½ price",
    "Ünïcödé e\u0301 é 日本語テキスト עברית العربية हिन्दी ไทย 🦙👩‍👩‍👧‍👦",
    "def f(x):\n    return {'a': x[0:-1] ** 2}  # ok!!!\n",
    "CamelCaseWords, HTTPServer and iPhone ǅungla // /path/to\n\n  <b>bold</b>",
    "   <|im_start|>user\nhi<|im_end|>\n<|begin_of_text|><|eot_id|>",
    "",
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("BANYAN_CACHE", str(folder))
    return folder


@pytest.fixture
def file(tiny_chat: Path, tmp_path: Path) -> Path:
    return ggufs.write(tiny_chat, tmp_path / "tiny.gguf", lambda name: "BF16")


def test_a_file_is_resolved_to_a_folder_with_all_that_a_model_needs(file: Path, cache: Path, tiny_chat: Path) -> None:
    check(str(file))
    folder = resolve(str(file))
    assert folder.is_relative_to(cache / "gguf")
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == {*MADE, "tiny.gguf"}
    assert (folder / "tiny.gguf").resolve() == file.resolve()
    assert resolve(str(folder)) == folder
    ours, theirs = Tokenizer.load(folder), Tokenizer.load(tiny_chat)
    assert [ours.encode(text, add_special_tokens=True) for text in TEXTS] == [
        theirs.encode(text, add_special_tokens=True) for text in TEXTS
    ]
    assert (ours.added, ours.special_ids, ours.eos_id) == (theirs.added, theirs.special_ids, theirs.eos_id)
    assert ours.settings["chat_template"] == (tiny_chat / "chat_template.jinja").read_text()
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def test_the_folder_is_made_once_for_each_version_of_the_file(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve(str(file))
    with monkeypatch.context() as patch:
        patch.setattr(header, "read", lambda path: pytest.fail("read again"))
        assert resolve(str(file)) == first
    content = file.read_bytes()
    file.write_bytes(content.replace(b"general.architecture", b"general.architecture", 1) + bytes(32))
    assert resolve(str(file)) != first
    assert not [path for path in (cache / "gguf").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("name", [*sorted(MADE), "tiny.gguf"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 10)], ids=["gone", "cut"])
def test_a_folder_that_is_not_whole_is_made_anew(file: Path, cache: Path, name: str, damage: Callable[[Path], None]) -> None:
    folder = resolve(str(file))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    if name == "tiny.gguf":
        (folder / name).unlink()  # the link alone
    else:
        damage(folder / name)
    assert resolve(str(file)) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_what_lies_beside_the_file_in_a_named_folder_wins(file: Path, cache: Path, tiny_chat: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    file.rename(folder / "weights.gguf")
    (folder / "chat_template.jinja").write_text("mine")
    shutil.copy(tiny_chat / "config.json", folder)
    found = resolve(str(folder))
    assert {path.name for path in found.iterdir() if not path.name.startswith(".")} == {*MADE, "weights.gguf", "chat_template.jinja"}
    assert (found / "chat_template.jinja").read_text() == "mine"
    assert json.loads((found / "config.json").read_text()) == json.loads((tiny_chat / "config.json").read_text())
    assert resolve(str(folder / "weights.gguf")) != found, "a file that is named stands for itself"
    for name in MADE:
        shutil.copy(tiny_chat / name, folder)
    assert resolve(str(folder)) == folder, "nothing is left to say"
    assert not (resolve(str(folder)) / "tiny.gguf").exists()


def test_of_several_files_one_has_to_be_named_and_safetensors_come_first(file: Path, cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(file, folder / "a.gguf")
    shutil.copy(file, folder / "b.gguf")
    with pytest.raises(ModelError, match=r"a\.gguf, b\.gguf.*--model-path"):
        check(str(folder))
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"config\.json"):
        check(str(folder))
    assert find(folder) is None


def test_another_kind_of_file_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelError, match=r"--model-path=.*model\.bin"):
        check(str(tmp_path / "model.bin"))


def test_a_cache_that_cannot_be_written_says_what_to_do(file: Path, cache: Path) -> None:
    cache.write_text("a file, where a folder should be")
    with pytest.raises(UnavailableError, match=r"tiny\.gguf.*--download-dir or BANYAN_CACHE"):
        resolve(str(file))


def test_a_tokenizer_of_an_unknown_kind_is_refused_only_where_it_is_needed(tiny_chat: Path, tmp_path: Path, cache: Path) -> None:
    file = ggufs.write(tiny_chat, tmp_path / "odd.gguf", pre="viking")
    with pytest.raises(ModelError, match=r"odd\.gguf: tokenizer\.ggml\.model .*tokenizer\.ggml\.pre 'viking'.*--tokenizer-path"):
        resolve(str(file))
    found = resolve(str(file), None, tokenizer=False)
    assert {path.name for path in found.iterdir() if not path.name.startswith(".")} == {"config.json", "generation_config.json", "odd.gguf"}
    folder = tmp_path / "model"
    folder.mkdir()
    file.rename(folder / "odd.gguf")
    shutil.copy(tiny_chat / "tokenizer.json", folder)
    assert Tokenizer.load(resolve(str(folder))).eos_id == 2


def edited(file: Path, change: Callable[[dict[str, Any]], object]) -> Fields:
    found = header.read(file)
    values = dict(found.fields)
    change(values)
    return Fields(header.Header(file, values, found.tensors))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "mamba"}, r"general\.architecture is 'mamba'"),
        ({"general.architecture": 3}, r"'general\.architecture' is 3"),
        ({"qwen3.attention.causal": False}, r"'qwen3\.attention\.causal' is false"),
        ({"qwen3.expert_count": 8}, r"'qwen3\.expert_count'"),
        ({"qwen3.block_count": None}, r"'qwen3\.block_count'"),
        ({"qwen3.block_count": 0}, r"'qwen3\.block_count' is 0"),
        ({"qwen3.embedding_length": [128, 128]}, r"'qwen3\.embedding_length' is \[128, 128\]"),
        ({"qwen3.attention.head_count_kv": True}, r"'qwen3\.attention\.head_count_kv' is True"),
        ({"qwen3.attention.value_length": 64}, r"'qwen3\.attention\.value_length' is 64"),
        ({"qwen3.rope.dimension_count": 16}, r"'qwen3\.rope\.dimension_count' is 16"),
        ({"qwen3.attention.layer_norm_rms_epsilon": float("nan")}, r"layer_norm_rms_epsilon' is nan"),
        ({"qwen3.rope.scaling.type": "longrope"}, r"'qwen3\.rope\.scaling\.type' is 'longrope'"),
        ({"tokenizer.ggml.eos_token_id": 832}, r"'tokenizer\.ggml\.eos_token_id' is 832"),
    ],
)  # fmt: skip
def test_metadata_that_cannot_be_served_is_named_with_its_key(file: Path, change: dict[str, Any], message: str) -> None:
    def apply(values: dict[str, Any]) -> None:
        for key, value in change.items():
            values.pop(key, None) if value is None else values.update({key: value})

    with pytest.raises(ModelError, match=rf"tiny\.gguf: .*{message}"):
        config.config(edited(file, apply))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, r"tokenizer\.ggml\.model is 'bert'"),
        ({"tokenizer.ggml.model": "llama"}, r"'tokenizer\.ggml\.scores' is missing"),
        ({"tokenizer.ggml.token_type": [1]}, r"'tokenizer\.ggml\.token_type' "),
        ({"tokenizer.ggml.merges": ["ab c"]}, r"'tokenizer\.ggml\.merges'"),
        ({"tokenizer.ggml.tokens": ["a"] * 832}, r"'tokenizer\.ggml\.tokens'"),
        ({"tokenizer.ggml.tokens": [1] * 832}, r"'tokenizer\.ggml\.tokens' is \[1, 1, 1, 1, \.\.\.\]"),
        ({"tokenizer.ggml.add_bos_token": 1}, r"'tokenizer\.ggml\.add_bos_token' is 1"),
    ],
)
def test_a_vocabulary_that_is_damaged_is_named_with_its_key(file: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=rf"tiny\.gguf: .*{message}"):
        tokenizer.tokenizer(edited(file, lambda values: values.update(change)))


def test_factors_of_rotary_frequencies_that_follow_no_known_rule_are_refused(tmp_path: Path, tiny_chat: Path) -> None:
    file = ggufs.write(tiny_chat, tmp_path / "long.gguf", rope_factors=np.linspace(1, 8, 16).astype(np.float32))
    with pytest.raises(ModelError, match=r"long\.gguf: tensor 'rope_freqs\.weight'"):
        config.config(Fields(header.read(file)))


def test_linear_scaling_becomes_that_of_the_config(file: Path, tmp_path: Path) -> None:
    fields = edited(file, lambda values: values.update({"qwen3.rope.scaling.type": "linear", "qwen3.rope.scaling.factor": 4.0}))
    (rope,) = registry.parse(config.config(fields)).ropes
    assert rope.scaling == LinearRope(4.0)


def test_yarn_becomes_that_of_the_config(file: Path) -> None:
    def read(**told: Any) -> tuple[RopeScaling, int]:
        values = {"type": "yarn", "factor": 4.0} | told
        found = registry.parse(
            config.config(edited(file, lambda own: own.update({f"qwen3.rope.scaling.{key}": value for key, value in values.items()})))
        )
        (rope,) = found.ropes
        return rope.scaling, found.context_len

    assert read(original_context_length=256) == (YarnRope(4.0, 32.0, 1.0, True, 1.0 + 0.1 * math.log(4.0), 256), 1024)
    told, _ = read(original_context_length=256, yarn_beta_fast=16.0, yarn_beta_slow=2.0, attn_factor=0.5)
    assert told == YarnRope(4.0, 16.0, 2.0, True, 0.5 * (1.0 + 0.1 * math.log(4.0)), 256)


def test_sampling_and_named_templates_are_taken_over(file: Path) -> None:
    fields = edited(
        file,
        lambda values: values.update({
            "general.sampling.temp": 0.60000002384, "general.sampling.top_k": 20, "general.sampling.top_p": 0.949999988,
            "tokenizer.ggml.eot_token_id": 1, "tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "tools",
        }),
    )  # fmt: skip
    assert config.generation_config(fields) == {
        "eos_token_id": [2, 1, 0], "pad_token_id": 0, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
    }  # fmt: skip
    names = {entry["name"]: entry["template"] for entry in config.tokenizer_config(fields)["chat_template"]}
    assert names == {"default": fields.text("tokenizer.chat_template"), "tool_use": "tools"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "pre", "bos"),
    [
        ("qwen3", "qwen2", False), ("qwen2.5", "qwen2", None), ("llama3.1", "llama-bpe", None), ("llama3", "llama-bpe", False),
        ("mistral-nemo", "tekken", True), ("deepseek-v3", "deepseek-v3", False), ("deepseek-v3", "hunyuan-dense", False),
        ("gemma", "default", None), ("gemma3", "default", None),
    ],
)  # fmt: skip
def test_real_vocabularies_give_the_ids_of_their_own_tokenizers(family: str, pre: str, bos: bool | None, tmp_path: Path) -> None:
    folder = npm_tokenizer(family)
    writer = library.GGUFWriter(tmp_path / "vocabulary.gguf", "llama")
    ggufs.write_tokenizer(writer, folder, pre, {"vocab_size": 152_064})
    if bos is not None:
        writer.add_add_bos_token(bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields = Fields(header.read(tmp_path / "vocabulary.gguf"))
    ours = tokenizers.Tokenizer.from_str(tokenizer.tokenizer(fields))
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        for add in (False, True):
            assert ours.encode(text, add_special_tokens=add).ids == theirs.encode(text, add_special_tokens=add).ids, text
    assert ours.get_vocab_size() == theirs.get_vocab_size()
    (tmp_path / "model").mkdir()
    for name, text in {"tokenizer.json": ours.to_str(), "tokenizer_config.json": json.dumps(config.tokenizer_config(fields))}.items():
        (tmp_path / "model" / name).write_text(text)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2" if pre == "qwen2" else "llama"}))
    loaded = Tokenizer.load(tmp_path / "model")
    assert [loaded.encode(text, add_special_tokens=True) for text in TEXTS] == [theirs.encode(text).ids for text in TEXTS]
    assert loaded.has_bytes


def test_a_file_can_be_inspected(file: Path, cache: Path) -> None:
    found = inspect(resolve(str(file)))
    assert (found.architecture, found.layers, found.files, found.tokenizer, found.chat_template) == ("Qwen3ForCausalLM", 4, 1, True, True)
    assert found.dtypes == {"BF16": 29, "F32": 17}
    assert found.kv_bytes_per_token == 2 * 4 * 2 * 32 * 2
