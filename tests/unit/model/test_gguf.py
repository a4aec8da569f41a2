"""A model in a GGUF file is the model that it was made of, without a conversion: same spec, same parameters, same text."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError, ModelError, UserError
from banyan_runtime.hub.gguf.unfold import unfold
from banyan_runtime.model import blocks, host, loader
from banyan_runtime.model.blocks import Blocks, Parameter, dequantize
from banyan_runtime.model.runners import load as load_runner
from banyan_runtime.models import registry
from tests.support.models import ggufs
from tests.support.models.driver import Driver, Request
from tests.support.models.tiny import TinyModel, gate, make
from tests.unit.model.test_parity import prompt

CPU = torch.device("cpu")
FAMILIES = ["llama", "llama3-rope", "mistral", "qwen2", "qwen3"]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
"""Rows of 256, for blocks of all kinds."""


def unfolded(file: Path, beside: Path | None = None) -> Path:
    return unfold(file, beside, file.parent / "cache", tokenizer=False)


def parameters(folder: Path, quantization: str | None = None, dtype: torch.dtype = torch.float32) -> dict[str, Parameter]:
    return loader.load(folder, registry.weights_of(registry.read(folder)), dtype, CPU, lambda *_: None, quantization)


def factors(model: TinyModel) -> Any:
    """What a converter writes into rope_freqs.weight."""
    config, frequencies = model.reference.config, model.reference.model.rotary_emb.inv_freq.double().numpy()
    if config.rope_parameters["rope_type"] != "llama3":
        return None
    count = len(frequencies)
    plain = config.rope_parameters["rope_theta"] ** (-np.arange(count) / count)
    return (plain / frequencies).astype(np.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_metadata_and_tensors_make_the_same_model(tiny_model: Callable[[str], TinyModel], family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    folder = unfolded(ggufs.write(model.folder, tmp_path / "m.gguf", rope_factors=factors(model)))
    expected, found = registry.read(model.folder), registry.read(folder)
    names = {"architecture": found.architecture, "model_type": found.model_type}  # a Mistral is a llama there
    assert dataclasses.replace(expected, **names) == found
    before, after = parameters(model.folder), parameters(folder)
    assert list(before) == list(after)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_unquantized_files_become_tensors(tmp_path: Path, kind: str) -> None:
    model = make(tmp_path / "model", "llama")
    folder = unfolded(ggufs.write(model.folder, tmp_path / "m.gguf", lambda name: kind))
    up = load_file(model.folder / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    found = parameters(folder)["layers.1.gate_up"]
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found[176:], up.to(torch.float16 if kind == "F16" else torch.bfloat16).float())
    assert registry.read(folder).dtype == {"F16": "float16", "BF16": "bfloat16"}[kind]


@pytest.mark.parametrize("family", gate(["llama", "qwen2", "qwen3"]))
def test_blocks_stay_blocks_and_rows_come_in_the_order_of_checkpoints(family: str, tmp_path: Path) -> None:
    model = make(tmp_path / "model", family, tie_word_embeddings=False, **WIDE)
    stored = {
        "token_embd.weight": "Q6_K", "output.weight": "Q8_0", "attn_q.weight": "Q4_K", "attn_k.weight": "Q4_0", "attn_v.weight": "Q6_K",
        "attn_output.weight": "Q4_1", "ffn_gate.weight": "Q5_0", "ffn_up.weight": "F16", "ffn_down.weight": "Q4_K",
    }  # fmt: skip

    def kind(name: str) -> str:
        return stored[name.split(".", 2)[2] if name.startswith("blk.") else name]

    found = parameters(unfolded(ggufs.write(model.folder, tmp_path / "m.gguf", kind)), dtype=torch.bfloat16)
    tensors = {name: tensor.float().numpy() for name, tensor in load_file(model.folder / "model.safetensors").items()}
    attention, mlp = "model.layers.2.self_attn", "model.layers.2.mlp"
    for name, parts in {
        "embed": [("Q6_K", "Q6_K", "model.embed_tokens")],
        "head": [("Q8_0", "Q8_0", "lm_head")],
        "layers.2.qkv": [
            ("Q4_K", "Q4_K", f"{attention}.q_proj"), ("Q4_0", "Q4_0", f"{attention}.k_proj"), ("Q6_K", "Q6_K", f"{attention}.v_proj"),
        ],
        "layers.2.out": [("Q4_1", "Q4_1", f"{attention}.o_proj")],
        "layers.2.gate_up": [("Q5_0", "Q5_0", f"{mlp}.gate_proj"), ("F16", None, f"{mlp}.up_proj")],
        "layers.2.down": [("Q4_K", "Q4_K", f"{mlp}.down_proj")],
    }.items():  # fmt: skip
        parameter = found[name]
        assert isinstance(parameter, tuple), name
        for part, (written, kept, tensor) in zip(parameter, parts, strict=True):
            expected = ggufs.decoded(tensors[f"{tensor}.weight"], written)
            if isinstance(part, Blocks):
                assert part.kind == kept
                np.testing.assert_array_equal(dequantize(part), expected, f"{name}: {tensor}")
            else:
                assert kept is None
                assert part.dtype == torch.bfloat16
                assert torch.equal(part, torch.from_numpy(expected).to(torch.bfloat16))
    assert isinstance(found["layers.2.input_norm"], torch.Tensor)
    in_file = found["layers.2.down"][0]
    assert isinstance(in_file, Blocks)
    assert not in_file.data.flags.writeable, "it was copied"


@pytest.mark.parametrize("kinds", gate([["Q5_1", "Q5_K"], ["IQ4_NL", "Q2_K"], ["MXFP4", "Q3_K"], ["Q5_0", "IQ4_XS"]]))
def test_blocks_of_all_kinds_stay_as_they_are_in_the_file(tmp_path: Path, kinds: list[str], caplog: pytest.LogCaptureFixture) -> None:
    model = make(tmp_path / "model", "qwen2", **WIDE)
    stored = dict(zip(("ffn_up", "ffn_down"), kinds, strict=True))
    file = ggufs.write(model.folder, tmp_path / "m.gguf", lambda name: stored.get(name.split(".")[-2], "Q8_0"))
    with caplog.at_level(logging.INFO, "banyan"):
        found = parameters(unfolded(file))
    tensors = {name: tensor.float().numpy() for name, tensor in load_file(model.folder / "model.safetensors").items()}
    for name, part, kind in (("up_proj", found["layers.0.gate_up"][1], kinds[0]), ("down_proj", found["layers.0.down"][0], kinds[1])):
        assert isinstance(part, Blocks)
        assert part.kind == kind
        np.testing.assert_array_equal(dequantize(part), ggufs.decoded(tensors[f"model.layers.0.mlp.{name}.weight"], kind))
    assert f" 3 in {min(kinds)}, 3 in {max(kinds)}, 16 in Q8_0" in caplog.text


@pytest.mark.parametrize("change", [{"ffn_up": "IQ2_S"}, {"attn_v": "TQ2_0"}])
def test_other_formats_are_refused_with_the_tensor_and_what_to_take(tmp_path: Path, change: dict[str, str]) -> None:
    model = make(tmp_path / "model", "qwen2", **WIDE)
    ((part, kind),) = change.items()
    file = ggufs.write(model.folder, tmp_path / "m.gguf", lambda name: "Q8_0")
    from banyan_runtime.hub.gguf import header

    stored = header.read(file).tensors[f"blk.1.{part}.weight"]
    content = bytearray(file.read_bytes())
    at = content.index(f"blk.1.{part}.weight".encode()) + len(stored.name) + 4 + 8 * 2  # behind name, count and shape
    number = {"IQ2_S": 22, "TQ2_0": 35}[kind]
    assert content[at] == 8, "Q8_0"
    content[at] = number
    file.write_bytes(content)
    with pytest.raises(ModelError, match=rf"m\.gguf: .*blk\.1\.{part}\.weight.* {kind}.*Q4_K"):
        parameters(unfolded(file))


def test_errors_about_tensors_use_the_files_own_names(tmp_path: Path) -> None:
    model = make(tmp_path / "model", "qwen2")
    file = ggufs.write(model.folder, tmp_path / "m.gguf", extra={})
    folder = unfolded(file)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'))
    with pytest.raises(ModelError, match=r"blk\.3\.attn_norm\.weight"):
        parameters(folder)
    (folder / "config.json").write_text(config.replace('"num_hidden_layers": 3', '"num_hidden_layers": 2'))
    with pytest.raises(ModelError, match=r"m\.gguf: 12 .*blk\.2\."):
        parameters(folder)
    (folder / "config.json").write_text(config.replace('"intermediate_size": 176', '"intermediate_size": 177'))
    with pytest.raises(ModelError, match=r"m\.gguf: .*blk\.0\.ffn_gate\.weight.*\[176, 96\].*\[177, 96\]"):
        parameters(folder)


def test_a_file_that_has_become_shorter_is_a_model_error(tmp_path: Path) -> None:
    file = ggufs.write(make(tmp_path / "model", "qwen2").folder, tmp_path / "m.gguf")
    folder = unfolded(file)
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(ModelError, match=r"m\.gguf: .*tensor '\S+' .*\d+"):
        parameters(folder)


@pytest.mark.parametrize("family", gate(["llama", "qwen3"]))
@pytest.mark.parametrize("kind", gate(["Q4_K", "F32", "Q8_0"]))
def test_the_text_is_that_of_the_weights_in_the_file(family: str, kind: str, tmp_path: Path) -> None:
    model = make(tmp_path / "model", family, **WIDE)
    file = ggufs.write(model.folder, tmp_path / "m.gguf", lambda name: kind)
    with torch.no_grad():  # transformers computes with what the file holds
        for parameter in model.reference.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.from_numpy(ggufs.decoded(parameter.float().numpy(), kind)))
    runner = load_runner(
        ServerConfig(model_path=str(file), dtype="float32", max_total_tokens=2048, device="cpu", runner="torch"),
        unfolded(file),
        lambda *_: None,
    )
    request = Request(prompt(2, 40), new_tokens=40, row=0)
    Driver(runner, rows=1, context=128).run([request])  # type: ignore[arg-type]
    assert request.output == model.choices(request.prompt, request.output)
    assert len(set(request.output)) > 8


@pytest.mark.parametrize(("quantization", "projection", "vocabulary"), [("w8a16", "Q8_0", "Q8_0"), ("w4a16", "Q4_1", "Q8_0")])
def test_safetensors_can_be_quantized_while_they_are_loaded(
    tmp_path: Path, quantization: str, projection: str, vocabulary: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make(tmp_path, "qwen2", tie_word_embeddings=False, intermediate_size=176, hidden_size=96)
    tensors = {name: tensor.float().numpy() for name, tensor in load_file(model.folder / "model.safetensors").items()}
    with caplog.at_level(logging.INFO, "banyan"):
        found = parameters(model.folder, quantization)
    attention = "model.layers.1.self_attn"
    for name, kind, parts in (
        ("embed", vocabulary, ["model.embed_tokens"]),
        ("head", vocabulary, ["lm_head"]),
        ("layers.1.qkv", projection, [f"{attention}.{part}_proj" for part in "qkv"]),
    ):
        parameter = found[name]
        assert isinstance(parameter, tuple)
        for part, tensor in zip(parameter, parts, strict=True):
            assert isinstance(part, Blocks)
            assert part.kind == kind
            np.testing.assert_array_equal(dequantize(part), ggufs.decoded(tensors[f"{tensor}.weight"], kind))
    assert isinstance(found["layers.1.down"], torch.Tensor), "its rows of 176 make no whole blocks"
    assert isinstance(found["layers.1.qkv_bias"], torch.Tensor)
    assert "3 in float32" in caplog.text


def test_an_unquantized_file_can_be_quantized_too_but_not_a_quantized_one(tmp_path: Path) -> None:
    model = make(tmp_path / "model", "llama", **WIDE)
    plain = parameters(unfolded(ggufs.write(model.folder, tmp_path / "a.gguf", lambda name: "F32")), "w8a16")
    direct = parameters(model.folder, "w8a16")
    for name, parameter in direct.items():
        for one, other in zip(parameter, plain[name], strict=True):
            assert not isinstance(one, Blocks) or np.array_equal(one.data, other.data), name  # type: ignore[union-attr]
    file = ggufs.write(model.folder, tmp_path / "b.gguf", lambda name: "Q4_0" if "ffn" in name else "F16")
    with pytest.raises(ConfigError, match=r"--quantization=w4a16: .*b\.gguf .*Q4_0"):
        parameters(unfolded(file), "w4a16")


def test_dummy_weights_can_be_quantized(tiny_model: Callable[[str], TinyModel]) -> None:
    wanted = registry.weights_of(registry.read(tiny_model("qwen2").folder))
    plain = loader.dummy(wanted, torch.float32, CPU, lambda *_: None)
    found = loader.dummy(wanted, torch.float32, CPU, lambda *_: None, "w4a16")
    (part,) = found["layers.0.qkv"]
    assert isinstance(part, Blocks)
    assert part.kind == "Q4_1"
    np.testing.assert_array_equal(part.data, blocks.quantize(plain["layers.0.qkv"], "Q4_1").data)  # type: ignore[arg-type]
    assert blocks.nbytes(found.values()) < 0.5 * blocks.nbytes(plain.values())


def test_what_fits_as_blocks_may_not_fit_as_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(tmp_path, "llama", **WIDE)
    wanted = registry.weights_of(registry.read(model.folder))
    size = blocks.nbytes(parameters(model.folder, "w4a16").values())
    monkeypatch.setattr(host, "memory_available", lambda: size - 1)
    with pytest.raises(ConfigError, match=r" \d+\.\d\d GB "):
        parameters(model.folder, "w4a16")
    monkeypatch.setattr(host, "memory_available", lambda: size)
    found = parameters(model.folder, "w4a16")
    with pytest.raises(ConfigError, match=r" \d+\.\d\d GB "):
        loader.dequantized(found, torch.float32, CPU)
    monkeypatch.setattr(host, "memory_available", lambda: wanted.elements() * 4)
    assert loader.dequantized(found, torch.float32, CPU)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_damage_to_a_header_is_told_as_such_or_does_no_harm(whole: bytes, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(whole)
    header_bytes = content.index(b"blk.2.ffn_down.weight") + 60
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header_bytes))] = data.draw(st.integers(0, 255))
    file = tmp_path / f"{data.draw(st.uuids())}.gguf"
    file.write_bytes(content)
    with contextlib.suppress(UserError):
        folder = unfold(file, None, tmp_path / "cache")
        loader.load(folder, registry.weights_of(registry.read(folder)), torch.float32, CPU, lambda *_: None)
    file.unlink()


@pytest.fixture(scope="module")
def whole(tiny_chat: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return ggufs.write(tiny_chat, tmp_path_factory.mktemp("whole") / "tiny.gguf", lambda name: "Q4_0").read_bytes()
