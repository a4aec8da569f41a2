"""The native runner beside the torch runner, for every instruction set that this machine has: models of any shape, schedules of any
kind, and the same bits whatever else is computed."""

from __future__ import annotations

import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pytest
import torch

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError
from banyan_runtime.hub.resolve import cache_dir
from banyan_runtime.model import host, noise, runners, sampler
from banyan_runtime.model.native import build, forward, loading, variants
from banyan_runtime.model.native.forward import NativeForward
from banyan_runtime.model.native.library import Library
from banyan_runtime.model.runner import ModelRunner
from banyan_runtime.step import SamplingColumns, Step, TableShape

from .conftest import VOCAB, TinyModel, make
from .contract import Play, Settings, check
from .driver import Driver, Request

Models = Callable[[str], TinyModel]
HERE: Final = [variant.name for variant in variants.usable(host.instruction_sets())]
WIDEST: Final = variants.usable(host.instruction_sets())[0]
PAIRS: Final = variants.Variant("pairs", WIDEST.needs, (*WIDEST.options, "-DBANYAN_PAIRS"), WIDEST.machine)
"""As where processors multiply bfloat16: activations are rounded to it, before they meet weights in pairs."""
ROUNDING: Final = HERE if "avx512bf16" in HERE else [*HERE, PAIRS.name]
DTYPES: Final = ("float32", "bfloat16")


@pytest.fixture(params=HERE)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(variants.VARIABLE, request.param)
    return str(request.param)


@pytest.fixture(params=ROUNDING)
def variant_or_pairs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(variants, "VARIANTS", (PAIRS, *variants.VARIANTS))
    monkeypatch.setenv(variants.VARIABLE, request.param)
    return str(request.param)


def native(model: TinyModel, **options: Any) -> ModelRunner:
    runner = model.load(**({"runner": "native"} | options))
    assert isinstance(runner.forward, NativeForward)
    return runner


