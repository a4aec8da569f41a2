"""What the engine may do: the options and the model's sizes, resolved once at start, and the checks that follow from them.

Validation and admission read the same limits: a request that `refusal` lets pass fits into an empty pool with all that it may
generate, so it is admitted in the end and runs to its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError
from banyan_runtime.step import RunnerInfo
from banyan_runtime.wire import EngineInfo

SHORTEST_POOL: Final = 16  # tokens; with fewer a server could not even warm up
QUEUED_TOKENS: Final = 16 << 20  # by default, prompt tokens that may wait: 64 MiB of ids
QUEUED_CONTEXTS: Final = 64  # and as much as so many of the longest prompts, where that is more
AGEING_BATCHES: Final = 64  # prefill batches that pass a request by before it counts as one priority higher; twice as many: as three higher
CHUNK_CPU: Final = 2048  # tokens; SGLang's tier for the smallest devices
CHUNK_CUDA: Final = 8192
PREFILL_STEP_CPU_S: Final = 2.0  # a stream that pauses for longer looks broken


@dataclass(frozen=True)
class BackgroundLimits:
    """What background work (`background.py`) may have beside online requests."""

    rows_beside: int = 4  # of a decode step with online rows, at least 1
    prefill_every: int = 128  # decode steps with online rows for each prefill step of background: it delays less than 1 % of tokens
    step_s: float = 0.15  # what a step of background alone may take at most while online requests come now and then, seconds
    alone_step_s: float = 0.5  # what a prefill step of it should take while none come, for the first that does; seconds
    lately_s: float = 10.0  # how long after the last online request the next one is expected, seconds

    @staticmethod
    def of(device: str) -> BackgroundLimits:
        """Rows that make a decode step about a quarter longer, and steps of which one is no long wait, as measured."""
        return BackgroundLimits() if device.startswith("cpu") else BackgroundLimits(rows_beside=32, step_s=0.05)


@dataclass(frozen=True)
class EngineLimits:
    """Sizes are tokens."""

    context_len: int
    pool_tokens: int
    page_size: int = 1
    max_running: int = 256
    max_queued: int = 10_000  # online requests that wait, and as many of background
    max_queued_tokens: int = 16 << 20  # of their prompts, as well
    max_prefill_tokens: int = 16_384
    chunk: int | None = None  # longest piece of a prompt per step, whole pages; None: whole prompts
    prefill_step_s: float = 0.0  # what a prefill step should take at most, seconds; 0: `chunk` stays as it is
    policy: str = "fcfs"
    radix: bool = True
    ageing_batches: int = AGEING_BATCHES
    conservativeness: float = 1.0
    decode_log_interval: int = 40
    mixed: bool = False  # who runs gets a token in the steps of prompts, too. Not with drafts
    overlap: bool = False  # one step in flight while the next is scheduled
    draft_tokens: int = 0  # tokens of a request in a decode step, its last one and guesses; 0: nothing is guessed. Not with `overlap`
    background: BackgroundLimits = BackgroundLimits()
    vocab_size: int = 1 << 31

    @staticmethod
    def of(config: ServerConfig, info: RunnerInfo) -> EngineLimits:
        """The limits that `config` asks for on the device and model of `info`.

        Raises ConfigError when the pool is smaller than one chunk of work makes sense with, and for drafts that cannot be checked.
        """
        page = config.page_size
        pool = info.pool_tokens - info.pool_tokens % page
        if info.context_len < SHORTEST_POOL:
            raise ConfigError(
                f"the context is {info.context_len} tokens (--context-length, else what the model was made for), too few for any request; "
                f"set --context-length to {SHORTEST_POOL} or more, or serve another model"
            )
        if pool < SHORTEST_POOL:
            raise ConfigError(
                f"the KV cache holds {pool} tokens, too few for any request; set --max-total-tokens to {SHORTEST_POOL} or more, or give "
                "the server more memory"
            )
        rows = config.max_running_requests or min(max(int(pool / info.context_len * 512), 2048), 4096)
        cpu = info.device.startswith("cpu")
        drafts = config.speculative_algorithm is not None
        if drafts and "drafts" not in info.features:
            raise ConfigError(
                "needs a runner that can check drafts, which this one cannot; remove the flag",
                field="--speculative-algorithm",
                value=config.speculative_algorithm,
            )
        if drafts and config.enable_mixed_chunk:
            raise ConfigError(
                f"excludes --speculative-algorithm={config.speculative_algorithm}: drafts are checked in steps of their own; remove one of "
                "the flags",
                field="--enable-mixed-chunk",
            )
        chunk = config.chunked_prefill_size or (CHUNK_CPU if cpu else CHUNK_CUDA)
        return EngineLimits(
            context_len=info.context_len,
            pool_tokens=pool,
            page_size=page,
            max_running=min(rows, pool // page),  # each takes a page at least
            max_queued=config.max_queued_requests,
            max_queued_tokens=max(QUEUED_TOKENS, QUEUED_CONTEXTS * info.context_len),
            max_prefill_tokens=config.max_prefill_tokens,
            chunk=None if chunk < 0 else -(-chunk // page) * page,
            prefill_step_s=config.prefill_step_seconds if config.prefill_step_seconds is not None else PREFILL_STEP_CPU_S * cpu,
            policy=config.schedule_policy,
            radix=not config.disable_radix_cache,
            conservativeness=config.schedule_conservativeness,
            decode_log_interval=config.decode_log_interval,
            mixed=config.enable_mixed_chunk,
            overlap=not cpu and not drafts,
            draft_tokens=config.speculative_num_draft_tokens if drafts else 0,
            background=BackgroundLimits.of(info.device),
            vocab_size=info.vocab_size,
        )

    @property
    def max_model_len(self) -> int:
        """Longest sequence that can run, prompt and output: the context, or the pool, which one request alone may fill."""
        return min(self.context_len, self.pool_tokens)

    @property
    def warning(self) -> str | None:
        """What an operator should know before the first long request."""
        if self.max_model_len == self.context_len:
            return None
        return (
            f"The KV pool holds {self.pool_tokens} tokens, too few for the context of {self.context_len}: sequences end at "
            f"{self.max_model_len} tokens. Raise --max-total-tokens or --mem-fraction-static, or set --context-length "
            f"{self.max_model_len}."
        )

    def refusal(self, prompt_len: int, max_new: int) -> tuple[str, str] | None:
        """The (code, message) of the refusal of a request that can never run to its end, or None."""
        longest = self.max_model_len
        if prompt_len + max_new <= longest:
            return None
        why = "" if longest == self.context_len else f" The KV cache ({self.pool_tokens} tokens) is what limits it."
        return "context_length_exceeded", (
            f"This model's maximum context length is {longest} tokens. However, you requested {prompt_len + max_new} tokens "
            f"({prompt_len} in the prompt, {max_new} in the completion).{why}"
        )

    def has_room(self, waiting: int, tokens: int, prompt_len: int) -> bool:
        """Whether one more may wait beside so many requests with so many prompt tokens. Where none waits, any may."""
        return waiting < self.max_queued and (not waiting or tokens + prompt_len <= self.max_queued_tokens)

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
            max_model_len=self.max_model_len,
            page_size=self.page_size,
            max_total_tokens=self.pool_tokens,
            max_req_input_len=self.max_model_len,
            max_running_requests=self.max_running,
            max_queued_requests=self.max_queued,
            max_queued_tokens=self.max_queued_tokens,
            weights_bytes=info.weights_bytes,
            kv_bytes=info.kv_bytes,
            available_bytes=info.available_bytes,
            graph_bytes=info.graph_bytes,
            batch_invariant=info.batch_invariant,
            features=tuple(sorted(info.features)),
            phase_seconds=info.phase_seconds,
        )
