"""From samples to the numbers that are told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from load.sample import Played, Sample

GOOD_TTFT_S = 1.0  # what counts as a good answer on a CPU: the first token within a second,
GOOD_TPOT_S = 0.1  # and then ten a second, about as fast as one reads


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest ranks. Raises ValueError for no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        return cls(*(percentile(values, percent) for percent in (50, 90, 99))) if values else None


@dataclass(frozen=True, slots=True)
class Summary:
    """Times in seconds. None: nothing to take it from (no request was answered, one token only, the server does not tell)."""

    requests: int
    errors: dict[str, int]
    wall_s: float
    output_tokens: int
    output_tokens_per_s: float  # over the wall time
    requests_per_s: float
    good_per_s: float  # requests a second that were answered within GOOD_TTFT_S and GOOD_TPOT_S
    ttft_s: Percentiles | None
    later_ttft_s: Percentiles | None  # of the second and later turns of conversations
    tpot_s: Percentiles | None  # a request's mean time for a token after the first
    itl_s: Percentiles | None  # between pieces of text, of all requests
    e2e_s: Percentiles | None
    tokens_per_piece: float | None  # 1, if times between pieces are times between tokens
    cache_hit_rate: float | None  # cached prompt tokens of all prompt tokens
    client_cpu_s: float

    @classmethod
    def of(cls, played: Played) -> Summary:
        done = [sample for sample in played.samples if not sample.error]
        tokens = sum(sample.output_tokens for sample in done)
        pieces = sum(len(sample.pieces) for sample in done)
        told = [sample for sample in done if sample.cached_tokens is not None]
        prompts = sum(sample.prompt_tokens for sample in told)
        return cls(
            requests=len(played.samples),
            errors=dict(Counter(sample.error for sample in played.samples if sample.error)),
            wall_s=played.wall_s,
            output_tokens=tokens,
            output_tokens_per_s=tokens / played.wall_s,
            requests_per_s=len(done) / played.wall_s,
            good_per_s=sum(map(_good, done)) / played.wall_s,
            ttft_s=Percentiles.of([_ttft(sample) for sample in done]),
            later_ttft_s=Percentiles.of([_ttft(sample) for sample in done if sample.turn]),
            tpot_s=Percentiles.of([time for sample in done if (time := _tpot(sample)) is not None]),
            itl_s=Percentiles.of([b - a for sample in done for a, b in zip(sample.pieces, sample.pieces[1:], strict=False)]),
            e2e_s=Percentiles.of([sample.ended - sample.sent for sample in done]),
            tokens_per_piece=tokens / pieces if pieces else None,
            cache_hit_rate=sum(sample.cached_tokens or 0 for sample in told) / prompts if prompts else None,
            client_cpu_s=played.client_cpu_s,
        )


def _ttft(sample: Sample) -> float:
    return (sample.pieces[0] if sample.pieces else sample.ended) - sample.sent


def _tpot(sample: Sample) -> float | None:
    """By the server's count of tokens, so that pieces of several tokens or of none do not matter."""
    if sample.output_tokens < 2 or len(sample.pieces) < 2:
        return None
    return (sample.pieces[-1] - sample.pieces[0]) / (sample.output_tokens - 1)


def _good(sample: Sample) -> bool:
    return _ttft(sample) <= GOOD_TTFT_S and (_tpot(sample) or 0.0) <= GOOD_TPOT_S
