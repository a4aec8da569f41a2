"""A damaged or hostile GGUF file is refused before it costs memory, and leaves no folder."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from banyan_runtime.errors import ModelError
from banyan_runtime.hub import gguf

from .test_fetch import write_gguf

UINT8, ARRAY = 0, 9


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
        pytest.param(b"", "", id="empty"),
        pytest.param(b"no GGUF file at all", "magic", id="another format"),
        pytest.param(head(0, 1) + key(b"a", ARRAY) + struct.pack("<IQ", UINT8, 1 << 60), "the file ends where", id="endless array"),
        pytest.param(head(0, 1 << 60), "the file ends where", id="endless keys"),
        pytest.param(
            head(50, 0) + b"".join(tensor(b"t%02d" % number, 0) for number in range(50)) + bytes(8192),
            "tensors have 204800 bytes",
            id="shared",
        ),
    ],
)
def test_a_file_that_asks_for_more_than_it_holds_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    source = tmp_path / "bad.gguf"
    source.write_bytes(content)
    with pytest.raises(ModelError, match=r"bad\.gguf") as error:
        gguf.convert(source, tmp_path / "model")
    assert message in str(error.value)
    assert not (tmp_path / "model").exists()


def test_a_header_of_too_many_values_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "_MOST_PIECES", 10_000)
    source = tmp_path / "bad.gguf"
    source.write_bytes(head(0, 1) + key(b"a", ARRAY) + struct.pack("<IQ", UINT8, 20_000) + bytes(20_000))
    with pytest.raises(ModelError, match=r"bad\.gguf: .*more than 10000 values in its header"):
        gguf.convert(source, tmp_path / "model")


def test_a_folder_that_exists_is_left_as_it_is(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("kept")
    with pytest.raises(FileExistsError):
        gguf.convert(tmp_path / "tiny.gguf", tmp_path / "model")
    assert (tmp_path / "model" / "mine").read_text() == "kept"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path.read_bytes()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_damage_to_the_header_is_a_model_error_or_does_no_harm(
    whole: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    content = bytearray(whole[: data.draw(st.sampled_from([len(whole), len(whole) // 2, 3000]))])
    for _ in range(3):
        content[data.draw(st.integers(0, min(len(content), 12_000) - 1))] = data.draw(st.integers(0, 255))
    (folder / "x.gguf").write_bytes(content)
    error = outcome(lambda: gguf.convert(folder / "x.gguf", folder / "model"))
    assert (error is None) == (folder / "model" / "config.json").exists()
    assert (error is None) == (folder / "model").exists()


def outcome(run: Callable[[], None]) -> ModelError | None:
    try:
        run()
    except ModelError as error:
        return error
    return None
