"""A damaged or hostile GGUF file is refused before it costs memory, and leaves no folder."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from banyan_runtime.errors import ModelError
from banyan_runtime.hub.gguf import conversion, header
from tests.unit.hub.test_fetch import write_gguf

UINT8, STRING, ARRAY = 0, 8, 9


def head(tensors: int, keys: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys)


def key(name: bytes, kind: int) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind)


def tensor(name: bytes, offset: int) -> bytes:
    """A tensor of 1,024 float32 in the file's data."""
    return struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 1024, 0, offset)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "no GGUF", id="empty"),
        pytest.param(b"GGUF", "byte 4", id="only its first word"),
        pytest.param(b"no GGUF file at all", "no GGUF", id="another format"),
        pytest.param(b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1;", id="old"),
        pytest.param(b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian", id="big-endian"),
        pytest.param(
            head(0, 1) + key(b"a", ARRAY) + struct.pack("<IQ", UINT8, 1 << 60),
            "'a'",
            id="endless array",
        ),
        pytest.param(
            head(0, 1) + key(b"a", ARRAY) + struct.pack("<IQQ", STRING, 3, 100) + bytes(30),
            "'a'",
            id="endless texts",
        ),
        pytest.param(head(0, 1) + key(b"a", STRING) + struct.pack("<Q", 1 << 62), "'a'", id="endless text"),
        pytest.param(head(0, 1) + key(b"a", STRING) + struct.pack("<Q", 2) + b"\xff\xfe", "'a'", id="no text"),
        pytest.param(head(0, 1) + key(b"a", 77), "'a'", id="unknown type"),
        pytest.param(head(0, 1) + key(b"a", ARRAY) + struct.pack("<IQ", ARRAY, 1), "type 9", id="list of lists"),
        pytest.param(head(0, 2) + 2 * (key(b"a", UINT8) + b"x"), "'a'", id="key twice"),
        pytest.param(head(0, 1 << 60), "1152921504606846976", id="endless keys"),
        pytest.param(head(1 << 40, 0), "1099511627776", id="endless tensors"),
        pytest.param(head(2, 0) + tensor(b"a", 0) + tensor(b"a", 4096) + bytes(9000), "'a'", id="tensor twice"),
        pytest.param(head(1, 0) + tensor(b"a", 0) + bytes(64), "121 bytes", id="truncated"),
        pytest.param(head(1, 0) + tensor(b"a", 1) + bytes(9000), "byte 65", id="not aligned"),
        pytest.param(head(50, 0) + b"".join(tensor(b"t%02d" % number, 0) for number in range(50)) + bytes(8192), "'t00'", id="shared"),
    ],
)
def test_a_file_that_asks_for_more_than_it_holds_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    source = tmp_path / "bad.gguf"
    source.write_bytes(content)
    with pytest.raises(ModelError, match=r"bad\.gguf") as error:
        conversion.convert(source, tmp_path / "model")
    assert message in str(error.value)
    assert not (tmp_path / "model").exists()


def test_a_header_of_too_many_values_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "_MOST_NUMBERS", 10_000)
    monkeypatch.setattr(header, "_MOST_STRINGS", 1_000)
    source = tmp_path / "bad.gguf"
    for kind, count in ((UINT8, 20_000), (STRING, 2_000)):
        source.write_bytes(head(0, 1) + key(b"a", ARRAY) + struct.pack("<IQ", kind, count) + bytes(20_000))
        with pytest.raises(ModelError, match=rf"bad\.gguf: key 'a': {count}"):
            conversion.convert(source, tmp_path / "model")


def test_a_folder_that_exists_is_left_as_it_is(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("kept")
    with pytest.raises(FileExistsError):
        conversion.convert(tmp_path / "tiny.gguf", tmp_path / "model")
    assert (tmp_path / "model" / "mine").read_text() == "kept"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path.read_bytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_damage_to_the_header_is_a_model_error_or_does_no_harm(
    whole: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    content = bytearray(whole[: data.draw(st.sampled_from([len(whole), len(whole) // 2, 3000]))])
    for _ in range(3):
        content[data.draw(st.integers(0, min(len(content), 12_000) - 1))] = data.draw(st.integers(0, 255))
    (folder / "x.gguf").write_bytes(content)
    error = outcome(lambda: conversion.convert(folder / "x.gguf", folder / "model"))
    assert (error is None) == (folder / "model" / "config.json").exists()
    assert (error is None) == (folder / "model").exists()


def outcome(run: Callable[[], None]) -> ModelError | None:
    try:
        run()
    except ModelError as error:
        return error
    return None
