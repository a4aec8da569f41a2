"""A server on a GPU, asked by the real client."""

from __future__ import annotations

import pytest
import torch
from openai import OpenAI

from tests.support.server.process import MODEL, StartServer, start_server  # noqa: F401  a fixture

pytestmark = [pytest.mark.gpu, pytest.mark.long, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
PROMPTS = ["Once upon a time", "The capital of France is", "import numpy as np\n"]


def said(server_url: str) -> list[str]:
    client = OpenAI(base_url=server_url + "/v1", api_key="none")
    texts = []
    for prompt in PROMPTS:
        stream = client.completions.create(model=MODEL, prompt=prompt, max_tokens=60, temperature=0, stream=True)
        texts.append("".join(chunk.choices[0].text for chunk in stream))
    return texts


@pytest.mark.parametrize("backend", ["triton", "torch_native"])
def test_it_says_what_a_server_on_the_cpu_says(start_server: StartServer, backend: str) -> None:  # noqa: F811
    on_gpu = ("--device", "cuda", "--dtype", "float32", "--attention-backend", backend)
    there = start_server(*on_gpu, "--max-total-tokens", "65536").ready()  # else a tiny model would take most of the GPU
    here = start_server("--device", "cpu", "--dtype", "float32").ready()
    assert said(there.url) == said(here.url)
    assert there.get("/server_info").json()["attention_backend"] == backend
