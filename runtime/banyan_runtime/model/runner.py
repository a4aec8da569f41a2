"""Computes steps behind `step.Runner`: the tables that are built from steps, a forward pass, and what becomes of its logits.

Which forward pass it is (`forward.py`) makes no difference here, so tokens are drawn alike whoever computed their logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from banyan_runtime.model import device as devices
from banyan_runtime.model import edits, logprobs, penalties, sampler
from banyan_runtime.model.forward import Forward
from banyan_runtime.model.launched import Drawing, Drawn, Draws, Launched
from banyan_runtime.model.penalties import Penalties
from banyan_runtime.model.pooling import Pooler
from banyan_runtime.model.table import SlotTable
from banyan_runtime.step import I32, Feature, OutOfMemory, RunnerInfo, SamplingColumns, Step, TableShape, TokenMask, UnsupportedStep

I64 = npt.NDArray[np.int64]
T = TypeVar("T")


class ModelRunner:
    """Computes steps in the order in which they are launched, on one device."""

    FEATURES: Final[frozenset[Feature]] = frozenset({"bias", "mask", "pooling", "drafts"})

    def __init__(self, forward: Forward, info: RunnerInfo, device: torch.device) -> None:
        self.forward = forward
        self.info = replace(
            info,
            kv_bytes=forward.kv_bytes,
            available_bytes=devices.available_bytes(device),
            batch_invariant=forward.batch_invariant,
            features=self.FEATURES,
        )
        self._device = device
        self._rows: _Rows | None = None

    @torch.inference_mode()
    def prepare(self, shape: TableShape) -> None:
        self._rows = _Rows(shape, self.info.vocab_size, self._device)
        captured = self.forward.reserve(shape.rows, shape.positions, self._rows.latest)
        if captured is not None:
            seconds = {**self.info.phase_seconds, "graph_capture": captured.seconds}
            available = devices.available_bytes(self._device)
            self.info = replace(self.info, graph_bytes=captured.bytes, available_bytes=available, phase_seconds=seconds)

    @torch.inference_mode()
    def launch(self, step: Step, *, replay: bool = True) -> Launched:
        """Start a step. On the CPU it is done when this returns; on CUDA its kernels are queued. `replay`: by a graph, if one is there."""
        refuse(step, self.info.features)
        rows = self._rows
        assert rows is not None, "prepare comes first"
        rows.table.apply(step)
        return self._within_memory(lambda: self._launched(step, rows, replay), rows)

    def _within_memory(self, compute: Callable[[], T], rows: _Rows) -> T:
        """What `compute` gives. Raises OutOfMemory, when nothing of what was computed till then is held any more."""
        try:
            return compute()
        except (RuntimeError, MemoryError) as error:
            said = devices.shortage(error)
            if said is None:
                raise
        self.forward.retell(rows.table)
        raise OutOfMemory(said)

    def _launched(self, step: Step, rows: _Rows, replay: bool) -> Launched:
        if step.histories is not None:
            rows.penalties.begin(step.histories)
        draws = rows.draws(step)
        replayed = self.forward.replayed(step, rows.table) if replay else None
        token_ids = self._token_ids(step, rows) if replayed is None or draws.drafts else None
        if replayed is None:
            assert token_ids is not None
            hidden = self.forward.hidden(step, token_ids, rows.table)
        else:
            hidden = replayed
        prompt = None
        if step.prompt_scores is not None:
            owners = np.repeat(np.arange(len(step.rows)), step.query_lens)[step.prompt_scores.at]
            prompt = logprobs.of_prompt(hidden, self.forward.logits, self.info.vocab_size, step.prompt_scores, self._named(step, owners))
        vectors = None if step.pooling is None else rows.pooler.pool(self.forward.normed(hidden), step, step.pooling)
        launched = Launched(self._device, step, draws, prompt, vectors, replayed is not None)
        asked = self._asked(step, draws, rows, token_ids, hidden) if len(draws.sequences) else None
        if step.mask_later:
            assert asked is not None
            drawing = self._drawing(asked)
            launched.draws_later(lambda mask: self._within_memory(lambda: launched.arrive(drawing(mask)), rows))
        else:
            launched.arrive(None if asked is None else self._draw(asked))
        return launched

    def _asked(self, step: Step, draws: Draws, rows: _Rows, token_ids: Tensor | None, hidden: Tensor) -> _Asked:
        columns = step.sampling if draws.one_each else _cells(step.sampling, draws.sequences)
        states = hidden if draws.one_each else hidden.index_select(0, self._tensor(draws.at))
        return _Asked(step, draws, rows, token_ids, states, columns, rows.wanted(step, draws, columns))

    def _draw(self, asked: _Asked) -> Drawn:
        if asked.plain:
            columns = None if asked.wanted.greedy else asked.columns
            picked = self.forward.pick(asked.states, columns, asked.draws.positions(asked.step))
            if picked.arriving is not None:
                return Drawn(picked.tokens, picked.failed, None, None, picked.arriving)
            return self._noted(asked, picked.tokens, picked.failed, None)
        return self._drawing(asked)(asked.step.mask)

    def _drawing(self, asked: _Asked) -> Drawing:
        """Computes all that does not depend on a mask; what comes back draws."""
        step, columns, picked = asked.step, asked.columns, asked.draws.sequences
        penalties = asked.rows.penalties if asked.wanted.penalties else None
        logits = self.forward.logits(asked.states)
        raw = None
        if step.top_logprobs is not None:
            scored = np.flatnonzero(step.top_logprobs[picked] >= 0)
            top = int(step.top_logprobs.max(initial=0))
            raw = logprobs.raw(logits.index_select(0, self._tensor(scored)), top, self._named(step, picked[scored]))
        if step.bias is not None:
            edits.add_biases(logits, step.bias, picked)
        if penalties is not None:
            penalties.apply(logits, step.rows[picked], columns)
        if step.banned is not None:
            edits.forbid(logits, step.banned, picked)

        def draw(mask: TokenMask | None) -> Drawn:
            if mask is not None:
                self.forward.allow(logits, mask, picked)
            tokens, failed = self.forward.sample(logits, columns, asked.draws.positions(step))
            if penalties is not None:
                penalties.count(step.rows[picked], tokens)
            scores = None if raw is None else raw.of(tokens.index_select(0, self._tensor(scored)))
            return self._noted(asked, tokens, failed, scores)

        return draw

    def _noted(self, asked: _Asked, tokens: Tensor, failed: Tensor, scores: logprobs.Scores | None) -> Drawn:
        """With how many of them count; the last one that does is the row's latest."""
        draws, latest = asked.draws, asked.rows.latest
        owners = draws.owners(asked.step, self._device)
        if not draws.drafts:
            return Drawn(tokens, failed, None, scores, self.forward.deliver(tokens, failed, owners, latest))
        assert asked.token_ids is not None
        accepted = self._accepted(draws, asked.token_ids, tokens, failed)
        latest.index_copy_(0, owners, tokens.index_select(0, self._tensor(draws.firsts) + accepted - 1))
        return Drawn(tokens, failed, accepted, scores)

    def _accepted(self, draws: Draws, token_ids: Tensor, tokens: Tensor, failed: Tensor) -> Tensor:
        """How many of its drawn tokens count for each sequence that draws: int64. On the device, which need not wait for the host."""
        # A token counts if the draft before it is what was drawn there, and so on back to the first one, which always counts.
        right = token_ids.index_select(0, self._tensor(draws.at[1:])) == tokens[:-1]
        counts = torch.cat((torch.ones_like(failed[:1]), right & ~(failed[1:] | failed[:-1]))).to(torch.int64)
        counts.index_fill_(0, self._tensor(draws.firsts), 1)
        offsets = np.arange(draws.counts.max())
        inside = offsets < draws.counts[:, np.newaxis]
        places = np.where(inside, draws.firsts[:, np.newaxis] + offsets, 0)
        table = torch.take(counts, self._tensor(places)) * self._tensor(inside.astype(np.int64))
        return table.cumprod(1).sum(1)

    def _token_ids(self, step: Step, rows: _Rows) -> Tensor:
        """The step's tokens; a negative one is the latest token of its row."""
        ids = self._tensor(step.token_ids)
        if (step.token_ids < 0).any():
            ids = torch.where(ids < 0, rows.latest.index_select(0, self._tensor(np.repeat(step.rows, step.query_lens))), ids)
        return ids

    def _named(self, step: Step, sequences: I64) -> Tensor | None:
        return None if step.named is None else self._tensor(step.named[sequences])

    def _tensor(self, column: npt.NDArray[np.signedinteger]) -> Tensor:
        return devices.tensor(column, self._device)


