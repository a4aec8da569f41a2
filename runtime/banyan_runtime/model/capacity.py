"""How many tokens the KV pool holds: on the CPU by what is free, on a GPU by what a trial of the largest steps left (`headroom.py`)."""

from __future__ import annotations

import logging
import math

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError
from banyan_runtime.model import device as devices
from banyan_runtime.model import headroom, host
from banyan_runtime.model.choice import Choice
from banyan_runtime.model.headroom import Demand, Measured
from banyan_runtime.model.penalties import table_bytes
from banyan_runtime.model.pool import cell_bytes
from banyan_runtime.model.rope import Rope
from banyan_runtime.step import TableShape

log = logging.getLogger("banyan")

_GIB = 1 << 30
_SLACK = 8  # positions that the engine's table has beyond the context, at most


def choose_tokens(config: ServerConfig, choice: Choice, free_before_load: int) -> int:
    """Tokens of the pool on the CPU, a multiple of the page size: what fits, or --max-total-tokens where that is less.

    The default is a quarter of the memory limit and at most 16 contexts or 65,536 tokens: enough that a few long
    requests do not keep the others waiting, and memory that is not needed belongs to the machine's other programs. Raises
    ConfigError when not even one page fits, or is wanted.
    """
    cell = cell_bytes(choice.spec, choice.kv_dtype)
    available = devices.available_bytes(choice.device)
    fraction = config.mem_fraction_static or 0.9
    fits = int(available - free_before_load * (1 - fraction)) // cell
    contexts = max(16 * choice.context_len, config.page_size)
    default = fits if config.mem_fraction_static else min(contexts, 65_536, host.memory_limit() // 4 // cell, fits)
    _tell_of_wanted(config, fits)
    tokens = min(config.max_total_tokens or default, fits) // config.page_size * config.page_size
    if tokens <= 0:
        raise ConfigError(
            f"Not enough memory. Please try to increase --mem-fraction-static. {available / _GIB:.2f} GB are free, of which "
            f"{fraction:.0%} may be used; a token of this model takes {cell} bytes, --page-size={config.page_size} of them are the least."
        )
    return tokens


def tokens_beside(config: ServerConfig, measured: Measured, demand: Demand) -> int:
    """Tokens of the pool on a GPU where so much was measured: what fits, or --mem-fraction-static or --max-total-tokens where that is
    less. Raises ConfigError when no page is wanted, or the fraction leaves none."""
    plan = headroom.plan(measured, demand)
    _tell_of_wanted(config, plan.fitting)
    if plan.asked is not None and plan.asked < demand.least:
        needed = 1 - (measured.free_loaded - demand.kv(demand.least) - demand.beside(demand.least)) / measured.free_at_first
        raise ConfigError(
            f"--mem-fraction-static={config.mem_fraction_static} of the {headroom.said(measured.free_at_first)} that were free leaves no "
            f"room for keys and values beside weights of {headroom.said(measured.weights)}; leave it out, or set "
            f"{math.ceil(needed * 100) / 100:.2f} or more"
        )
    if plan.cut:
        log.warning(
            "mem_fraction_static=%s asks for %d tokens, more than the %d that fit beside what the largest steps take; %d are used.",
            config.mem_fraction_static, plan.asked, plan.fitting, plan.tokens,
        )  # fmt: skip
    return plan.tokens


def _tell_of_wanted(config: ServerConfig, fits: int) -> None:
    """Of --max-total-tokens, where there is not so much room. Raises ConfigError where it is less than a page."""
    wanted = config.max_total_tokens
    if wanted is not None and wanted > fits:
        log.warning("max_total_tokens=%d is larger than the %d tokens that fit into memory; %d are used.", wanted, fits, fits)
    if wanted is not None and wanted < config.page_size:
        raise ConfigError(
            f"--max-total-tokens={wanted} is less than one page of --page-size={config.page_size} tokens; raise it, or take smaller pages"
        )


def most_tokens(config: ServerConfig, choice: Choice, free: int) -> int:
    """Tokens of the largest pool that may come where so many bytes are free, were there nothing beside it."""
    fits = free // cell_bytes(choice.spec, choice.kv_dtype)
    return max(config.page_size, min(fits, config.max_total_tokens or fits))


def demand(config: ServerConfig, choice: Choice, rows: int) -> Demand:
    """What the pool takes, with so many rows in a step at most."""

    def beside(tokens: int) -> int:
        allowed = min(rows, headroom.rows_of(config, choice.context_len, tokens), tokens // config.page_size)
        positions = min(choice.context_len, tokens) + _SLACK
        return tables_bytes(choice, TableShape(allowed, positions)) + _rope_bytes(choice, positions)

    return Demand(cell_bytes(choice.spec, choice.kv_dtype), config.page_size, beside, config.mem_fraction_static, config.max_total_tokens)


def tables_bytes(choice: Choice, shape: TableShape) -> int:
    """What a GPU holds for penalties and for attention with tables of such a shape."""
    graphs = choice.graphs
    attention = 0 if choice.attention is None else choice.attention.beside(shape, min(shape.rows, graphs.rows), graphs.tokens)
    return table_bytes(shape) + attention


def _rope_bytes(choice: Choice, positions: int) -> int:
    """Twice: a table grows by a copy."""
    return 2 * 2 * -(-positions // Rope.BLOCK) * Rope.BLOCK * choice.spec.head_dim * choice.dtype.itemsize
