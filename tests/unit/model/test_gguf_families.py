"""A file that llama.cpp's converter made of a checkpoint is the same model: same spec, same parameters, for each family."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from banyan_runtime.errors import ModelError
from banyan_runtime.hub import resolve
from banyan_runtime.hub.gguf import header
from banyan_runtime.hub.gguf.files import find
from banyan_runtime.hub.inspect import inspect
from banyan_runtime.models import registry
from banyan_runtime.models.config import DecoderSpec
from tests.support.models.llama_cpp import WITHOUT, converted
from tests.support.models.tiny import FAMILIES, TinyModel
from tests.unit.model.test_gguf import parameters, unfolded


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    return converted(tmp_path_factory.mktemp("models"))


def comparable(spec: DecoderSpec) -> DecoderSpec:
    """Without names, of which a file may have others, and with thetas as float32 has them."""
    layers = []
    for layer in spec.layers:
        if (rope := layer.attention.rope) is not None:
            rope = dataclasses.replace(rope, theta=float(f"{rope.theta:.6g}"))
        layers.append(dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, rope=rope)))
    context = 0 if spec.model_type == "hunyuan_v1_dense" else spec.context_len  # the converter writes another one
    return dataclasses.replace(spec, architecture="", model_type="", layers=tuple(layers), context_len=context)


def same(model: TinyModel, folder: Path) -> None:
    assert comparable(registry.read(folder)) == comparable(registry.read(model.folder))
    before, after = parameters(model.folder), parameters(folder)
    assert list(before) == list(after)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name  # type: ignore[arg-type]


def test_what_a_converter_changes_is_undone(tmp_path: Path) -> None:
    """Norms of Gemma, rows of rotated heads, and factors of rotary frequencies, which are tensors in the file."""
    for model in converted(tmp_path, ["gemma2", "llama3-rope", "phi3-longrope"]).values():
        same(model, unfolded(model.folder / "gguf" / "m.gguf"))


@pytest.mark.long
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in WITHOUT])
def test_the_model_is_that_of_the_checkpoint(models: dict[str, TinyModel], family: str) -> None:
    same(models[family], unfolded(models[family].folder / "gguf" / "m.gguf"))


def test_parts_of_a_file_are_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted(tmp_path, ["llama"], most_tensors=8)["llama"]
    folder = model.folder / "gguf"
    parts = sorted(folder.iterdir())
    assert [path.name for path in parts] == [f"m-0000{number}-of-00004.gguf" for number in (1, 2, 3, 4)]
    monkeypatch.setenv("BANYAN_CACHE", str(tmp_path / "cache"))
    for named in (folder, parts[0]):
        found = resolve(str(named), tokenizer=False)
        assert find(found) == found / parts[0].name
        same(model, found)
    assert inspect(found).files == 4
    with pytest.raises(ModelError, match=r"00002-of-00004\.gguf: .*first"):
        header.read(parts[1])
    parts[2].rename(folder / "elsewhere")
    with pytest.raises(ModelError, match=r"00001-of-00004\.gguf: .*4 parts, of which 3"):
        header.read(parts[0])
    parts[1].rename(parts[2])
    (folder / "elsewhere").rename(parts[1])
    with pytest.raises(ModelError, match=r"00002-of-00004\.gguf: .*not part 2"):
        header.read(parts[0])
