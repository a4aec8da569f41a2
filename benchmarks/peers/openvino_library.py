"""OpenVINO GenAI's continuous batching, as a library that plays plans: `python -m peers.openvino_library GGUF THREADS STREAMS CACHE_GB`."""

from __future__ import annotations

import numpy as np
import openvino
import openvino_genai

from peers.inprocess import serve


class OpenVino:
    def __init__(self, gguf: str, threads: str, streams: str, cache_gb: str) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs, scheduler.enable_prefix_caching = int(cache_gb), int(streams), True
        properties = {"INFERENCE_NUM_THREADS": int(threads)}
        self.about = f"f16 weights, prefix caching, {scheduler.max_num_batched_tokens} tokens a step"
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(gguf, scheduler, "CPU", properties)
        self._handles: dict[int, openvino_genai.GenerationHandle] = {}
        self._left: dict[int, int] = {}
        self._next = 0

    def add(self, number: int, prompt: tuple[int, ...], max_tokens: int, temperature: float) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, temperature > 0
        if temperature:
            config.temperature = temperature
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        self._handles[number] = self._pipeline.add_request(self._next, ids, config)  # its own numbers never come twice
        self._left[number] = max_tokens
        self._next += 1

    def step(self) -> list[tuple[int, int]]:
        self._pipeline.step()
        new = []
        for number, handle in list(self._handles.items()):
            if handle.can_read():
                tokens = sum(len(output.generated_ids) for output in handle.read().values())
                new.append((number, tokens))
                self._left[number] -= tokens
                if self._left[number] <= 0:
                    del self._handles[number], self._left[number]
        return new


if __name__ == "__main__":
    serve(OpenVino)
