"""What is wrong with a checkpoint is said with file and tensor; what is right arrives where it belongs."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from banyan_runtime.errors import ConfigError, ModelError
from banyan_runtime.hub.inspect import inspect
from banyan_runtime.model import host, loader
from banyan_runtime.models import registry
from tests.support.models.tiny import TinyModel, make

UP = "model.layers.1.mlp.up_proj.weight"
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make(tmp_path, "qwen2", tie_word_embeddings=False)
    return tmp_path


def load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return loader.load(folder, registry.weights_of(registry.read(folder)), dtype, CPU, lambda *_: None)


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder: Path) -> dict[str, str]:
    """Split the checkpoint in two files with an index, as large models are."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return places


def test_every_tensor_arrives_in_its_rows(folder: Path) -> None:
    tensors, parameters = load_file(folder / "model.safetensors"), load(folder)
    attention = "model.layers.2.self_attn"
    assert torch.equal(parameters["layers.2.qkv"], torch.cat([tensors[f"{attention}.{part}_proj.weight"] for part in "qkv"]))
    assert torch.equal(parameters["layers.2.qkv_bias"], torch.cat([tensors[f"{attention}.{part}_proj.bias"] for part in "qkv"]))
    mlp = [tensors[f"model.layers.2.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(parameters["layers.2.gate_up"], torch.cat(mlp))
    assert torch.equal(parameters["head"], tensors["lm_head.weight"])
    assert sum(p.numel() for p in parameters.values()) == sum(t.numel() for t in tensors.values())


def test_a_sharded_checkpoint_gives_the_same_parameters(folder: Path) -> None:
    whole = load(folder, torch.bfloat16)
    shard(folder)
    (folder / "consolidated.safetensors").write_bytes(b"stray file of another layout, not in the index")
    sharded = load(folder, torch.bfloat16)
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)
    assert sharded["embed"].dtype == torch.bfloat16


@pytest.mark.parametrize("own", [1, 2])
def test_of_a_tensor_in_two_shards_the_one_counts_that_the_index_names(folder: Path, own: int) -> None:
    whole, places = load(folder), shard(folder)
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    kept = load_file(folder / files[own - 1])
    other = load_file(folder / files[2 - own])
    save_file({**other, **{name: tensor + 1 for name, tensor in kept.items()}}, folder / files[2 - own])
    found = load(folder)
    assert all(torch.equal(whole[name], found[name]) for name in whole)
    summary = inspect(folder)
    assert summary.parameters == sum(p.numel() for p in whole.values())
    del places[next(name for name in places if places[name] == files[own - 1])]
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ModelError, match=files[1]):  # of two copies that it says nothing of
        load(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.pop(UP))
    with pytest.raises(ModelError, match=UP):
        load(folder)


def test_of_many_missing_tensors_ten_are_named(folder: Path) -> None:
    edit(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers." in name])
    with pytest.raises(ModelError, match=r"^.*: 36 .*'model.layers.0.* 26 "):
        load(folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({UP: torch.zeros(175, 96)}))
    with pytest.raises(ModelError, match=rf"model.safetensors: .*{UP}.*\[175, 96\].*\[176, 96\]"):
        load(folder)


def test_a_surplus_tensor_is_named_but_rotary_tables_are_not(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load(folder)
    edit(folder, lambda tensors: tensors.update({"model.layers.3.mlp.up_proj.weight": torch.zeros(176, 96)}))
    with pytest.raises(ModelError, match=r"model.layers.3.mlp.up_proj.weight"):
        load(folder)


def test_a_tied_model_may_carry_its_head_and_an_untied_one_must(tmp_path: Path, folder: Path) -> None:
    tied = tmp_path / "tied"
    make(tied, "qwen2")
    embed = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    edit(tied, lambda tensors: tensors.update({"lm_head.weight": embed.clone()}))
    assert "head" not in load(tied)
    edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"lm_head.weight"):
        load(folder)


def test_a_tied_model_whose_head_is_another_matrix_says_which_one_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tied = make(tmp_path / "tied", "llama").folder
    embed = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    for head, told in ((embed.clone(), 0), (embed + 1, 1), (embed.bfloat16(), 1), (embed[1:].clone(), 1)):
        edit(tied, lambda tensors, head=head: tensors.update({"lm_head.weight": head}))
        caplog.clear()
        assert torch.equal(load(tied)["embed"], embed)
        warnings = [message for message in caplog.messages if "lm_head.weight" in message]
        assert len(warnings) == told
        assert all("model.safetensors: " in message and '{"tie_word_embeddings": false}' in message for message in warnings)


def test_a_truncated_file_is_named_with_the_tensor_it_ends_in(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model.safetensors: .*tensor '\S+' .*\d+"):
        load(folder)
    path.write_bytes(path.read_bytes()[:5])
    with pytest.raises(ModelError, match=r"model.safetensors: "):
        load(folder)


def test_a_shard_that_the_index_names_must_be_there(folder: Path) -> None:
    places = shard(folder)
    (folder / places[UP]).unlink()
    with pytest.raises(ModelError, match=rf"{places[UP]} .*model.safetensors.index.json"):
        load(folder)


def test_an_integer_tensor_is_refused(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({UP: torch.zeros(176, 96, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=rf"{UP}.* I8.*BF16"):
        load(folder)


def test_a_folder_without_weights_says_what_is_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=str(folder)):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelError, match=r"\*.safetensors and \*.gguf"):
        load(folder)


def test_progress_is_told_to_the_caller_and_to_the_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[tuple[str, int, str]] = []
    with caplog.at_level(logging.INFO, "banyan"):
        loader.load(folder, registry.weights_of(registry.read(folder)), torch.float32, CPU, lambda *news: told.append(news))
    percents = [percent for _, percent, _ in told]
    assert percents == sorted(set(percents))
    assert told[-1] == ("loading", 100, "model.safetensors")
    assert "Loading safetensors: 100% (39 of 39 tensors)" in caplog.messages


def test_dummy_weights_depend_on_size_and_type_only(tiny_model: Callable[[str], TinyModel]) -> None:
    small = registry.weights_of(registry.read(tiny_model("llama").folder))
    weights = loader.dummy(small, torch.float32, CPU, lambda *_: None)
    assert weights.keys() == small.parameters.keys()
    assert torch.equal(weights["layers.0.qkv"], weights["layers.2.qkv"])
    assert 0.9e-3 < weights["embed"].abs().max().item() <= 1e-3
    assert weights["embed"].std().item() == pytest.approx(2e-3 / 12**0.5, rel=0.05)


def test_weights_that_do_not_fit_are_refused_before_they_are_allocated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = registry.weights_of(registry.read(folder))
    monkeypatch.setattr(host, "memory_available", lambda: small.elements() * 4 - 1)
    for start in (lambda: load(folder), lambda: loader.dummy(small, torch.float32, CPU, lambda *_: None)):
        with pytest.raises(ConfigError, match=r" 0\.00 GB .*float32.* cpu"):
            start()
    assert load(folder, torch.bfloat16)


def test_an_index_that_leads_out_of_the_folder_is_refused(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside") / "model.safetensors"
    (folder / "model.safetensors").rename(outside)
    places = dict.fromkeys(registry.weights_of(registry.read(folder)).slices, os.path.relpath(outside, folder))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ModelError, match=r"index\.json: weight_map\['model.embed_tokens.weight'\] .*'\.\./"):
        load(folder)
