"""Every option of the server, once: name, type, default, unit, check and help.

The command line, `/server_info`, the start-up line `server_args=…` and the docs derive from `ServerConfig`. Names and defaults
follow SGLang 0.4.7, so that its command lines work.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from banyan_runtime.errors import ConfigError
from banyan_runtime.hub.address import served_name
from banyan_runtime.options import Check, at_least, between, chunk_size, flag, folder, json_object, one_of, option, origins, storage


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The resolved options of one server."""

    # --- model ---
    model_path: str = option(
        help="Folder of the model (config.json, *.safetensors, tokenizer), a .gguf file, or catalog://NAME, hf://ORG/NAME[@REVISION], "
        "s3://BUCKET/PREFIX.",
        group="model",
    )
    tokenizer_path: str | None = option(None, help="Folder of the tokenizer. Default: --model-path.", group="model")
    skip_tokenizer_init: bool = option(False, help="Serve token ids only: /generate with input_ids.", group="model")
    model_impl: str = option(
        "auto",
        check=one_of("auto", "banyan", "transformers"),
        help="Whose code computes the model: banyan (the families of docs/models.md), transformers (every decoder of the library with its "
        "attention interface, slower). auto: ours, where it is of a family.",
        group="model",
    )
    trust_remote_code: bool = option(
        False, help="Run Python code from the model's folder, where transformers needs it. It can do what this server can.", group="model"
    )
    load_format: str = option(
        "auto", check=one_of("auto", "safetensors", "dummy"), help="'dummy' makes random weights from config.json alone.", group="model"
    )
    dtype: str = option(
        "auto",
        check=one_of("auto", "float32", "float", "bfloat16", "float16", "half"),
        help="Type of weights and activations. auto: the checkpoint's, or what the device computes fast.",
        group="model",
    )
    quantization: str | None = option(
        None,
        check=one_of("w8a16", "w4a16", None),
        help="Make weights smaller while they are loaded: w8a16 (8 bits), w4a16 (4 bits; CPU kernels then round activations to 8). "
        "A .gguf that is quantized needs no option.",
        group="model",
    )
    kv_cache_dtype: str = option(
        "auto",
        check=one_of("auto", "fp8_e4m3", "fp8_e5m2"),
        help="Type of the KV cache. auto: as --dtype; fp8_*: half as large as 16 bits, less exact (on a CPU in the torch runner).",
        group="model",
    )
    context_length: int | None = option(
        None, check=at_least(8), help="Longest prompt plus output, tokens. Default: the model's.", group="model"
    )
    json_model_override_args: str = option(
        "{}", check=json_object, metavar="JSON", help="Keys that replace those of config.json.", group="model"
    )
    revision: str | None = option(
        None, help="Revision of an hf:// model: branch, tag or commit. Folders are taken as they are.", group="model"
    )
    download_dir: str | None = option(None, help="Where fetched models are kept. Default: ~/.cache/banyan (BANYAN_CACHE).", group="model")
    served_model_name: tuple[str, ...] = option(
        (),
        metavar="NAME",
        help="Names accepted in 'model' (several, separated by spaces); the first is canonical. Default: --model-path without catalog://, hf://.",
        group="model",
    )
    chat_template: str | None = option(None, help="File with a Jinja chat template that replaces the tokenizer's.", group="model")
    random_seed: int = option(0, check=between(0, 2**63 - 1), help="Seed of requests that bring none.", group="model")

    # --- HTTP ---
    host: str = option("127.0.0.1", help="Address to listen on.", group="http")
    port: int = option(30000, check=between(0, 65535), help="Port to listen on; 0 takes a free one and logs it.", group="http")
    api_key: str | None = option(
        None, secret=True, help="Key that clients must send. Prefer --api-keys-file: arguments can be read by others (ps).", group="http"
    )
    api_keys_file: str | None = option(
        None, help="File with API keys, one a line, with a name or without: 'name: key'; read again when it changes.", group="http"
    )
    admin_api_key: str | None = option(
        None, secret=True, help="Key for /flush_cache and the like, which else answer on the loopback address only.", group="http"
    )
    admin_api_keys_file: str | None = option(None, help="File with such keys, as --api-keys-file.", group="http")
    accept_any_model: bool = option(False, help="Answer requests for models of any name, instead of 404 model_not_found.", group="http")
    enable_tokenizer_info_endpoint: bool = option(False, help="Have /tokenizer_info, which tells the chat template.", group="http")
    max_queued_requests: int = option(
        10_000, check=at_least(1), help="Requests that may wait, and as many of background; beyond it: 429 queue_full.", group="http"
    )
    max_client_priority: int | None = option(
        None,
        check=at_least(0),
        help="Highest priority that requests get: one that asks for more, by 'priority' or service_tier 'priority', gets this one. "
        "0: nobody goes before others. Default: what they ask for.",
        group="http",
    )
    request_timeout: float | None = option(
        None,
        check=at_least(0.001),
        help="Seconds that a request may take, waiting included: then 503 before its first token, 504 after. "
        "Default: no limit, also for responses in the background.",
        group="http",
    )
    tokenizer_worker_num: int | None = option(
        None,
        check=between(1, 64),
        help="Processes that answer HTTP on one port (API server processes). Each takes about 400 MB, with a process that tokenizes and "
        "two or more workers of that. For small models on fast GPUs, whose hundreds of streams one process cannot write. Default: on a "
        "GPU one for four processors and 4 GB, 4 at most; on a CPU 1.",
        group="http",
    )
    cors_allow_origins: tuple[str, ...] = option(
        (),
        metavar="ORIGIN",
        check=origins,
        help="Web pages that may use the server from a browser: origins (https://chat.example), separated by spaces, or *. Default: none.",
        group="http",
    )
    stream_interval: int = option(
        1, check=at_least(1), help="Tokens per streamed event; 1: as they come, on very small models several at once.", group="http"
    )
    reasoning_parser: str | None = option(
        None,
        help="Tells reasoning from the answer: qwen3, qwen3-thinking, deepseek-r1, deepseek-v3, glm45, kimi, kimi_k2, mistral, gpt-oss.",
        group="http",
    )
    tool_call_parser: str | None = option(
        "auto",
        help="How the model writes calls of tools: hermes, llama3, pythonic, qwen3_coder, mistral, deepseekv3, deepseekv31, glm45, "
        "kimi_k2, gpt-oss, and other names of SGLang's and vLLM's. auto: what its chat template shows; none: calls stay text.",
        group="http",
    )
    grammar_backend: str = option(
        "llguidance",
        check=one_of("llguidance", "xgrammar", "none"),
        help="Holds outputs to JSON schemas, regexes and grammars: llguidance or none. xgrammar is taken for llguidance.",
        group="http",
    )
    preferred_sampling_params: str | None = option(
        None,
        check=lambda value: None if value is None else json_object(value),
        metavar="JSON",
        help="Sampling fields used where a request sets none.",
        group="http",
    )
    is_embedding: bool = option(False, help="Serve vectors (/v1/embeddings, /v1/score, /v1/rerank) instead of text.", group="http")
    enable_embeddings: bool = option(False, help="Serve vectors beside text, from a model that was made for text.", group="http")
    pooling_type: str | None = option(
        None,
        check=one_of("last", "mean", "cls", None),
        help="What a vector is made of: last, mean or cls. Default: what the model's 1_Pooling/config.json says, else last.",
        group="http",
    )
    skip_server_warmup: bool = option(False, help="Do not generate a few tokens before becoming ready.", group="http")
    drain_seconds: float = option(
        120.0, check=at_least(0), help="After SIGTERM: seconds that running requests get to finish (BANYAN_DRAIN_SECONDS).", group="http"
    )
    drain_linger_seconds: float = option(
        10.0,
        check=at_least(0),
        help="After SIGTERM: seconds at most in which requests are still served, each the last of its connection, while clients have "
        "connections or load balancers send new ones.",
        group="http",
    )

    # --- files and batches ---
    file_storage_path: str | None = option(
        None,
        check=storage,
        metavar="PATH",
        help="Where /v1/files and /v1/batches are kept: a folder, or s3://BUCKET/PREFIX, which replicas must share. "
        "Default: a folder of the model's own below ~/.cache/banyan (BANYAN_CACHE).",
        group="files and batches",
    )
    response_store_path: str | None = option(
        None,
        check=folder,
        metavar="FOLDER",
        help="A folder of this server alone, where /v1/responses survive its restart. Default: they are kept in memory.",
        group="files and batches",
    )
    response_store_seconds: float = option(
        7 * 86_400.0,
        check=at_least(0),
        help="Seconds for which /v1/responses are kept, unless a request says store: false; 0: none are.",
        group="files and batches",
    )
    response_store_bytes: int | None = option(
        None,
        check=at_least(1),
        help="Bytes of all /v1/responses that are kept: the oldest are removed. Default: 67108864 in memory, 1073741824 in a folder.",
        group="files and batches",
    )

    # --- device ---
    device: str | None = option(
        None, check=one_of("cpu", "cuda", None), help="cpu or cuda. Default: cuda where there is one.", group="device"
    )
    runner: str = option(
        "auto",
        check=one_of("auto", "native", "torch"),
        help="What computes: native (our C++ library, on the CPU), torch (several times slower there). auto: the fastest that can.",
        group="device",
    )
    attention_backend: str | None = option(
        None,
        check=one_of("flashinfer", "triton", "torch_native", None),
        help="Attention kernels: flashinfer, triton (both on CUDA), torch_native; default: the best there is.",
        group="device",
    )
    disable_cuda_graph: bool = option(False, help="Launch the kernels of all steps one by one.", group="device")
    cuda_graph_max_bs: int | None = option(
        None, check=at_least(1), help="Rows of the largest decode step that is captured as a CUDA graph; default: 256.", group="device"
    )
    cuda_graph_max_tokens: int | None = option(
        None,
        check=at_least(0),
        help="Tokens of the largest step with prompts that is captured as a CUDA graph; 0: none. Default: by the model, at most 8192.",
        group="device",
    )
    autotune: bool = option(
        False,
        help="Measure at start which kernels compute decode steps fastest, instead of taking those of the shipped table. On a GPU.",
        group="device",
    )
    mem_fraction_static: float | None = option(
        None,
        check=between(0.05, 0.98),
        help="Part of the device's memory for weights and KV pool. Default: on a GPU what the largest steps leave.",
        group="device",
    )

    # --- memory and schedule ---
    max_running_requests: int | None = option(
        None,
        check=at_least(1),
        help="Requests computed at once. Default: from the pool; on a GPU with less than 70 GB: 256.",
        group="schedule",
    )
    max_total_tokens: int | None = option(
        None, check=at_least(8), help="Size of the KV pool, tokens. Default: from free memory.", group="schedule"
    )
    chunked_prefill_size: int | None = option(
        None,
        check=chunk_size,
        help="Prompt tokens per step at most, a longer prompt is computed in pieces; -1: whole prompts. Default: 2048; on a GPU with 70 GB "
        "or more 8192.",
        group="schedule",
    )
    prefill_step_seconds: float | None = option(
        None,
        check=at_least(0),
        help="Seconds that a prefill step should take at most: the chunk shrinks until it does; 0: never. Default: 2 on the CPU, else 0.",
        group="schedule",
    )
    max_prefill_tokens: int = option(16384, check=at_least(1), help="Prompt tokens per step, over all requests.", group="schedule")
    schedule_policy: str = option(
        "fcfs", check=one_of("fcfs", "lpm"), help="Order of the queue: fcfs, or lpm (longest cached prefix first).", group="schedule"
    )
    schedule_conservativeness: float = option(
        1.0, check=between(0.01, 10), help="Multiplies the output length that admission expects.", group="schedule"
    )
    page_size: int = option(1, check=one_of(1, 16, 32, 64), help="Tokens per KV page.", group="schedule")
    disable_radix_cache: bool = option(False, help="Do not share prefixes between requests.", group="schedule")
    enable_mixed_chunk: bool = option(
        False,
        help="Compute the next tokens of those who run in the steps of prompts, not between them: the weights are read once for both. "
        "Steps of prompts are no graph then beside more than 64 requests. Not with --speculative-algorithm.",
        group="schedule",
    )
    speculative_algorithm: str | None = option(
        None,
        check=one_of("NGRAM", None),
        help="NGRAM: guess tokens from the request's own text and check them in one step; the output stays the same. Fast where "
        "answers repeat what was said; steps do not overlap then. Default: off.",
        group="schedule",
    )
    speculative_num_draft_tokens: int = option(
        12,
        check=between(2, 64),
        help="With --speculative-algorithm: tokens of a request in a step at most, guesses and the one that is certain.",
        group="schedule",
    )

    # --- logs and metrics ---
    log_level: str = option(
        "info", check=one_of("debug", "info", "warning", "error", "critical"), help="Least severe messages that are logged.", group="logs"
    )
    log_level_http: str | None = option(
        None,
        check=one_of("debug", "info", "warning", "error", "critical", None),
        help="Log level of the access log. Default: --log-level.",
        group="logs",
    )
    log_format: str = option("text", check=one_of("text", "json"), help="text, or one JSON object a line.", group="logs")
    log_requests: bool = option(
        False, help="Log what requests ask and what they are answered; --log-requests-level says how much.", group="logs"
    )
    log_requests_level: int = option(
        2,
        check=one_of(0, 1, 2, 3),
        help="With --log-requests: 0 ids and sizes, 1 also sampling parameters, 2 also the beginnings of texts, 3 whole texts.",
        group="logs",
    )
    enable_trace: bool = option(False, help="Export OpenTelemetry traces (extra 'otel').", group="logs")
    otlp_traces_endpoint: str | None = option(
        None,
        metavar="ADDRESS",
        help="Where traces are exported to: HOST:PORT or grpc://HOST:PORT (OTLP over gRPC), or a http:// or https:// URL (OTLP over "
        "HTTP). Implies --enable-trace. Default with it: localhost:4317.",
        group="logs",
    )
    decode_log_interval: int = option(40, check=at_least(1), help="Decode steps per 'Decode batch.' line.", group="logs")
    watchdog_timeout: float = option(
        300.0,
        check=at_least(1),
        help="Seconds without a finished step before the engine dumps its stacks and exits; after half of them, 60 at most, /readyz and "
        "/livez say that it hangs.",
        group="logs",
    )

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            check: Check | None = spec.metadata["check"]
            if value is dataclasses.MISSING:
                raise ConfigError("is required", field=flag(spec.name))
            if check is not None and value is not None and (problem := check(value)):
                raise ConfigError(problem, field=flag(spec.name), value="" if spec.metadata["secret"] else value)
        chunk = self.chunked_prefill_size
        if chunk is not None and chunk > 0 and chunk % self.page_size:
            raise ConfigError(f"must be a multiple of --page-size={self.page_size}", field="--chunked-prefill-size", value=chunk)
        if self.api_key is not None and self.api_keys_file is not None:
            raise ConfigError("excludes --api-keys-file; remove one", field="--api-key")
        if self.admin_api_key is not None and self.admin_api_keys_file is not None:
            raise ConfigError("excludes --admin-api-keys-file; remove one", field="--admin-api-key")

    @property
    def tokenizer(self) -> str:
        return self.tokenizer_path or self.model_path

    @property
    def names(self) -> tuple[str, ...]:
        return self.served_model_name or (served_name(self.model_path),)

    @property
    def serves_text(self) -> bool:
        return not self.is_embedding

    @property
    def serves_vectors(self) -> bool:
        return self.is_embedding or self.enable_embeddings

    def serves(self, name: str) -> bool:
        """Whether a request may name its model so; "default" is the first of `names`."""
        return name == "default" or name in self.names or self.accept_any_model

    def priority(self, asked: int) -> int:
        """What a request gets that asks for this priority."""
        return asked if self.max_client_priority is None else min(asked, self.max_client_priority)

    def public(self) -> dict[str, Any]:
        """All options with secrets masked, for logs and /server_info."""
        return {
            spec.name: "***" if spec.metadata["secret"] and getattr(self, spec.name) is not None else getattr(self, spec.name)
            for spec in dataclasses.fields(self)
        }

    def __repr__(self) -> str:
        return "ServerArgs(" + ", ".join(f"{name}={value!r}" for name, value in self.public().items()) + ")"

    def engine_json(self) -> str:
        """What the engine process is told: every option but the secrets."""
        return json.dumps({spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self) if not spec.metadata["secret"]})

    @staticmethod
    def from_engine_json(text: str) -> ServerConfig:
        return ServerConfig(**as_tuples(json.loads(text)))


def as_tuples(values: dict[str, Any]) -> dict[str, Any]:
    """Options of several values as the frozen class holds them; argparse and JSON make lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
