"""The library of the native runner: which instruction sets it is compiled for, how it is made, found and passed over."""

from __future__ import annotations

import os
import platform
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from banyan_runtime.errors import ConfigError
from banyan_runtime.hub.resolve import cache_dir
from banyan_runtime.model.native import build, loading, variants
from banyan_runtime.model.native.forward import NativeForward
from banyan_runtime.model.native.library import Library
from tests.support.models.natives import Models


def test_what_a_processor_lacks_is_not_chosen() -> None:
    assert [variant.name for variant in variants.usable(frozenset())] == ["portable"]
    assert variants.usable(frozenset({"avx2", "fma"}))[0].name == "portable", "f16c is missing"


def test_the_processors_widest_instructions_are_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    flags = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"}
    found = []
    for more in ("", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"):
        flags.add(more)
        found.append([variant.name for variant in variants.usable(frozenset(flags))])
    slower = ["avx512", "avx2", "portable"]
    assert found == [slower, slower, *[["avx512bf16", *slower]] * 2, ["amx", "avx512bf16", *slower]]


def test_a_variant_that_cannot_run_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variants.VARIABLE, "avx1024")
    with pytest.raises(ConfigError, match="portable") as refused:
        variants.choose(frozenset({"avx2", "fma", "f16c"}))
    assert (refused.value.field, refused.value.value) == (variants.VARIABLE, "avx1024")


def test_a_package_has_every_variant_that_the_compiler_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-mamx-bf16*) echo what is -mamx-bf16 >&2; exit 1;; esac\nfor last; do :; done\necho made >"$last"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    made = build.build_all(tmp_path / "lib")
    known = [variant.name for variant in variants.VARIANTS if variant.machine in (None, platform.machine()) and variant.name != "amx"]
    assert [path.name.split("-")[2] for path in made] == known
    assert all(path.read_text() == "made\n" for path in made)
    if platform.machine() == "x86_64":
        assert "what is -mamx-bf16" in capsys.readouterr().err


def test_every_variant_compiles() -> None:
    """Those that this machine cannot run, too. Where the environment was installed with a compiler, they are there."""
    for variant in variants.VARIANTS:
        if variant.machine in (None, os.uname().machine):
            there = build.there(variant, cache_dir() / "native") or [build.make(variant, cache_dir() / "native")]
            assert there[0].stat().st_size > 10_000


@pytest.mark.long
def test_a_library_is_made_once_and_whole_even_by_several_at_once(tmp_path: Path) -> None:
    """The compiler is one that takes its time and notes that it was called."""
    compiler, calls = tmp_path / "slow", tmp_path / "calls"
    compiler.write_text(f'#!/bin/sh\necho x >>{calls}\nfor last; do :; done\nprintf half >"$last"; sleep 1; printf whole >"$last"\n')
    compiler.chmod(0o755)
    program = "import sys; from pathlib import Path; from banyan_runtime.model.native import build, forward, loading, variants\n"
    program += "print(build.make(variants.VARIANTS[-1], Path(sys.argv[1])))"
    command = [sys.executable, "-c", program, str(tmp_path / "cache")]
    environment = os.environ | {"CXX": str(compiler)}
    starts = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(3)]
    seen = set()
    while any(process.poll() is None for process in starts):
        seen |= {path.read_text() for path in (tmp_path / "cache").glob("banyan-*.so")}
    said = {process.communicate(timeout=60)[0].strip() for process in starts}
    assert [str(path) for path in (tmp_path / "cache").iterdir()] == list(said), "one file, and nothing beside it"
    assert seen <= {"whole"}
    assert Path(said.pop()) in build.there(variants.VARIANTS[-1], tmp_path / "cache")


