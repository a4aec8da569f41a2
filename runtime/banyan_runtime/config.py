"""Every option of the server, once: name, type, default, unit, check and help.

The command line, `/server_info`, the start-up line `server_args=…` and the docs derive from `OPTIONS`. Names and defaults
follow SGLang 0.4.7, so that its command lines work; an option of SGLang's that Banyan does not have is in `REFUSED` with
the reason, and is refused before anything is loaded, unless it is given its default.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from banyan_runtime.errors import ConfigError
from banyan_runtime.hub.resolve import SCHEME

Check = Callable[[Any], str | None]
"""Says what is wrong with a value ("must be at least 1"), or None."""


def at_least(low: float) -> Check:
    return lambda value: None if value >= low else f"must be at least {low}"


def between(low: float, high: float) -> Check:
    return lambda value: None if low <= value <= high else f"must be between {low} and {high}"


def one_of(*choices: object) -> Check:
    return lambda value: None if value in choices else "must be one of " + ", ".join(map(str, choices))


def chunk_size(value: int) -> str | None:
    return None if value == -1 or value >= 1 else "must be at least 1, or -1 for no chunking"


def origins(values: Sequence[str]) -> str | None:
    wrong = [value for value in values if value != "*" and (value.count("/") != 2 or "://" not in value or value.endswith("/"))]
    return f"must be * or origins like https://chat.example, without a path: {wrong[0]}" if wrong else None


def json_object(value: str) -> str | None:
    try:
        parsed = json.loads(value)
    except ValueError as error:
        return f"must be a JSON object ({error})"
    return None if isinstance(parsed, dict) else "must be a JSON object"


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    check: Check | None = None,
    metavar: str | None = None,
    secret: bool = False,
    group: str = "server",
) -> Any:
    """A field of `ServerConfig` with what the command line and the docs need to know of it."""
    metadata = {"help": help, "check": check, "metavar": metavar, "secret": secret, "group": group}
    if isinstance(default, list | tuple):
        return field(default_factory=lambda: tuple(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The resolved options of one server."""

    # --- model ---
    model_path: str = option(help="Folder of the model (config.json, *.safetensors, tokenizer), or catalog://NAME.", group="model")
    tokenizer_path: str | None = option(None, help="Folder of the tokenizer. Default: --model-path.", group="model")
    tokenizer_mode: str = option("auto", check=one_of("auto"), help="Only fast tokenizers (tokenizer.json) are used.", group="model")
    skip_tokenizer_init: bool = option(False, help="Serve token ids only: /generate with input_ids.", group="model")
    load_format: str = option(
        "auto", check=one_of("auto", "safetensors", "dummy"), help="'dummy' makes random weights from config.json alone.", group="model"
    )
    dtype: str = option(
        "auto",
        check=one_of("auto", "float32", "float", "bfloat16", "float16", "half"),
        help="Type of weights and activations. auto: the checkpoint's, or what the device computes fast.",
        group="model",
    )
    kv_cache_dtype: str = option("auto", check=one_of("auto"), help="Type of the KV cache. auto: as --dtype.", group="model")
    context_length: int | None = option(
        None, check=at_least(8), help="Longest prompt plus output, tokens. Default: the model's.", group="model"
    )
    json_model_override_args: str = option(
        "{}", check=json_object, metavar="JSON", help="Keys that replace those of config.json.", group="model"
    )
    revision: str | None = option(None, help="Revision of the model, shown in /model_info; folders are taken as they are.", group="model")
    download_dir: str | None = option(None, help="Where fetched models are kept. Default: ~/.cache/banyan (BANYAN_CACHE).", group="model")
    served_model_name: tuple[str, ...] = option(
        (),
        metavar="NAME",
        help="Names accepted in 'model' (several, separated by spaces); the first is canonical. Default: --model-path, or NAME of catalog://NAME.",
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
    api_keys_file: str | None = option(None, help="File with one API key a line; read again when it changes.", group="http")
    max_queued_requests: int = option(10_000, check=at_least(1), help="Requests that may wait; beyond it: 429 queue_full.", group="http")
    prepare_timeout: float = option(
        30.0, check=at_least(1), help="Seconds that reading, templating and tokenizing one request may take; then: 503.", group="http"
    )
    cors_allow_origins: tuple[str, ...] = option(
        (),
        metavar="ORIGIN",
        check=origins,
        help="Web pages that may use the server from a browser: origins (https://chat.example), separated by spaces, or *. Default: none.",
        group="http",
    )
    stream_interval: int = option(1, check=at_least(1), help="Tokens per streamed event.", group="http")
    enable_cache_report: bool = option(True, help="Fill usage.prompt_tokens_details.cached_tokens.", group="http")
    reasoning_parser: str | None = option(
        None,
        check=one_of("qwen3", "qwen3-thinking", "deepseek-r1", "kimi", None),
        help="Separates reasoning from the answer: qwen3, qwen3-thinking, deepseek-r1, kimi.",
        group="http",
    )
    sampling_defaults: str = option(
        "model", check=one_of("model", "neutral"), help="'model' takes unset sampling fields from generation_config.json.", group="http"
    )
    preferred_sampling_params: str | None = option(
        None,
        check=lambda value: None if value is None else json_object(value),
        metavar="JSON",
        help="Sampling fields used where a request sets none.",
        group="http",
    )
    skip_server_warmup: bool = option(False, help="Do not generate a few tokens before becoming ready.", group="http")
    drain_seconds: float = option(
        120.0, check=at_least(0), help="After SIGTERM: seconds that running requests get to finish (BANYAN_DRAIN_SECONDS).", group="http"
    )
    drain_linger_seconds: float = option(
        10.0,
        check=at_least(0),
        help="After SIGTERM: seconds in which requests on connections that are open are still served, each the last of its connection.",
        group="http",
    )

    # --- device ---
    device: str | None = option(
        None, check=one_of("cpu", "cuda", None), help="cpu or cuda. Default: cuda where there is one.", group="device"
    )
    attention_backend: str | None = option(
        None, check=one_of("torch_native", None), help="Attention kernels: torch_native.", group="device"
    )
    sampling_backend: str | None = option(None, check=one_of("pytorch", None), help="Sampling kernels: pytorch.", group="device")
    mem_fraction_static: float | None = option(
        None, check=between(0.05, 0.98), help="Part of the device's memory for weights and KV pool.", group="device"
    )
    enable_nan_detection: bool = option(False, help="Log rows whose logits hold NaN; they fail alone in any case.", group="device")

    # --- memory and schedule ---
    max_running_requests: int | None = option(
        None, check=at_least(1), help="Requests computed at once. Default: from the pool.", group="schedule"
    )
    max_total_tokens: int | None = option(
        None, check=at_least(8), help="Size of the KV pool, tokens. Default: from free memory.", group="schedule"
    )
    chunked_prefill_size: int | None = option(
        None,
        check=chunk_size,
        help="Prompt tokens per step at most, a longer prompt is computed in pieces; -1: whole prompts.",
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
    scheduling_rules: str = option(
        "fair",
        check=one_of("fair", "sglang"),
        help="fair: retracted requests go first, and prefills let decodes through. sglang: SGLang 0.4.7's rules to the letter.",
        group="schedule",
    )
    disable_radix_cache: bool = option(False, help="Do not share prefixes between requests.", group="schedule")
    disable_overlap_schedule: bool = option(
        False, help="Do not schedule a step while another runs (never done on the CPU).", group="schedule"
    )
    num_continuous_decode_steps: int = option(
        1, check=at_least(1), help="Decode steps before waiting prompts are looked at.", group="schedule"
    )
    allow_auto_truncate: bool = option(False, help="Cut prompts that are too long instead of refusing them.", group="schedule")

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
    decode_log_interval: int = option(40, check=at_least(1), help="Decode steps per 'Decode batch.' line.", group="logs")
    watchdog_timeout: float = option(
        300.0, check=at_least(1), help="Seconds without a finished step before the engine dumps its stacks and exits.", group="logs"
    )

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            check: Check | None = spec.metadata["check"]
            if value is dataclasses.MISSING:
                raise ConfigError(f"{flag(spec.name)} is required")
            if check is not None and value is not None and (problem := check(value)):
                raise ConfigError(f"{flag(spec.name)}={value} {problem}")
        chunk = self.chunked_prefill_size
        if chunk is not None and chunk > 0 and chunk % self.page_size:
            raise ConfigError(f"--chunked-prefill-size={chunk} must be a multiple of --page-size={self.page_size}")
        if self.api_key is not None and self.api_keys_file is not None:
            raise ConfigError("--api-key and --api-keys-file exclude each other; remove one")

    @property
    def tokenizer(self) -> str:
        return self.tokenizer_path or self.model_path

    @property
    def names(self) -> tuple[str, ...]:
        return self.served_model_name or (self.model_path.removeprefix(SCHEME),)

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
        return ServerConfig(**_tuples(json.loads(text)))


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Refused:
    """An option of SGLang's that Banyan knows but does not have."""

    default: Any
    reason: str


_ONE_DEVICE = "Banyan runs one device a server; scale with replicas"
_DISAGGREGATION = "prefill and decode are not split over servers"
_SPECULATIVE = "speculative decoding is not built"
_LORA = "adapters are not built yet"
_CLIENT_CODE = "it would run code that a client or a model brings"
_HOST_TIER = "the KV cache has no host tier"
_LATER = "it is not built yet"

REFUSED: Final[dict[str, Refused]] = {
    "trust_remote_code": Refused(False, _CLIENT_CODE),
    "enable_custom_logit_processor": Refused(False, _CLIENT_CODE),
    "quantization": Refused(None, _LATER),
    "quantization_param_path": Refused(None, _LATER),
    "is_embedding": Refused(False, _LATER),
    "enable_multimodal": Refused(None, "only text models are served"),
    "impl": Refused("auto", "there is one implementation"),
    "model_impl": Refused("auto", "there is one implementation"),
    "grammar_backend": Refused("xgrammar", _LATER),
    "constrained_json_whitespace_pattern": Refused(None, _LATER),
    "tool_call_parser": Refused(None, _LATER),
    "enable_mixed_chunk": Refused(False, _LATER),
    "enable_torch_compile": Refused(False, _LATER),
    "torch_compile_max_bs": Refused(32, _LATER),
    "cpu_offload_gb": Refused(0, _LATER),
    "enable_hierarchical_cache": Refused(False, _HOST_TIER),
    "hicache_ratio": Refused(2.0, _HOST_TIER),
    "hicache_size": Refused(0, _HOST_TIER),
    "hicache_write_policy": Refused("write_through_selective", _HOST_TIER),
    "lora_paths": Refused(None, _LORA),
    "max_loras_per_batch": Refused(8, _LORA),
    "lora_backend": Refused("triton", _LORA),
    "kv_events_config": Refused(None, _LATER),
    "tensor_parallel_size": Refused(1, _ONE_DEVICE),
    "tp_size": Refused(1, _ONE_DEVICE),
    "tp": Refused(1, _ONE_DEVICE),
    "pipeline_parallel_size": Refused(1, _ONE_DEVICE),
    "pp_size": Refused(1, _ONE_DEVICE),
    "data_parallel_size": Refused(1, _ONE_DEVICE),
    "dp_size": Refused(1, _ONE_DEVICE),
    "expert_parallel_size": Refused(1, _ONE_DEVICE),
    "ep_size": Refused(1, _ONE_DEVICE),
    "nnodes": Refused(1, _ONE_DEVICE),
    "node_rank": Refused(0, _ONE_DEVICE),
    "dist_init_addr": Refused(None, _ONE_DEVICE),
    "dist_timeout": Refused(None, _ONE_DEVICE),
    "max_micro_batch_size": Refused(None, _ONE_DEVICE),
    "nccl_port": Refused(None, _ONE_DEVICE),
    "moe_dense_tp_size": Refused(None, _ONE_DEVICE),
    "load_balance_method": Refused("round_robin", _ONE_DEVICE),
    "enable_dp_attention": Refused(False, _ONE_DEVICE),
    "enable_dp_lm_head": Refused(False, _ONE_DEVICE),
    "disaggregation_mode": Refused("null", _DISAGGREGATION),
    "disaggregation_transfer_backend": Refused("mooncake", _DISAGGREGATION),
    "disaggregation_bootstrap_port": Refused(8998, _DISAGGREGATION),
    "disaggregation_ib_device": Refused(None, _DISAGGREGATION),
    "num_reserved_decode_tokens": Refused(512, _DISAGGREGATION),
    "pdlb_url": Refused(None, _DISAGGREGATION),
    "speculative_algorithm": Refused(None, _SPECULATIVE),
    "speculative_draft_model_path": Refused(None, _SPECULATIVE),
    "speculative_num_steps": Refused(None, _SPECULATIVE),
    "speculative_eagle_topk": Refused(None, _SPECULATIVE),
    "speculative_num_draft_tokens": Refused(None, _SPECULATIVE),
    "speculative_token_map": Refused(None, _SPECULATIVE),
    "speculative_accept_threshold_single": Refused(1.0, _SPECULATIVE),
    "speculative_accept_threshold_acc": Refused(1.0, _SPECULATIVE),
    "log_requests": Refused(False, "prompts are never logged"),
    "log_requests_level": Refused(0, "prompts are never logged"),
    "bucket_time_to_first_token": Refused(None, "metric buckets are fixed, so that dashboards and alerts hold"),
    "bucket_e2e_request_latency": Refused(None, "metric buckets are fixed, so that dashboards and alerts hold"),
    "bucket_inter_token_latency": Refused(None, "metric buckets are fixed, so that dashboards and alerts hold"),
    "file_storage_path": Refused("sglang_storage", "the files and batches API is not built yet"),
    "collect_tokens_histogram": Refused(False, "token histograms are always collected"),
}

HARMLESS: Final[dict[str, int | None]] = {
    "enable_metrics": 0,  # always on
    "sleep_on_idle": 0,  # always on
    "disable_cuda_graph": 0,
    "disable_cuda_graph_padding": 0,
    "cuda_graph_max_bs": 1,
    "cuda_graph_bs": None,
}
"""Options of SGLang's that are accepted and change nothing (no graphs are captured yet), with how many whole numbers each
takes; None: one or more."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare every option of `ServerConfig` on `parser`; nothing is checked yet."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for spec in dataclasses.fields(ServerConfig):
        group = groups.setdefault(spec.metadata["group"], parser.add_argument_group(spec.metadata["group"]))
        default = None if spec.default_factory is not dataclasses.MISSING or spec.default in (None, dataclasses.MISSING) else spec.default
        text = spec.metadata["help"] + ("" if default is None or default is False else f" [{default}]")
        kwargs: dict[str, Any] = {"dest": spec.name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
        kind = str(spec.type)
        if kind == "bool":
            kwargs["action"] = argparse.BooleanOptionalAction if spec.default is True else "store_true"
        elif kind.startswith("tuple[str"):
            kwargs |= {"nargs": "+", "metavar": spec.metadata["metavar"]}
        else:
            kwargs |= {"type": {"int": int, "float": float}.get(kind.split(" ")[0], str), "metavar": spec.metadata["metavar"]}
        if spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            kwargs["required"] = True
        names = [flag(spec.name)] + (["--model"] if spec.name == "model_path" else [])
        group.add_argument(*names, **kwargs)


def parse(argv: Sequence[str]) -> ServerConfig:
    """The configuration that a command line asks for.

    Raises ConfigError for an unknown option, a bad value, or an option in `REFUSED` with another value than its default.
    """
    _check_text(argv)
    parser = _Parser(prog="banyan-runtime serve", allow_abbrev=False)
    add_options(parser)
    namespace, rest = parser.parse_known_args(list(argv))
    _refuse(rest)
    return ServerConfig(**_tuples(vars(namespace)))


def _check_text(argv: Sequence[str]) -> None:
    """Values go into JSON, metrics and logs, so bytes that are no UTF-8, which Python keeps as lone surrogates, are refused."""
    name = ""
    for word in argv:
        if word.startswith("--"):
            name = word.partition("=")[0]
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{ascii(name).strip(chr(39)) or 'the first argument'} is not valid UTF-8; use another value") from None


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    """Options of several values as the frozen class holds them; argparse and JSON make lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _refuse(rest: Sequence[str]) -> None:
    """Check what argparse did not know: SGLang's options that may stay at their default, all else is an error."""
    position = 0
    while position < len(rest):
        word = rest[position]
        position += 1
        name, equals, value = word.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if not name.startswith("--") or (key not in REFUSED and key not in HARMLESS):
            raise ConfigError(f"unknown option {word}; see 'banyan-runtime serve --help'")
        values = [value] if equals else []
        while not equals and position < len(rest) and not rest[position].startswith("--"):
            values.append(rest[position])
            position += 1
        if key in HARMLESS:
            _check_numbers(name, HARMLESS[key], values)
            continue
        refused = REFUSED[key]
        given = " ".join(values) if values else "true"
        if given.lower() != str(refused.default).lower():
            raise ConfigError(f"{name}={given} is not supported: {refused.reason}. Remove the flag or use {refused.default}.")


def _check_numbers(name: str, count: int | None, values: Sequence[str]) -> None:
    if not all(value.isdecimal() and int(value) > 0 for value in values):
        raise ConfigError(f"{name}={' '.join(values)} must be whole numbers of at least 1")
    if (count is None and not values) or (count is not None and len(values) != count):
        wanted = {0: "no value", 1: "one value", None: "at least one value"}[count]
        raise ConfigError(f"{name}={' '.join(values)} takes {wanted}")
