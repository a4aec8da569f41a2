"""The native runner beside the torch runner, for every instruction set that this machine has: models of any shape, schedules of any
kind, and the same bits whatever else is computed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pytest
import torch

from banyan_runtime.config import ServerConfig
from banyan_runtime.model import runners
from banyan_runtime.step import TableShape
from tests.support.models.contract import Play, Settings, check
from tests.support.models.driver import Driver, Request
from tests.support.models.natives import DTYPES, Listening, Models, native, some, states
from tests.support.models.tiny import MECHANISMS, VOCAB, gate, make


@pytest.mark.parametrize("seed", gate([2, 3]))
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


@pytest.mark.parametrize("shape", gate(SHAPES), ids=lambda shape: "-".join(map(str, shape.values())))
@pytest.mark.parametrize("tied", gate([True, False]))
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


@pytest.mark.parametrize("dtype", gate(DTYPES))
@pytest.mark.parametrize("family", gate(["qwen3-576", "gemma4-shared", "mistral-window", *MECHANISMS[:-2]], 2))
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


@pytest.mark.parametrize("dtype", gate(DTYPES))
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


@pytest.mark.parametrize("dtype", gate(DTYPES))
@pytest.mark.parametrize("group", gate([7, 1, 2, 4, 5, 8]))
@pytest.mark.parametrize("wide", gate([48, 16]))
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


@pytest.mark.parametrize("family", MECHANISMS)
def test_bfloat16_is_nearer_to_float32_than_torch_is(variant_or_pairs: str, tmp_path: Path, family: str) -> None:
    """Of the same weights. Activations stay float32, or are rounded before products only."""
    model, tokens = make(tmp_path, family), some(4, 120)
    model.reference.to(torch.bfloat16).save_pretrained(model.folder)

    def logits(runner: str, dtype: str) -> torch.Tensor:
        loaded = model.load(runner=runner, dtype=dtype)
        heard = states(loaded, [Request(tokens, new_tokens=1, row=0)])
        return loaded.forward.logits(heard.of(0)).clone()

    exact, torchs, ours = logits("torch", "float32"), logits("torch", "bfloat16"), logits("native", "bfloat16")
    noise = (torchs - exact).square().mean().sqrt()
    assert (ours - exact).square().mean().sqrt() < noise
    likeliest = exact.topk(2).values
    certain = likeliest[:, 0] - likeliest[:, 1] > 5 * noise
    assert certain.sum() > 10
    assert torch.equal(ours.argmax(1)[certain], exact.argmax(1)[certain])


def test_who_is_likeliest_is_who_has_the_largest_logit(variant: str, tiny_model: Models) -> None:
    runner = native(tiny_model("qwen2"))
    runner.prepare(TableShape(rows=4, positions=64))
    hidden = torch.randn(300, 96, generator=torch.Generator().manual_seed(1))
    hidden[7, 3], hidden[290] = float("nan"), float("inf")
    picked = runner.forward.pick(hidden, None, np.arange(300, dtype=np.int32))
    tokens, failed = picked.tokens, picked.failed
    logits = runner.forward.logits(hidden)
    assert failed.nonzero().flatten().tolist() == [7, 290]
    sound = ~failed
    assert torch.equal(tokens[sound], logits.argmax(1)[sound])
    assert torch.equal(runner.forward.pick(hidden[5:6], None, np.zeros(1, np.int32)).tokens, tokens[5:6])


@pytest.mark.parametrize("dtype", gate(DTYPES))
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


def test_an_idle_runner_computes_nothing(tiny_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    runner = native(tiny_model("qwen3-576"))
    states(runner, [Request(some(1, 30), new_tokens=20, row=0)])
    time.sleep(0.05)
    before = psutil.Process().cpu_times()
    time.sleep(1)
    after = psutil.Process().cpu_times()
    assert after.user + after.system - before.user - before.system < 0.1


@pytest.mark.long  # counts signs of life by the seconds that a step takes
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
    program += "about = Spec(vocabulary=64, hidden=16, tied=1, threads=200, eps=1e-6)\n"
    program += "used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
    program += "resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20),) * 2)\n"
    program += "print(library.create(ctypes.byref(about), None, pulse))\n"
    program += "about.threads = 2\n"
    program += "print(bool(library.create(ctypes.byref(about), None, pulse)))\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["None", "True"], done.stderr


@pytest.mark.parametrize(("checkpoint", "chosen"), [("float32", None), ("float16", None), ("bfloat16", "bfloat16")])
def test_the_type_of_a_checkpoint_is_kept_or_widened(tmp_path: Path, checkpoint: str, chosen: str | None) -> None:
    model = make(tmp_path, "llama")
    model.reference.to(getattr(torch, checkpoint)).save_pretrained(model.folder)
    usual = model.load(runner="torch", dtype="auto").info.dtype
    assert model.load(runner="native", dtype="auto").info.dtype == (chosen or usual)
