"""What the engine may do: the options and the model's sizes, resolved once at start, and the checks that follow from them.

Validation and admission read the same limits: a request that `check` lets pass fits into an empty pool, so it can always be
admitted in the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError
from banyan_runtime.step import RunnerInfo
from banyan_runtime.wire import EngineInfo

INPUT_RESERVE: Final = 5  # a prompt stays this far below the longest sequence; SGLang's number
CHUNK_CPU: Final = 2048  # tokens; SGLang's tier for the smallest devices
CHUNK_CUDA: Final = 8192


@dataclass(frozen=True)
class EngineLimits:
    """Sizes are tokens."""

    context_len: int
    pool_tokens: int
    page_size: int = 1
    max_running: int = 256
    max_queued: int = 10_000
    max_prefill_tokens: int = 16_384
    chunk: int | None = None  # longest piece of a prompt per step, whole pages; None: whole prompts
    policy: str = "fcfs"
    scheduling_rules: str = "fair"
    radix: bool = True
    conservativeness: float = 1.0
    continuous_decodes: int = 1
    decode_log_interval: int = 40
    overlap: bool = False  # one step in flight while the next is scheduled
    graphs: bool = False  # for the log line only
    vocab_size: int = 1 << 31

    @staticmethod
    def of(config: ServerConfig, info: RunnerInfo) -> EngineLimits:
        """The limits that `config` asks for on the device and model of `info`.

        Raises ConfigError when the pool is smaller than one chunk of work makes sense with.
        """
        page = config.page_size
        pool = info.pool_tokens - info.pool_tokens % page
        if min(info.context_len, pool) < 2 * INPUT_RESERVE:
            raise ConfigError(
                f"--max-total-tokens leaves {pool} tokens of KV cache for a context of {info.context_len}: too few for any request"
            )
        rows = config.max_running_requests or min(max(int(pool / info.context_len * 512), 2048), 4096)
        chunk = config.chunked_prefill_size or (CHUNK_CPU if info.device.startswith("cpu") else CHUNK_CUDA)
        return EngineLimits(
            context_len=info.context_len,
            pool_tokens=pool,
            page_size=page,
            max_running=min(rows, pool // page),  # each takes a page at least
            max_queued=config.max_queued_requests,
            max_prefill_tokens=config.max_prefill_tokens,
            chunk=None if chunk < 0 else -(-chunk // page) * page,
            policy=config.schedule_policy,
            scheduling_rules=config.scheduling_rules,
            radix=not config.disable_radix_cache,
            conservativeness=config.schedule_conservativeness,
            continuous_decodes=config.num_continuous_decode_steps,
            decode_log_interval=config.decode_log_interval,
            overlap=not config.disable_overlap_schedule and not info.device.startswith("cpu"),
            graphs=info.graphs,
            vocab_size=info.vocab_size,
        )

    @property
    def max_req_len(self) -> int:
        """Longest sequence, prompt and output: one position below the context and the pool."""
        return min(self.context_len, self.pool_tokens) - 1

    @property
    def max_req_input_len(self) -> int:
        """A prompt must be shorter than this."""
        return self.max_req_len - INPUT_RESERVE

    def check(self, prompt_len: int) -> tuple[str, str] | None:
        """The (code, message) of the refusal of a prompt that can never run, or None."""
        longest = self.max_req_input_len
        if prompt_len < longest:
            return None
        message = (
            f"Input length ({prompt_len} tokens) exceeds the maximum allowed length ({longest} tokens). "
            "Use a shorter input or enable --allow-auto-truncate."
        )
        if self.pool_tokens < self.context_len:
            return "kv_exhausted", f"{message} The KV cache ({self.pool_tokens} tokens) is what limits it."
        return "context_length_exceeded", f"This model's maximum context length is {self.context_len} tokens. {message}"

    def max_new(self, prompt_len: int, asked: int) -> int:
        """How many tokens a request may generate."""
        return min(max(asked, 1), self.max_req_len - prompt_len - 1)

    def engine_info(self, info: RunnerInfo) -> EngineInfo:
        """What the front is told."""
        return EngineInfo(
            architecture=info.architecture,
            model_type=info.model_type,
            dtype=info.dtype,
            device=info.device,
            attention_backend=info.attention_backend,
            vocab_size=info.vocab_size,
            context_len=self.context_len,
            page_size=self.page_size,
            max_total_tokens=self.pool_tokens,
            max_req_input_len=self.max_req_input_len,
            max_running_requests=self.max_running,
            weights_bytes=info.weights_bytes,
            kv_bytes=info.kv_bytes,
            phase_seconds=info.phase_seconds,
        )
