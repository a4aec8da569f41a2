"""transformers' continuous batching, as a library that plays plans: `python -m peers.transformers_library FOLDER THREADS`."""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from peers.inprocess import serve


class Transformers:
    def __init__(self, folder: str, threads: str) -> None:
        torch.set_num_threads(int(threads))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        config = GenerationConfig(do_sample=False, eos_token_id=-1)  # no EOS ends anything
        self.about = "bf16, continuous batching; every case greedy"
        self._manager = model.init_continuous_batching(generation_config=config)
        self._manager.start()
        self._told: dict[int, int] = {}

    def add(self, number: int, prompt: tuple[int, ...], max_tokens: int, temperature: float) -> None:
        del temperature
        self._told[number] = 0
        self._manager.add_request(list(prompt), request_id=str(number), max_new_tokens=max_tokens, streaming=True)

    def step(self) -> list[tuple[int, int]]:
        output = self._manager.get_result(timeout=1.0)
        if output is None:
            if not self._manager.is_running():
                sys.exit("the manager's thread has ended")
            return []
        if output.error:
            sys.exit(output.error)
        number = int(output.request_id)
        new = len(output.generated_tokens) - self._told[number]
        self._told[number] += new
        return [(number, new)] if new else []


if __name__ == "__main__":
    serve(Transformers)
