"""A server whose device has no memory for a step, once and again."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from tests.support.server.process import MODEL, ServerProcess

PATCH = """
    import os, sys
    if "banyan_runtime.server.engine_process" in sys.orig_argv:
        import torch
        from banyan_runtime.model.runner import ModelRunner
        compute = ModelRunner._launched
        def out_of_memory(self, step, rows, replay):
            path = os.environ["OUT_OF_MEMORY"]
            if os.path.exists(path) and step.mode == "prefill":
                os.unlink(path)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return compute(self, step, rows, replay)
        ModelRunner._launched = out_of_memory
"""


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """While this is there, the next step with prompts finds no memory."""
    return tmp_path / "short"


@pytest.fixture
def server(start_server: Callable[..., ServerProcess], short: Path) -> ServerProcess:
    """A server of its own, whose memory ends; its steps take whole prompts, from the first on."""
    return start_server("--prefill-step-seconds", "0", environment=patched(short)).ready()


def patched(short: Path) -> dict[str, str]:
    patch = short.parent / "sitecustomize.py"
    patch.write_text(textwrap.dedent(PATCH))
    path = os.pathsep.join(filter(None, [str(patch.parent), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, "OUT_OF_MEMORY": str(short)}


@pytest.mark.long
def test_one_step_fails_with_503_and_a_second_ends_the_server(server: ServerProcess, short: Path) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    with server.slowed():
        running = client.completions.create(model=MODEL, prompt="a", max_tokens=60, stream=True, extra_body={"ignore_eos": True})
        next(running)
        short.touch()
        with pytest.raises(openai.InternalServerError) as failed:
            client.completions.create(model=MODEL, prompt="The quick brown fox", max_tokens=5)
    assert failed.value.status_code == 503
    assert failed.value.code == "out_of_memory"
    assert failed.value.response.headers["Retry-After"] == "60", "the step is too small to be made smaller"
    assert [chunk.choices[0].finish_reason for chunk in running][-1] == "length"
    assert client.completions.create(model=MODEL, prompt="The quick brown fox", max_tokens=5).usage
    server.eventually(lambda: server.metric("banyan_out_of_memory_steps_total") == 1, "the count")
    assert server.status("/readyz") == 200
    (line,) = [line for line in server.lines if line.endswith("CUDA out of memory. Tried to allocate 2.00 GiB.")]
    assert "prefill" in line

    short.touch()
    with pytest.raises(openai.InternalServerError) as again:
        client.completions.create(model=MODEL, prompt="The quick brown fox jumps", max_tokens=5)
    assert (again.value.status_code, again.value.code) == (503, "out_of_memory")
    assert server.process.wait(60) == 70
    last = server.termination_log.read_text()
    assert "CUDA out of memory" in last
    assert "--chunked-prefill-size" in last
    assert "Traceback" not in server.log


@pytest.mark.long
def test_a_long_prompt_that_is_sent_again_by_the_client_is_computed_in_smaller_steps(server: ServerProcess, short: Path) -> None:
    short.touch()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60)
    assert client.completions.create(model=MODEL, prompt="The quick brown fox " * 100, max_tokens=5).usage
    assert server.metric("banyan_out_of_memory_steps_total") == 1
    assert any("chunked_prefill_size: " in line for line in server.lines if "Out of memory" in line)


@pytest.mark.long
def test_a_shortage_in_the_warm_up_says_what_it_is(start_server: Callable[..., ServerProcess], short: Path) -> None:
    short.touch()
    server = start_server(environment=patched(short))
    assert server.process.wait(60) == 70
    last = server.termination_log.read_text()
    assert "--mem-fraction-static" in last