class _Rows:
    """What is kept between steps, by row of the slot table."""

    def __init__(self, shape: TableShape, vocab_size: int, device: torch.device) -> None:
        self.table = SlotTable(shape)
        self.penalties = Penalties(shape, vocab_size, device)
        self.pooler = Pooler()
        # The last token sampled for each row, on the device: a step may be launched before the engine knows the tokens of the
        # step before.
        self.latest = torch.zeros(shape.rows, dtype=torch.int64, device=device)
        self._draws: Draws | None = None
        self._wanted: tuple[SamplingColumns, I32, _Wanted] | None = None  # of the last step: its columns, its rows, and what they want

    def draws(self, step: Step) -> Draws:
        """Decode steps over the same rows, one after another, share most of what is to be known of them."""
        if self._draws is None or not self._draws.fit(step):
            self._draws = Draws(step)
        return self._draws

    def wanted(self, step: Step, draws: Draws, columns: SamplingColumns) -> _Wanted:
        """Where no row has penalties, the rows are noted as such."""
        last = self._wanted
        if last is not None and last[0] is columns and last[1] is step.rows:
            return last[2]
        found = _Wanted(greedy=bool(sampler.greedy(columns).all()), penalties=bool(penalties.penalised(columns).any()))
        if not found.penalties:
            self.penalties.apply_none(step.rows[draws.sequences])
        self._wanted = columns, step.rows, found
        return found


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the rows of a step want of their sampling."""

    greedy: bool  # all of them their likeliest token
    penalties: bool  # some of them


@dataclass(frozen=True, slots=True)
class _Asked:
    """Of a step: S tokens to be drawn."""

    step: Step
    draws: Draws
    rows: _Rows
    token_ids: Tensor | None  # of the step; None where no sequence draws several
    states: Tensor  # [S, hidden_size] hidden states behind which they are drawn
    columns: SamplingColumns  # [S]
    wanted: _Wanted

    @property
    def plain(self) -> bool:
        """Whether nothing is done to the logits, and nothing asked of them, but a token; then they need not be written down in fp32."""
        step = self.step
        edited = step.bias is not None or step.banned is not None or step.mask is not None or step.mask_later
        return not self.wanted.penalties and not edited and step.top_logprobs is None


def refuse(step: Step, features: frozenset[Feature]) -> None:
    """Raise `UnsupportedStep` for what the runner does not have."""
    drafts = len(step.token_ids) > len(step.rows) and (step.samples > 1).any()  # of one token nothing but one can be drawn
    asked: tuple[tuple[Feature, object], ...] = (
        ("bias", step.bias),
        ("mask", step.mask),
        ("mask", step.mask_later or None),
        ("pooling", step.pooling),
        ("drafts", drafts or None),
        ("embeddings", step.embeddings),
        ("adapters", step.adapters),
    )
    for feature, wanted in asked:
        if wanted is not None and feature not in features:
            raise UnsupportedStep(feature)


def _cells(columns: SamplingColumns, rows: I64) -> SamplingColumns:
    """The cells of some rows, which are in order."""
    if np.array_equal(rows, np.arange(len(columns.temperature))):
        return columns
    return SamplingColumns(
        temperature=columns.temperature[rows],
        top_k=columns.top_k[rows],
        top_p=columns.top_p[rows],
        min_p=columns.min_p[rows],
        frequency_penalty=columns.frequency_penalty[rows],
        presence_penalty=columns.presence_penalty[rows],
        repetition_penalty=columns.repetition_penalty[rows],
        seed=columns.seed[rows],
    )
