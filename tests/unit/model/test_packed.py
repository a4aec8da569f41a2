"""Checkpoints that other tools have quantized are served with the numbers that they mean; what they cannot mean is named."""

from __future__ import annotations

import json
import logging
import re
import shutil
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from banyan_runtime.errors import ConfigError, ModelError
from banyan_runtime.hub import cli
from banyan_runtime.hub.inspect import inspect
from banyan_runtime.model import device, loader, packed
from banyan_runtime.model.blocks import Blocks, Parameter, dequantize
from banyan_runtime.models import registry
from banyan_runtime.models.quantization import Grouped, Scaled, packing
from tests.support.models import packings
from tests.support.models.driver import Driver, Request
from tests.support.models.tiny import FAMILIES, VISION, VOCAB, gate, make


def parameters(folder: Path, quantization: str | None = None) -> dict[str, Parameter]:
    of = registry.read(folder)
    return loader.load(folder, registry.weights_of(of), torch.float32, torch.device("cpu"), lambda *_: None, quantization, of.packing)


EACH = ("awq", "gptq, by activations", "packed, with zeros", "fp8 in blocks", "int8 by rows")
"""One of each way to pack, whose texts the gate compares; the numbers of all forms it compares anyway."""


def prompts() -> list[Request]:
    return [Request([(31 * row + 7 * i) % VOCAB for i in range(9 + 12 * row)], new_tokens=12, row=row) for row in range(3)]


@pytest.mark.matrix(gate=6)
@pytest.mark.parametrize("name", packings.FORMS)
def test_its_numbers_are_those_that_are_meant(tmp_path: Path, name: str) -> None:
    _, meant = packings.write(tmp_path, name)
    found = parameters(tmp_path)
    for layer in range(3):
        here = f"model.layers.{layer}"
        for parameter, parts in {
            "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            "out": ["self_attn.o_proj"],
            "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
            "down": ["mlp.down_proj"],
        }.items():
            own = found[f"layers.{layer}.{parameter}"]
            kept = packings.FORMS[name].blocks
            assert isinstance(own, tuple) == bool(kept)
            pieces = own if isinstance(own, tuple) else (own,)
            assert {part.kind for part in pieces if isinstance(part, Blocks)} <= {kept}
            values = [dequantize(part) if isinstance(part, Blocks) else part.numpy() for part in pieces]
            expected = torch.cat([meant[f"{here}.{part}.weight"] for part in parts]).numpy()
            np.testing.assert_allclose(np.concatenate(values), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", gate(sorted(packings.FORMS, key=EACH.__contains__, reverse=True), len(EACH)))
def test_its_text_is_that_of_transformers_with_these_numbers(tmp_path: Path, name: str) -> None:
    model, _ = packings.write(tmp_path, name, "qwen2" if "gptq" in name else "qwen3")
    requests = prompts()
    Driver(model.load(), rows=3, context=64).run(requests)
    for request in requests:
        assert request.output == model.choices(request.prompt, request.output)
        assert len(set(request.output)) > 3, "a text of one token would prove nothing"


OWN_SIZES = ("phi3-longrope", *VISION)
"""Families of `FAMILIES` whose options fit no other sizes, or whose tensors have other names in their checkpoint than in their model."""


@pytest.mark.parametrize("name", gate(EACH))
@pytest.mark.parametrize("family", gate(sorted(FAMILIES.keys() - OWN_SIZES, key="glm4".__ne__)))
def test_the_text_of_any_family_is_that_of_transformers_with_these_numbers(tmp_path: Path, family: str, name: str) -> None:
    """Of GLM-4 projections are fused, and rows come in another order."""
    model, _ = packings.write(tmp_path, name, family)
    requests = prompts()
    Driver(model.load(), rows=3, context=64).run(requests)
    for request in requests:
        assert request.output == model.choices(request.prompt, request.output)


@pytest.mark.parametrize("name", ["awq", "fp8 in blocks", "gptq, by activations", "gptq of 8 bits", "int8 by rows"])
def test_the_native_runner_serves_them_too(tmp_path: Path, name: str) -> None:
    """Blocks as they lie: it rounds activations that meet 4 bits, which changes a token now and then."""
    model, _ = packings.write(tmp_path, name)
    requests = prompts()
    Driver(model.load(runner="native"), rows=3, context=64).run(requests)
    same = [a == b for request in requests for a, b in zip(request.output, model.choices(request.prompt, request.output), strict=True)]
    assert all(same) if not packings.FORMS[name].blocks else sum(same) > 0.8 * len(same)


@pytest.mark.parametrize("name", ["awq", "packed", "packed, by activations", "packed of 8 bits", "fp8 in blocks", "int8 by rows"])
def test_a_summary_counts_the_numbers_of_the_model(tmp_path: Path, name: str) -> None:
    packings.write(tmp_path, name)
    found = inspect(tmp_path)
    assert found.parameters == registry.weights_of(registry.read(tmp_path)).elements()
    assert found.kv_bytes_per_token == 2 * 3 * 2 * 32 * 4, "in fp32, as its norms are"


def test_what_becomes_larger_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "banyan")
    packings.write(tmp_path / "awq", "awq")
    parameters(tmp_path / "awq")
    assert "21 in Q4_1" in caplog.text
    assert "larger" not in caplog.text
    caplog.clear()
    packings.write(tmp_path / "fp8", "fp8")
    parameters(tmp_path / "fp8")
    assert re.search("21 in F8_E4M3 .*larger.*--quantization w8a16", caplog.text)
    caplog.clear()
    blocks = parameters(tmp_path / "fp8", "w8a16")["layers.0.down"]
    assert "larger" not in caplog.text
    assert isinstance(blocks, tuple)
    assert isinstance(blocks[0], Blocks)
    with pytest.raises(ConfigError, match="--quantization=w8a16"):
        parameters(tmp_path / "awq", "w8a16")
    packings.write(tmp_path / "gptq", "gptq, by activations")
    assert isinstance(parameters(tmp_path / "gptq", "w8a16")["layers.0.down"], tuple)


