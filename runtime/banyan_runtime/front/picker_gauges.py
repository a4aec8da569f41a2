"""The gauges by which endpoint pickers choose a server, under vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence

from banyan_runtime import wire
from banyan_runtime.exposition import Page


class PickerGauges:
    """Names and labels are vLLM's. A picker reads the first series of a gauge, so each has exactly one."""

    def __init__(self, model_name: str) -> None:
        load, facts = Page({"model_name": model_name, "engine": "0"}), Page({})
        self._running = load.cell("vllm:num_requests_running", "gauge", "Number of requests in model execution batches.")
        self._waiting = load.cell("vllm:num_requests_waiting", "gauge", "Number of requests waiting to be processed.")
        self._usage = load.cell("vllm:kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.")
        names = ("block_size", "num_gpu_blocks", "engine")
        self._cache_config = facts.open_family("vllm:cache_config_info", "gauge", "The form of the KV pool.", *names)
        adapters = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        facts.open_family("vllm:lora_requests_info", "gauge", "LoRA adapters of requests.", *adapters).cell("0", "", "")
        self.pages: Sequence[Page] = (load, facts)

    def engine_ready(self, info: wire.EngineInfo) -> None:
        self._cache_config.cell(str(info.page_size), str(info.max_total_tokens // info.page_size), "0").value = 1

    def take(self, running: float, waiting: float, usage: float) -> None:
        self._running.value, self._waiting.value, self._usage.value = running, waiting, usage
