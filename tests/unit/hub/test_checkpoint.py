"""The index and the headers of a checkpoint are read with bounds, and what is wrong in them is named."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from banyan_runtime.errors import ModelError
from banyan_runtime.front.text.tokenizer import Tokenizer
from banyan_runtime.hub import checkpoint
from banyan_runtime.hub.files import read_object

GOOD: dict[str, Any] = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def write(path: Path, header: bytes, data: bytes = b"\0" * 32) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def stored(tmp_path: Path, header: Any) -> Path:
    return write(tmp_path / "model.safetensors", json.dumps(header).encode())


def test_a_header_says_what_the_library_says(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": np.zeros((2, 5), np.float16), "none": np.zeros((0, 4), np.int8), "one": np.array(1.5)}, path, {"format": "np"})
    found = {tensor.name: tensor for tensor in checkpoint.header(path)}
    with safe_open(path, framework="numpy") as file:
        assert set(found) == set(file.keys())
        for name in file.keys():  # noqa: SIM118 - a safe_open is no dict
            piece = file.get_slice(name)
            assert (list(found[name].shape), found[name].dtype) == (piece.get_shape(), piece.get_dtype())
    assert {name: tensor.nbytes for name, tensor in found.items()} == {"x": 20, "none": 0, "one": 8}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b": {**GOOD["b"], "data_offsets": [-8, 0]}}, "[-8, 0]"),
        ({"b": {**GOOD["b"], "data_offsets": [32, 24]}}, "[32, 24]"),
        ({"b": {**GOOD["b"], "data_offsets": [16, 24]}}, "'b'"),
        ({"b": {**GOOD["b"], "data_offsets": [24, 2**70]}}, "'b'"),
        ({"b": {"dtype": "BF16", "shape": [40], "data_offsets": [24, 104]}}, "model.safetensors"),
        ({"b": {**GOOD["b"], "dtype": "F17"}}, "'F17'"),
        ({"b": {**GOOD["b"], "dtype": ["F32"]}}, "['F32']"),
        ({"b": {**GOOD["b"], "shape": [True, 4]}}, "[True, 4]"),
        ({"b": {**GOOD["b"], "shape": [1] * 9}}, "'b'"),
        ({"b": {**GOOD["b"], "shape": [5]}}, "[5]"),
        ({"b": {**GOOD["b"], "shape": [2**62, 2**62, 2**62]}}, "'b'"),
        ({"b": [1, 2]}, "[1, 2]"),
        ({"b": None}, "'b'"),
        ({"\ud800\n": 1}, r"'\ud800\n'"),
    ],
)
def test_a_wrong_entry_is_named_with_its_file(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=r"model\.safetensors") as error:
        checkpoint.header(stored(tmp_path, GOOD | changes))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        (1 << 63).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"\xff\xfe",
        (4).to_bytes(8, "little") + b"{}  junk",
        (15).to_bytes(8, "little") + b'{"a":{},"a":{}}',
        (5).to_bytes(8, "little") + b'{"a":',
        (5005).to_bytes(8, "little") + b'{"a":' + b"9" * 4999 + b"}",
    ],
    ids=["empty", "a byte", "endless", "a list", "no UTF-8", "bytes behind it", "a key twice", "half an object", "a long number"],
)
def test_a_file_that_is_no_safetensors_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        checkpoint.header(path)


def _entries(count: int) -> bytes:
    return b"{" + b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % number for number in range(count)) + b"}"


@pytest.mark.matrix(gate=2)
@pytest.mark.parametrize(
    "header",
    [
        pytest.param(_entries(900_000), id="entries beyond the header's bound"),
        pytest.param(_entries(130_000), id="entries within it"),
        pytest.param(b'{"a":' + b"[" * 2_000_000, id="nesting"),
        pytest.param(b'{"a":[' + b"{}," * 2_700_000 + b"0]}", id="empty objects"),
        pytest.param(b"{" + b",".join(b'"%d":1' % number for number in range(249_000)) + b"}", id="as many keys as are read"),
        pytest.param(('{"a":"😀' + "x" * 8_000_000 + '"}').encode(), id="one wide text"),
    ],
)
def test_an_absurd_header_costs_little(tmp_path: Path, header: bytes) -> None:
    path = write(tmp_path / "model.safetensors", header)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            checkpoint.header(path)
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


def test_a_real_header_of_the_largest_supported_model_is_read(tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.self_attn.part_{part}_proj.weight" for layer in range(1024) for part in range(14)]
    entry = {"dtype": "BF16", "shape": [131072, 131072, 0], "data_offsets": [0, 0]}
    path = write(tmp_path / "model.safetensors", json.dumps(dict.fromkeys(names, entry)).encode(), b"")
    assert len(checkpoint.header(path)) == len(names)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5) | st.sampled_from(["F32", "BF16", "F4"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), inner, max_size=4)
    ),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F4", "I64"]) | VALUES,
        "shape": st.lists(st.integers(0, 4), max_size=3) | VALUES,
        "data_offsets": st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted) | VALUES,
    }
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    header=st.dictionaries(st.sampled_from(["a", "b", "__metadata__", "é"]), ENTRY | VALUES, max_size=3).map(json.dumps).map(str.encode)
    | st.binary(max_size=60),
    data=st.binary(max_size=40),
)
@example(header=json.dumps(GOOD).encode(), data=b"\0" * 32)
def test_any_header_is_read_or_refused_and_what_is_read_the_library_reads_too(tmp_path: Path, header: bytes, data: bytes) -> None:
    path = write(tmp_path / "model.safetensors", header, data)
    found = outcome(path)
    if isinstance(found, ModelError):
        assert str(path) in str(found)
        assert "\n" not in str(found)
    else:
        assert sum(tensor.nbytes for tensor in found) == len(data)
        # The library wants metadata to be text, which nobody here reads.
        assert library_names(path) == {tensor.name for tensor in found} or b"__metadata__" in header


def outcome(path: Path) -> list[checkpoint.StoredTensor] | ModelError:
    try:
        return checkpoint.header(path)
    except ModelError as error:
        return error


def library_names(path: Path) -> set[str] | None:
    try:
        with safe_open(path, framework="numpy") as file:
            return set(file.keys())
    except SafetensorError:
        return None


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "a/../../x.safetensors",
        "/etc/x.safetensors",
        "x.bin",
        "",
        ".safetensors/..",
        "x\n.safetensors",
        "a\\x.safetensors",
        3,
        None,
    ],
)
def test_an_index_that_names_a_file_outside_the_folder_is_refused(tmp_path: Path, name: Any) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / checkpoint.INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json: weight_map\['lm_head\.weight'\]"):
        checkpoint.files(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "'weight_map'"),
        ('{"weight_map": ["x.safetensors"]}', "'weight_map'"),
        ('{"weight_map": {}}', "'weight_map'"),
        ("[]", ""),
        ('{"weight_map": {"a": "' + "x" * 300 + '.safetensors"}}', ""),
        (" " * ((32 << 20) + 1), "32 MiB"),
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / checkpoint.INDEX).write_text(content)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json") as error:
        checkpoint.files(tmp_path)
    assert message in str(error.value)


def test_a_snapshot_of_links_into_a_cache_is_read(tmp_path: Path) -> None:
    blob = stored(tmp_path, GOOD)
    snapshot = tmp_path / "snapshots" / "main"
    (snapshot / "shards").mkdir(parents=True)
    (snapshot / "shards" / "one.safetensors").symlink_to(os.path.relpath(blob, snapshot / "shards"))
    (snapshot / checkpoint.INDEX).write_text(json.dumps({"weight_map": {"a": "shards/one.safetensors", "b": "shards/one.safetensors"}}))
    (file,) = checkpoint.files(snapshot)
    assert [tensor.name for tensor in checkpoint.header(file)] == ["a", "b"]


def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    (file,) = checkpoint.files(tmp_path)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        checkpoint.header(file)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n"


def test_what_git_lfs_left_in_the_place_of_a_file_is_told(tiny_chat: Path, tmp_path: Path) -> None:
    for name, read in (("model.safetensors", checkpoint.header), ("config.json", read_object), ("tokenizer.json", Tokenizer.load)):
        folder = tmp_path / name
        shutil.copytree(tiny_chat, folder)
        (folder / name).unlink()
        (folder / name).write_bytes(POINTER)
        with pytest.raises(ModelError, match="git lfs pull"):
            read(folder if name == "tokenizer.json" else folder / name)