def test_groups_that_are_in_order_in_spite_of_their_config_stay_blocks(tmp_path: Path) -> None:
    packings.write(tmp_path, "gptq")
    of = registry.read(tmp_path, json.dumps({"quantization_config": packings.FORMS["gptq, by activations"].config}))
    found = loader.load(tmp_path, registry.weights_of(of), torch.float32, torch.device("cpu"), lambda *_: None, None, of.packing)
    assert isinstance(found["layers.0.down"], tuple)


def test_an_older_name_of_the_config_is_read(tmp_path: Path) -> None:
    packings.write(tmp_path, "packed")
    own = json.loads((tmp_path / "config.json").read_text())
    own["compression_config"] = own.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(own))
    assert registry.read(tmp_path).packing == packing_of("packed")


def packing_of(name: str) -> Any:
    return packing(packings.FORMS[name].config, "config.json")


def test_a_quantized_checkpoint_without_a_config_is_told_so(tmp_path: Path) -> None:
    packings.write(tmp_path, "awq")
    own = json.loads((tmp_path / "config.json").read_text())
    del own["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(own))
    with pytest.raises(ModelError, match=r"config\.json .*quantization_config"):
        parameters(tmp_path)


def test_a_model_that_has_no_room_when_it_is_plain_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever computes on blocks serves it."""
    model, _ = packings.write(tmp_path, "awq")
    plain = 4 * registry.weights_of(registry.read(tmp_path)).elements()
    monkeypatch.setattr(device, "available_bytes", lambda _: plain - 1)
    monkeypatch.setattr(packed, "_grouped", lambda *_: pytest.fail("it is read"))
    with pytest.raises(ConfigError, match=r" \d+\.\d\d GB "):
        model.load()


@pytest.mark.parametrize("quantization", [None, "w8a16"])
def test_who_takes_tensors_alone_gets_one_after_the_other(
    tmp_path: Path, quantization: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """With the numbers of blocks, of which no more than one matrix's are in memory."""
    packings.write(tmp_path, "awq" if quantization is None else "fp8")
    of, made, most = registry.read(tmp_path), list[weakref.ref[Any]](), 0
    blocks_of = {name: parameter for name, parameter in parameters(tmp_path, quantization).items() if isinstance(parameter, tuple)}

    def seen(phase: str, percent: int, detail: str) -> None:
        nonlocal most
        most = max(most, sum(one() is not None for one in made))

    class Noted(Blocks):
        def __post_init__(self) -> None:
            made.append(weakref.ref(self.data))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(packed, "Blocks", Noted)
        found = loader.load(
            tmp_path, registry.weights_of(of), torch.float32, torch.device("cpu"), seen, quantization, of.packing, plain=True
        )
    assert most <= 1
    assert bool(made) == (quantization is None)
    assert "float32" in caplog.text
    for name, parts in blocks_of.items():
        own = found[name]
        assert isinstance(own, torch.Tensor)
        np.testing.assert_array_equal(own.numpy(), np.concatenate([dequantize(part) for part in parts if isinstance(part, Blocks)]))


def test_what_lies_on_the_device_needs_no_room_there_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packings.write(tmp_path, "awq")
    found = parameters(tmp_path)
    needed = sum(
        part.rows * part.columns * 4 for parts in found.values() if isinstance(parts, tuple) for part in parts if isinstance(part, Blocks)
    )
    monkeypatch.setattr(device, "available_bytes", lambda _: needed)
    assert loader.dequantized(found, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("group", [1 << 20, 128])
def test_groups_are_no_longer_than_rows(tmp_path: Path, group: int) -> None:
    """However long a config says that they are: memory goes by the matrix."""
    assert packing({"quant_method": "awq", "bits": 4, "group_size": group}, "config.json") == Grouped("awq", 4, group)
    packings.write(tmp_path, "packed rows")
    of = registry.read(tmp_path)
    tracemalloc.start()
    loader.load(
        tmp_path,
        registry.weights_of(of),
        torch.float32,
        torch.device("cpu"),
        lambda *_: None,
        None,
        Grouped("packed", 4, 1 << 20, symmetric=True),
    )
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def changed(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    stored = load_file(folder / "model.safetensors")
    stored.pop(name, None)
    save_file(stored if tensor is None else {**stored, name: tensor}, folder / "model.safetensors")


@pytest.mark.matrix(gate=4)
@pytest.mark.parametrize(
    ("form", "end", "tensor", "named"),
    [
        ("awq", "qzeros", None, r"up_proj\.qzeros"),
        ("awq", "scales", torch.ones(3, 256), r"up_proj\.scales.* F32 .*\[3, 256\].*\[2, 256\]"),
        ("awq", "scales", torch.full((2, 256), float("nan")), "scales .*float16"),
        ("awq", "scales", torch.full((2, 256), 9e4), "scales .*float16"),
        ("awq", "qweight", torch.zeros(128, 32), r"qweight.* F32 .*\[128, 32\].* I32"),
        ("awq", "qweight", torch.zeros(128, dtype=torch.int32), r"qweight.*\[128\]"),
        ("awq", "qweight", torch.zeros(64, 32, dtype=torch.int32), r"scales.* F16 .*\[2, 256\].*\[1, 256\]"),
        ("gptq", "g_idx", torch.arange(128, dtype=torch.int32), "g_idx.* 2 "),
        ("gptq", "g_idx", torch.arange(128, dtype=torch.int32) % 2, "g_idx.*quantization_config"),
        ("gptq", "g_idx", torch.arange(128, dtype=torch.int32) - 1, "g_idx"),
        ("packed, with zeros", "weight_zero_point", None, "weight_zero_point"),
        ("packed", "weight_zero_point", torch.ones(32, 2, dtype=torch.int32), "weight_zero_point"),
        ("int8 by rows", "weight_scale", torch.full((256, 1), float("inf")), "weight.*float16"),
        ("fp8", "weight_scale", None, "weight_scale"),
        ("fp8", "weight_scale", torch.ones(2), r"weight_scale.*\[2\].*\[\] or \[1\] or \[1, 1\] or \[256\] or \[256, 1\]"),
        ("fp8 in blocks", "weight_scale_inv", torch.ones(6, 1), r"weight_scale_inv.*\[6, 1\].*\[6, 2\]"),
        ("gptq", "bias", torch.ones(256), r"up_proj\.bias"),
        ("fp8", "bias", torch.ones(256).to(torch.float8_e4m3fn), r"up_proj\.bias"),
    ],
)
def test_a_matrix_whose_parts_do_not_fit_is_named(tmp_path: Path, form: str, end: str, tensor: torch.Tensor | None, named: str) -> None:
    packings.write(tmp_path, form)
    changed(tmp_path, f"model.layers.1.mlp.up_proj.{end}", tensor)
    with pytest.raises(ModelError, match=named):
        parameters(tmp_path)


WEIGHTS: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}


def compressed(**changes: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": WEIGHTS | changes}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def two(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """With another group of weights."""
    first = config["config_groups"]["group_0"]["weights"]
    return config | {"config_groups": config["config_groups"] | {"group_1": {"weights": first | changes}}}


def test_groups_that_differ_in_what_is_not_read_are_one(tmp_path: Path) -> None:
    one = compressed()
    assert packing(two(one, observer="mse", observer_kwargs={"a": 1}), "config.json") == packing(one, "config.json")
    rows = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": {"weights": EIGHT}}}
    assert packing(two(rows, strategy="channel"), "config.json") == packing(rows, "config.json") == Scaled("F8_E4M3")


EIGHT: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}


@pytest.mark.parametrize("config", [{}, {"kv_cache_scheme": {"num_bits": 8}}, {"sparsity_config": {"format": "dense"}}])
def test_a_model_of_which_only_the_cache_is_quantized_is_a_plain_one(tmp_path: Path, config: dict[str, Any]) -> None:
    make(tmp_path, "qwen3")
    own = json.loads((tmp_path / "config.json").read_text())
    own["quantization_config"] = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, **config}
    (tmp_path / "config.json").write_text(json.dumps(own))
    changed(tmp_path, "model.layers.1.self_attn.k_scale", torch.tensor(0.5))
    assert isinstance(parameters(tmp_path)["layers.0.down"], torch.Tensor)


def test_zeros_beside_a_symmetric_matrix_that_are_none_are_passed_over(tmp_path: Path) -> None:
    packings.write(tmp_path, "packed")
    changed(tmp_path, "model.layers.1.mlp.up_proj.weight_zero_point", torch.zeros(32, 2, dtype=torch.int32))
    assert isinstance(parameters(tmp_path)["layers.1.gate_up"], tuple)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (5, "quantization_config .*5"),
        ({"bits": 4}, "quant_method=None .*fp8, .*compressed-tensors"),
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes'"),
        ({"quant_method": "awq", "bits": 8}, "quantization_config.bits=8 .*4"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version='gemv'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 0}, "group_size .*0.* 1048576"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "128"}, "group_size .*'128'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": [1]}, r"desc_act=\[1\]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2' .*e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size .*\[128\]"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": None}}}, "config_groups"),
        (compressed(num_bits=3), "config_groups.weights.num_bits=3 .*4, 8"),
        (compressed(actorder="rows"), "actorder='rows'"),
        ({**compressed(symmetric=False), "format": "int-quantized"}, "symmetric=False"),
        ({**compressed(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format='sparse-24-bitmask'"),
        ({**compressed(), "transform_config": {"a": 1}}, "transform_config="),
        (two(compressed(), num_bits=8), "config_groups"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "quantization_config.bits=3 .*4, 8"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:lm_head": {}, "+:.*down.*": {"bits": 8}}},
            r"dynamic .*'\+:\.\*down\.\*'",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo='NVFP4' .*FP8"),
        ({**compressed(), "format": "marlin-24"}, "format='marlin-24' .*float-quantized"),
    ],
)
def test_what_is_not_supported_is_named_with_what_is(tmp_path: Path, config: Any, named: str) -> None:
    packings.write(tmp_path, "fp8")
    own = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(own | {"quantization_config": config}))
    with pytest.raises(ModelError, match=named):
        registry.read(tmp_path)


def test_a_summary_says_whether_a_model_can_be_served(tmp_path: Path, tiny_chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packings.write(tmp_path, "gptq")
    assert cli.main(["inspect", str(tmp_path)]) == 0
    assert "--skip-tokenizer-init" in capsys.readouterr().out
    shutil.copy(tiny_chat / "tokenizer.json", tmp_path)
    assert cli.main(["inspect", str(tmp_path)]) == 0
    assert "served        yes" in capsys.readouterr().out
    own = json.loads((tmp_path / "config.json").read_text())
    own["quantization_config"]["bits"] = 3
    own["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps(own))
    assert cli.main(["inspect", str(tmp_path)]) == 65
    assert "quantization_config.bits=3" in capsys.readouterr().out
    own["quantization_config"]["bits"] = 4
    (tmp_path / "config.json").write_text(json.dumps(own))
    assert cli.main(["inspect", "--json", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["refused"], found["context_length"]) == (None, registry.read(tmp_path).context_len)
    (tmp_path / "model.safetensors").unlink()
    assert cli.main(["inspect", "--json", str(tmp_path)]) == 65
    assert json.loads(capsys.readouterr().out)["refused"]