def some(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


class Listening:
    """Notes the hidden states that each step gives, by the request that its tokens belong to."""

    def __init__(self, runner: ModelRunner) -> None:
        self.states: dict[int, list[torch.Tensor]] = {}
        self._hidden = runner.forward.hidden
        runner.forward.hidden = self._listen  # type: ignore[method-assign]

    def _listen(self, step: Step, *rest: Any) -> torch.Tensor:
        hidden = self._hidden(step, *rest)
        for row, part in zip(step.rows.tolist(), torch.split(hidden, step.query_lens.tolist()), strict=True):
            self.states.setdefault(row, []).append(part.clone())
        return hidden

    def of(self, row: int) -> torch.Tensor:
        return torch.cat(self.states[row])


def states(runner: ModelRunner, requests: list[Request], chunk: int = 1 << 30, context: int = 256) -> Listening:
    heard = Listening(runner)
    Driver(runner, rows=8, context=context).run(requests, chunk)
    return heard


@pytest.mark.parametrize("seed", [2, 3])
def test_any_schedule_gives_the_texts_and_scores_of_a_plain_computation(variant: str, tiny_model: Models, seed: int) -> None:
    model = tiny_model("qwen3")
    play = Play(native(model, max_total_tokens=2048), Settings(seed))
    play.play()

    @torch.inference_mode()
    def logits(tokens: list[int]) -> torch.Tensor:
        found: torch.Tensor = model.reference(torch.tensor([tokens])).logits[0]
        return found

    assert len(play.done) > 5
    for request in play.done:
        check(request, logits)


SHAPES: Final[list[dict[str, Any]]] = [
    {"hidden_size": 60, "intermediate_size": 77, "num_attention_heads": 6, "num_key_value_heads": 6, "vocab_size": 97},
    {"hidden_size": 100, "intermediate_size": 33, "num_attention_heads": 10, "num_key_value_heads": 1, "vocab_size": 501},
    {"hidden_size": 72, "intermediate_size": 150, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 6, "vocab_size": 130},
    {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 80, "vocab_size": 64},
    {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": 17,
        "num_hidden_layers": 1,
    },
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.values())))
@pytest.mark.parametrize("tied", [True, False])
def test_any_shape_gives_the_logits_that_transformers_gives(variant: str, tmp_path: Path, shape: dict[str, Any], tied: bool) -> None:
    """Widths that no register divides, groups of any size, more rows than a tile holds."""
    model = make(tmp_path, "llama3-rope", **shape, tie_word_embeddings=tied)
    runner = native(model)
    for length in (1, 5, 13, 67, 150):
        tokens = [token % shape["vocab_size"] for token in some(length, length)]
        heard = states(runner, [Request(tokens, new_tokens=1, row=0)])
        with torch.inference_mode():
            wanted = model.reference(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(runner.forward.logits(heard.of(0)), wanted, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["qwen3-576", "mistral-window"])
def test_a_requests_bits_depend_neither_on_company_nor_on_chunks_nor_on_threads(
    variant_or_pairs: str, tiny_model: Models, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str
) -> None:
    model = tiny_model(family)

    def asked(row: int = 0) -> Request:
        return Request(some(5, 90), new_tokens=12, row=row)

    alone = states(native(model, dtype=dtype), [asked()]).of(0)
    for threads, chunk, others in ((1, 17, 0), (2, 1 << 30, 5), (3, 40, 7)):
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
        company = [Request(some(20 + i, 7 + 23 * i), new_tokens=12, row=i, start=i % 3) for i in range(others)]
        heard = states(native(model, dtype=dtype), [*company, asked(others)], chunk)
        assert torch.equal(heard.of(others), alone), (threads, chunk, others)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_context_has_the_same_bits_in_one_thread_and_shared_among_several(
    variant_or_pairs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """One head of keys: threads share the context, segment by segment."""
    model = make(tmp_path, "llama", num_key_value_heads=1, num_hidden_layers=2, max_position_embeddings=4096)
    tokens = some(9, 1700)
    found = []
    for threads, chunk in ((1, 1 << 30), (4, 1 << 30), (4, 1), (3, 333)):
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
        request = Request(tokens[:1690] if chunk == 1 else tokens, new_tokens=1, row=0)
        if chunk == 1:  # the last ones one by one
            runner = native(model, dtype=dtype)
            heard, driver = Listening(runner), Driver(runner, rows=1, context=2048)
            request.prompt = tokens
            driver.step([(request, 1690)])
            for _ in range(10):
                driver.step([(request, 1)])
        else:
            heard = states(native(model, dtype=dtype), [request], chunk, context=2048)
        found.append(heard.of(0))
    for other in found[1:]:
        assert torch.equal(found[0], other)
    with torch.inference_mode():
        wanted = model.reference(torch.tensor([tokens])).logits[0]
    off = native(model, dtype=dtype).forward.logits(found[0]) - wanted
    assert float(off.norm() / wanted.norm()) < {"float32": 1e-5, "bfloat16": 0.05}[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8])
@pytest.mark.parametrize("wide", [16, 48])
def test_a_query_has_the_same_bits_as_one_of_few_rows_and_of_many(
    variant_or_pairs: str, tmp_path: Path, dtype: str, group: int, wide: int
) -> None:
    """Heads that share keys, and queries that are computed together, in other numbers: keys are read where they lie, or copied."""
    shape = {"hidden_size": 16 * group, "num_attention_heads": group, "num_key_value_heads": 1, "head_dim": wide, "num_hidden_layers": 2}
    runner, prompt = native(make(tmp_path, "llama", **shape), dtype=dtype), some(9, 75)
    whole = states(runner, [Request(prompt, new_tokens=1, row=0)]).of(0)
    for chunk in (1, 2, 3):
        assert torch.equal(states(runner, [Request(prompt, new_tokens=1, row=0)], chunk).of(0), whole), chunk


def test_bfloat16_is_near_float32(variant_or_pairs: str, tiny_model: Models) -> None:
    model, tokens = tiny_model("qwen3-576"), some(4, 60)
    exact, rounded = (native(model, dtype=dtype) for dtype in DTYPES)
    one, other = (runner.forward.logits(states(runner, [Request(tokens, new_tokens=1, row=0)]).of(0)) for runner in (exact, rounded))
    assert 1e-5 < float((one - other).norm() / one.norm()) < 0.03


def test_who_is_likeliest_is_who_has_the_largest_logit(variant: str, tiny_model: Models) -> None:
    runner = native(tiny_model("qwen2"))
    runner.prepare(TableShape(rows=4, positions=64))
    hidden = torch.randn(300, 96, generator=torch.Generator().manual_seed(1))
    hidden[7, 3], hidden[290] = float("nan"), float("inf")
    tokens, failed = runner.forward.likeliest(hidden)
    logits = runner.forward.logits(hidden)
    assert failed.nonzero().flatten().tolist() == [7, 290]
    sound = ~failed
    assert torch.equal(tokens[sound], logits.argmax(1)[sound])
    assert torch.equal(runner.forward.likeliest(hidden[5:6])[0], tokens[5:6])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_broken_row_breaks_nobody_elses(variant_or_pairs: str, tmp_path: Path, dtype: str) -> None:
    model = make(tmp_path, "qwen3")
    with torch.no_grad():
        model.reference.model.embed_tokens.weight[VOCAB - 1] = float("nan")
    model.reference.save_pretrained(model.folder)
    runner = native(model, dtype=dtype)
    broken = Request([*some(1, 20), VOCAB - 1, *some(2, 20)], new_tokens=1, row=0)
    sound = Request([token % 400 for token in some(3, 30)], new_tokens=1, row=1)
    driver = Driver(runner, rows=2, context=64)
    heard = Listening(runner)
    driver.step([(broken, 41), (sound, 30)])
    assert (broken.failed, sound.failed) == (True, False)
    assert torch.isfinite(heard.of(0)[:20]).all(), "those before it do not see it"
    assert not torch.isfinite(heard.of(0)[20:]).any()
    assert torch.isfinite(heard.of(1)).all()


def test_memory_of_many_logits_is_kept_while_rounds_are_computed(tiny_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = native(tiny_model("qwen3"))
    assert isinstance(runner.forward, NativeForward)
    monkeypatch.setattr(forward, "_KEPT_LOGITS", 0)  # as if they were too many to be kept from step to step
    library, make_room = runner.forward._library, NativeForward._room_for_logits
    rooms: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def watched_room(self: NativeForward, rows: int) -> torch.Tensor:
        room = make_room(self, rows)
        rooms.append(weakref.ref(room))
        return room

    def watched_rounds(*arguments: Any) -> Any:
        alive.append(rooms[-1]() is not None)
        return rounds(*arguments)

    rounds = library.rounds
    monkeypatch.setattr(NativeForward, "_room_for_logits", watched_room)
    monkeypatch.setitem(library._functions, "rounds", watched_rounds)
    driver = Driver(runner, rows=1, context=64)
    request = Request([5, 6, 7], new_tokens=6, row=0, temperature=0.8, seed=1)
    driver.step([(request, 3)])
    step = driver.build([(request, 1)], 3)
    runner.launch(step).result()
    assert alive == [True]


def test_an_idle_runner_computes_nothing(tiny_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    runner = native(tiny_model("qwen3-576"))
    states(runner, [Request(some(1, 30), new_tokens=20, row=0)])
    time.sleep(0.05)
    before = psutil.Process().cpu_times()
    time.sleep(1)
    after = psutil.Process().cpu_times()
    assert after.user + after.system - before.user - before.system < 0.1


def test_whoever_watches_sees_a_long_step_go_on(tmp_path: Path) -> None:
    model = make(tmp_path, "llama", hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3)
    seen: list[float] = []
    config = ServerConfig(model_path=str(model.folder), device="cpu", dtype="float32", max_total_tokens=8192, runner="native")
    runner = runners.load(config, model.folder, lambda *_: None, lambda: seen.append(time.monotonic()))
    driver = Driver(runner, rows=1, context=8192)
    request = Request(some(1, 4000), new_tokens=1, row=0)
    seen.clear()
    began = time.monotonic()
    driver.step([(request, 4000)])
    took = time.monotonic() - began
    assert len(seen) > min(3, took / 0.1), f"{len(seen)} signs of life in {took:.1f} s"


def test_whoever_watches_sees_long_prompts_being_scored(tmp_path: Path) -> None:
    model = make(tmp_path, "llama", vocab_size=40_000)
    seen: list[float] = []
    config = ServerConfig(model_path=str(model.folder), device="cpu", dtype="float32", max_total_tokens=2048, runner="native")
    runner = runners.load(config, model.folder, lambda *_: None, lambda: seen.append(time.monotonic()))
    driver = Driver(runner, rows=1, context=1024)
    seen.clear()
    driver.step([(Request(some(1, 1000), new_tokens=1, row=0, top_logprobs=0, score_prompt=True), 1000)])
    assert len(seen) > 4  # a slice of a prompt has 208 positions here


def test_threads_that_cannot_be_had_are_no_end_of_the_process() -> None:
    """Each thread's stack takes 8 MB of addresses."""
    program = "import ctypes, resource\n"
    program += "from pathlib import Path\n"
    program += "from banyan_runtime.model.native import loading\n"
    program += "from banyan_runtime.model.native.library import PULSE, Spec\n"
    program += "library, pulse = loading.load(), PULSE(lambda: None)\n"
    program += (
        "about = Spec(vocabulary=64, hidden=16, inner=16, layers=1, heads=1, kv_heads=1, head_dim=16, tied=1, threads=200, eps=1e-6)\n"
    )
    program += "used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
    program += "resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20),) * 2)\n"
    program += "print(library.create(ctypes.byref(about), pulse))\n"
    program += "about.threads = 2\n"
    program += "print(bool(library.create(ctypes.byref(about), pulse)))\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["None", "True"], done.stderr


@pytest.mark.parametrize(("checkpoint", "chosen"), [("float32", None), ("float16", None), ("bfloat16", "bfloat16")])
def test_the_type_of_a_checkpoint_is_kept_or_widened(tmp_path: Path, checkpoint: str, chosen: str | None) -> None:
    model = make(tmp_path, "llama")
    model.reference.to(getattr(torch, checkpoint)).save_pretrained(model.folder)
    usual = model.load(runner="torch", dtype="auto").info.dtype
    assert model.load(runner="native", dtype="auto").info.dtype == (chosen or usual)


# --- the library ---


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
    with pytest.raises(ConfigError, match=r"BANYAN_NATIVE_VARIANT=avx1024 cannot run on this processor.*one of: .*portable"):
        variants.choose(frozenset({"avx2", "fma", "f16c"}))


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
    [
        ("echo 'library.cpp:1: no such thing' >&2; exit 3", "ended with 3: library.cpp:1: no such thing"),
        (None, "no C\\+\\+ compiler was found.*apt-get install g\\+\\+"),
    ],
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
    assert re.search(f"The native runner is not used: .*{words}", caplog.text)
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
    assert "cannot be loaded" in caplog.text
    assert re.search("The portable kernels are used.*avx2: .*ended with 9", caplog.text)


def test_a_compiler_of_several_words_that_makes_what_cannot_be_loaded_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, calls = tmp_path / "c++", tmp_path / "calls"
    compiler.write_text(f'#!/bin/sh\necho "$1" >>{calls}\nfor last; do :; done\necho nonsense >"$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"{compiler} --first")
    monkeypatch.setattr(build, "BUILT", tmp_path / "none")
    with pytest.raises(build.NotBuilt, match="cannot be loaded"):
        loading.load_from(list(variants.VARIANTS), tmp_path / "cache")
    assert calls.read_text().split() == ["--first"]


def test_a_library_beside_the_package_needs_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    portable = variants.VARIANTS[-1]
    sound = (build.there(portable, cache_dir() / "native") or [build.make(portable, cache_dir() / "native")])[0]
    monkeypatch.setattr(build, "BUILT", tmp_path)
    with pytest.raises(build.NotBuilt, match="no home folder"):
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
    assert re.search("The portable kernels are used.*amx: its kernels are refused AMX by the operating system", caplog.text)


def test_a_folder_that_cannot_be_written_is_no_error(tiny_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "native").write_text("a file where a folder should be")
    monkeypatch.setenv("BANYAN_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "BUILT", tmp_path / "none")
    assert not isinstance(tiny_model("llama").load(runner="auto").forward, NativeForward)


def test_an_attention_backend_of_torchs_means_the_torch_runner(tiny_model: Models) -> None:
    assert not isinstance(tiny_model("llama").load(runner="auto", attention_backend="torch_native").forward, NativeForward)
    with pytest.raises(ConfigError, match="--runner=native: --attention-backend=torch_native is the torch runner's"):
        tiny_model("llama").load(runner="native", attention_backend="torch_native")


# --- drawing ---


def settings(n: int, seed: int) -> SamplingColumns:
    random = np.random.default_rng(seed)

    def one_of(*values: float) -> np.ndarray:
        return random.choice(values, n).astype(np.float32)

    neutral = np.zeros(n, np.float32)
    return SamplingColumns(
        temperature=one_of(0, 1e-7, 0.05, 0.7, 1.0, 1.0, 2.5, 100),
        top_k=one_of(-1, -1, -1, 0, 1, 2, 20, 400, 1e6).astype(np.int32),
        top_p=one_of(1, 1, 1, 0, 1e-6, 0.3, 0.9, 0.999),
        min_p=one_of(0, 0, 0, 0.05, 0.5, 1),
        frequency_penalty=neutral,
        presence_penalty=neutral,
        repetition_penalty=neutral + 1,
        seed=random.integers(0, 1 << 64, n, dtype=np.uint64),
    )


@pytest.mark.parametrize("kind", ["flat", "peaked", "alike", "few", "wide"])
@pytest.mark.parametrize("vocabulary", [17, 503, 40_001])
def test_tokens_are_drawn_as_torch_draws_them(variant: str, tmp_path: Path, vocabulary: int, kind: str) -> None:
    """But where two have scores that are equal up to rounding."""
    model = make(tmp_path, "llama", vocab_size=vocabulary, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1)
    runner = native(model)
    rows, generator = 400, torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(rows, vocabulary, generator=generator)
    if kind == "peaked":
        logits *= 6
    elif kind == "alike":
        logits = logits.round()
    elif kind == "few":
        logits[torch.rand(logits.shape, generator=generator) > 3 / vocabulary] = -torch.inf
        logits[:, 3] = logits[:, 3].nan_to_num(neginf=0.0)
    elif kind == "wide":
        logits *= 1e30
    logits[5, vocabulary // 2], logits[6], logits[7, 0] = torch.nan, -torch.inf, torch.inf
    columns, positions = settings(rows, vocabulary), np.arange(rows, dtype=np.int32)
    wanted, wanted_failed = sampler.sample(logits.clone(), columns, positions)
    tokens, failed = runner.forward.sample(logits, columns, positions)
    assert torch.equal(failed, wanted_failed)
    assert failed.nonzero().flatten().tolist() == [5, 6, 7]
    different = ((tokens != wanted) & ~failed).nonzero().flatten().tolist()
    assert len(different) <= rows // 50
    for row in different:
        assert abs(drawn_for(logits[row], columns, row, int(tokens[row])) - drawn_for(logits[row], columns, row, int(wanted[row]))) < 1e-4


def test_later_positions_of_the_same_rows_are_drawn_for_anew(variant: str, tmp_path: Path) -> None:
    runner = native(make(tmp_path, "llama", hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1))
    columns, logits = settings(300, 1), torch.randn(300, VOCAB, generator=torch.Generator().manual_seed(1))
    drawn = []
    for first in (0, 1000, 0):
        positions = np.arange(first, first + 300, dtype=np.int32)
        drawn.append(runner.forward.sample(logits.clone(), columns, positions)[0])
        assert torch.equal(drawn[-1], runner.forward.sample(logits.clone(), replace(columns), positions)[0])
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


def drawn_for(logits: torch.Tensor, columns: SamplingColumns, row: int, token: int) -> float:
    """What a token is drawn for: its log probability and its noise."""
    bits = noise.hashes(columns.seed[row : row + 1], np.array([row], np.int32), torch.tensor([token]))
    scaled = torch.log_softmax((logits.double() - logits.max().double()) / max(float(columns.temperature[row]), 1e-30), -1)
    return float(scaled[token] + noise.gumbel(bits)[0, 0])