@pytest.mark.parametrize(
    ("script", "words"),
    [("echo 'library.cpp:1: no such thing' >&2; exit 3", " 3: library.cpp:1: no such thing"), (None, "g\\+\\+")],
)
def test_without_a_library_torch_computes_and_says_why(
    tiny_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, script: str | None, words: str
) -> None:
    monkeypatch.setenv("BANYAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "BUILT", tmp_path / "none")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if script is not None:
        fake = tmp_path / "c++"
        fake.write_text(f"#!{shutil.which('sh', path='/bin')}\n{script}\n")
        fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    with caplog.at_level("WARNING", "banyan"):
        runner = tiny_model("llama").load(runner="auto")
    assert not isinstance(runner.forward, NativeForward)
    assert runner.info.attention_backend == "torch_native"
    assert re.search(words, caplog.text)
    with pytest.raises(ConfigError, match=f"--runner=native: .*{words}"):
        tiny_model("llama").load(runner="native")


def test_what_cannot_be_loaded_is_compiled_anew_and_what_cannot_be_compiled_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    portable = variants.VARIANTS[-1]
    sound = (build.there(portable, cache_dir() / "native") or [build.make(portable, cache_dir() / "native")])[0]
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-mavx*) exit 9;; esac\nfor last; do :; done\ncp {sound} "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "BUILT", tmp_path / "built")
    (tmp_path / "built").mkdir()
    (tmp_path / "built" / sound.name).write_bytes(b"of another machine")
    with caplog.at_level("WARNING", "banyan"):
        library = loading.load_from(list(variants.VARIANTS), tmp_path / "cache")
    assert library.lanes() == 4
    assert str(tmp_path / "built" / sound.name) in caplog.text
    assert re.search("portable.*avx2: .* 9", caplog.text)


def test_a_compiler_of_several_words_that_makes_what_cannot_be_loaded_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, calls = tmp_path / "c++", tmp_path / "calls"
    compiler.write_text(f'#!/bin/sh\necho "$1" >>{calls}\nfor last; do :; done\necho nonsense >"$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"{compiler} --first")
    monkeypatch.setattr(build, "BUILT", tmp_path / "none")
    with pytest.raises(build.NotBuilt):
        loading.load_from(list(variants.VARIANTS), tmp_path / "cache")
    assert calls.read_text().split() == ["--first"]


def test_a_library_beside_the_package_needs_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    portable = variants.VARIANTS[-1]
    sound = (build.there(portable, cache_dir() / "native") or [build.make(portable, cache_dir() / "native")])[0]
    monkeypatch.setattr(build, "BUILT", tmp_path)
    with pytest.raises(build.NotBuilt):
        loading.load_from([portable], None)
    (tmp_path / sound.name).symlink_to(sound)
    assert loading.load_from([portable], None).lanes() == 4

    def is_file(path: Path) -> bool:
        if path.parent != tmp_path:
            raise PermissionError(path)
        return True

    monkeypatch.setattr(Path, "is_file", is_file)  # the cache lies in a folder of somebody else's
    assert build.there(portable, tmp_path / "denied") == [tmp_path / sound.name]


def test_instructions_that_the_operating_system_refuses_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As Linux does with AMX, where it is told to, or is older than the processor."""

    class Refused(Library):
        def __getattr__(self, name: str) -> Callable[..., Any]:
            return (lambda: b"are refused AMX by the operating system") if name == "check" else super().__getattr__(name)

    tried: list[Path] = []

    def library(path: Path) -> Library:
        tried.append(path)
        return (Refused if len(tried) == 1 else Library)(path)

    monkeypatch.setattr(loading, "Library", library)
    portable = variants.VARIANTS[-1]
    sound = build.there(portable, cache_dir() / "native") or [build.make(portable, cache_dir() / "native")]
    monkeypatch.setattr(build, "there", lambda *_: sound)  # stands for both
    with caplog.at_level("WARNING", "banyan"):
        assert loading.load_from([variants.VARIANTS[0], portable], cache_dir() / "native").lanes() == 4
    assert re.search("portable.*amx: .*refused AMX", caplog.text)


def test_a_folder_that_cannot_be_written_is_no_error(tiny_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "native").write_text("a file where a folder should be")
    monkeypatch.setenv("BANYAN_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "BUILT", tmp_path / "none")
    assert not isinstance(tiny_model("llama").load(runner="auto").forward, NativeForward)


def test_an_attention_backend_of_torchs_means_the_torch_runner(tiny_model: Models) -> None:
    assert not isinstance(tiny_model("llama").load(runner="auto", attention_backend="torch_native").forward, NativeForward)
    with pytest.raises(ConfigError, match="--runner=native: --attention-backend=torch_native"):
        tiny_model("llama").load(runner="native", attention_backend="torch_native")
