"""How many tokens the KV pool holds."""

from __future__ import annotations

import logging

import torch

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError
from banyan_runtime.model import device as devices
from banyan_runtime.model import host
from banyan_runtime.model.choice import Choice
from banyan_runtime.model.penalties import table_bytes
from banyan_runtime.model.pool import cell_bytes
from banyan_runtime.step import TableShape

log = logging.getLogger("banyan")

_GIB = 1 << 30


def choose_tokens(config: ServerConfig, choice: Choice, free_before_load: int) -> int:
    """Tokens of the pool, a multiple of the page size: what fits, or --max-total-tokens where that is less.

    On the CPU the default is a quarter of the memory limit and at most 16 contexts or 65,536 tokens: enough that a few long
    requests do not keep the others waiting, and memory that is not needed belongs to the machine's other programs. Raises
    ConfigError when not even one page fits, or is wanted.
    """
    cell, context_len = cell_bytes(choice.spec, choice.kv_dtype), choice.context_len
    available = devices.available_bytes(choice.device)
    wanted = config.max_total_tokens
    if choice.device.type == "cuda":
        fraction = config.mem_fraction_static or _cuda_fraction(config, choice.device)
        budget = int(available - free_before_load * (1 - fraction))
        fits = (budget - _beside(config, choice, budget // cell)) // cell
        default = fits
    else:
        fraction = config.mem_fraction_static or 0.9
        fits = int(available - free_before_load * (1 - fraction)) // cell
        contexts = max(16 * context_len, config.page_size)
        default = fits if config.mem_fraction_static else min(contexts, 65_536, host.memory_limit() // 4 // cell, fits)
    if wanted is not None and wanted > fits:
        log.warning("max_total_tokens=%d is larger than the %d tokens that fit into memory; %d are used.", wanted, fits, fits)
    if wanted is not None and wanted < config.page_size:
        raise ConfigError(
            f"--max-total-tokens={wanted} is less than one page of --page-size={config.page_size} tokens; raise it, or take smaller pages"
        )
    tokens = min(wanted or default, fits) // config.page_size * config.page_size
    if tokens <= 0:
        raise ConfigError(
            f"Not enough memory. Please try to increase --mem-fraction-static. {available / _GIB:.2f} GB are free, of which "
            f"{fraction:.0%} may be used; a token of this model takes {cell} bytes, --page-size={config.page_size} of them are the least."
        )
    return tokens


def _beside(config: ServerConfig, choice: Choice, tokens: int) -> int:
    """What a GPU holds for penalties and for attention beside a pool of so many tokens: by the most requests that may run, and their
    length."""
    rows = config.max_running_requests or min(max(tokens * 512 // choice.context_len, 2048), 4096)
    shape = TableShape(min(rows, tokens // config.page_size), min(choice.context_len, tokens))
    attention = 0 if choice.attention is None else choice.attention.beside(shape, min(shape.rows, choice.graph_rows), choice.graph_tokens)
    return table_bytes(shape) + attention


def _cuda_fraction(config: ServerConfig, device: torch.device) -> float:
    """Part of a GPU's memory for weights and pool: what a step's activations need is left free."""
    mib = torch.cuda.get_device_properties(device).total_memory >> 20
    chunk = config.chunked_prefill_size if (config.chunked_prefill_size or 0) > 0 else 8192
    reserve = 512 + 1.5 * max(chunk or 0, 2048) + 128
    return 1 - max(reserve, 10 * 1024 if mib > 60 * 1024 else 0) / mib
