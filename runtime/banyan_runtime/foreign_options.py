"""Options of SGLang's that Banyan does not have: refused with the reason before anything is loaded, unless given their defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from banyan_runtime.errors import ConfigError


@dataclass(frozen=True)
class Refused:
    """An option of SGLang's that Banyan knows but does not have."""

    default: Any
    reason: str


_ONE_DEVICE = "Banyan runs one device a server; scale with replicas"
_DISAGGREGATION = "prefill and decode are not split over servers"
_DRAFT_MODEL = "drafts come from the text itself (--speculative-algorithm NGRAM), not from a model"
_NGRAM = "drafts follow the longest match of a request's own text"
_LORA = "adapters are not built yet"
_CLIENT_CODE = "it would run code that a client or a model brings"
_HOST_TIER = "the KV cache has no host tier"
_LATER = "it is not built yet"

REFUSED: Final[dict[str, Refused]] = {
    "trust_remote_code": Refused(False, _CLIENT_CODE),
    "enable_custom_logit_processor": Refused(False, _CLIENT_CODE),
    "quantization_param_path": Refused(None, _LATER),
    "enable_multimodal": Refused(None, "only text models are served"),
    "impl": Refused("auto", "there is one implementation"),
    "model_impl": Refused("auto", "there is one implementation"),
    "constrained_json_whitespace_pattern": Refused(None, _LATER),
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
    "speculative_draft_model_path": Refused(None, _DRAFT_MODEL),
    "speculative_num_steps": Refused(None, _DRAFT_MODEL),
    "speculative_eagle_topk": Refused(None, _DRAFT_MODEL),
    "speculative_token_map": Refused(None, _DRAFT_MODEL),
    "speculative_accept_threshold_single": Refused(1.0, _DRAFT_MODEL),
    "speculative_accept_threshold_acc": Refused(1.0, _DRAFT_MODEL),
    "speculative_ngram_min_match_window_size": Refused(1, _NGRAM),
    "speculative_ngram_max_match_window_size": Refused(12, _NGRAM),
    "speculative_ngram_min_bfs_breadth": Refused(1, _NGRAM),
    "speculative_ngram_max_bfs_breadth": Refused(10, _NGRAM),
    "speculative_ngram_match_type": Refused("BFS", _NGRAM),
    "speculative_ngram_branch_length": Refused(18, _NGRAM),
    "speculative_ngram_max_trie_depth": Refused(18, _NGRAM),
    "speculative_ngram_capacity": Refused(10_000_000, _NGRAM),
    "bucket_time_to_first_token": Refused(None, "metric buckets are fixed, so that dashboards and alerts hold"),
    "bucket_e2e_request_latency": Refused(None, "metric buckets are fixed, so that dashboards and alerts hold"),
    "bucket_inter_token_latency": Refused(None, "metric buckets are fixed, so that dashboards and alerts hold"),
    "collect_tokens_histogram": Refused(False, "token histograms are always collected"),
}

HARMLESS: Final[dict[str, int | None]] = {
    "enable_metrics": 0,  # always on
    "sleep_on_idle": 0,  # always on
    "disable_cuda_graph_padding": 0,
    "cuda_graph_bs": None,
}
"""Options of SGLang's that are accepted and change nothing (which graphs are captured is ours to choose), with how many whole numbers each
takes; None: one or more."""


def refuse(rest: Sequence[str]) -> None:
    """Check what argparse did not know: SGLang's options that may stay at their default, all else is an error."""
    position = 0
    while position < len(rest):
        word = rest[position]
        position += 1
        name, equals, value = word.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if not name.startswith("--") or (key not in REFUSED and key not in HARMLESS):
            raise ConfigError("unknown option; see 'banyan-runtime serve --help'", field=name)
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
            message = f"is not supported: {refused.reason}. Remove the flag or use {refused.default}"
            raise ConfigError(message, field=name, value=given)


def _check_numbers(name: str, count: int | None, values: Sequence[str]) -> None:
    if not all(value.isdecimal() and int(value) > 0 for value in values):
        raise ConfigError("must be whole numbers of at least 1", field=name, value=" ".join(values))
    if (count is None and not values) or (count is not None and len(values) != count):
        wanted = {0: "no value", 1: "one value", None: "at least one value"}[count]
        raise ConfigError(f"takes {wanted}", field=name, value=" ".join(values))
