"""The draw of a token from each row of logits, in two launches, without a sort and without a word to the host.

The largest (logit / temperature + Gumbel variable) of a row is a fair draw from its softmax (`noise.py`). `survey` finds it for each part
of a row, `choose` joins the parts. What top_k, top_p and min_p keep is a prefix of the tokens in their order, largest logit first and equal
ones by id, so a drawn token is judged by what comes before it: how many tokens, and how much mass. If it is refused, so is all that comes
after it, and the best of those before it is drawn next, until one passes. That is the token that a draw among the kept ones gives, and
since each refusal leaves a random share of the mass, a few rounds do. Parts without a token before the one that is judged are not read.

Scores of all cells are fp32, and those so close to the best that fp32 may err are computed again in fp64: the winner is the one of
fp64, which few GPUs are good at.
"""

from __future__ import annotations

import triton
import triton.language as tl

from banyan_runtime.model import noise
from banyan_runtime.model.kernels.dependent import await_earlier

WORD = tl.constexpr(noise.WORD)
C1 = tl.constexpr(noise.C1)
C2 = tl.constexpr(noise.C2)
ADD = tl.constexpr(noise.ADD)
MIX1 = tl.constexpr(noise.MIX1)
MIX2 = tl.constexpr(noise.MIX2)
BYTES = tl.constexpr(noise.BYTES)
LEAST = tl.constexpr(2.0**-32)  # that -log(u) is taken for
SLACK = tl.constexpr(2.0**-10)
"""An fp32 score errs by some 1e-5 where it matters: a GPU's logarithms by 1e-6, (logit - largest) / temperature by 2e-7 of itself,
which is no less than -26 in a winner. One cell in a thousand is computed in fp64 in vain."""
NONE = tl.constexpr(0x7FFFFFFF)  # no token id
SETTINGS = tl.constexpr(5)  # words of a row: temperature, top_k, top_p, min_p, start of the hash (noise.starts)


@triton.jit
def survey(
    logits,  # [rows, VOCABULARY]: fp32, or a type of 16 bits, whose numbers fp32 holds
    settings,  # int32 [rows, SETTINGS], of fp32 the bits; a temperature of 0: greedy
    numbers,  # fp64 [rows, 3, parts]: largest logit or NaN; sum of exp((logit - it) / temperature); best score, relative to it
    ids,  # int32 [rows, 2, parts]: first id of the largest; id of the best score, where that is more than -inf
    VOCABULARY: tl.constexpr,
    PART: tl.constexpr,  # a power of two
    DRAWN: tl.constexpr,  # any row; else no settings are read
    DEPENDENT: tl.constexpr,
):
    """What one part of a row contributes to it."""
    await_earlier(DEPENDENT)
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    logits += row * VOCABULARY
    settings += row * SETTINGS
    numbers += row * 3 * parts + part
    ids += row * 2 * parts + part

    at = part * PART + tl.arange(0, PART)
    x = tl.load(logits + at, mask=at < VOCABULARY, other=float("-inf")).to(tl.float32)
    broken = tl.max((x != x).to(tl.int32), 0) > 0
    x = tl.where(x != x, float("-inf"), x)  # what a maximum makes of NaN differs between targets
    high = tl.max(x, 0)
    mass = tl.full((), 0.0, tl.float32)
    score = tl.full((), float("-inf"), tl.float64)
    token = tl.full((), NONE, tl.int32)
    if DRAWN:
        temperature = tl.load(settings).to(tl.float32, bitcast=True)
        if (temperature > 0) & (high > float("-inf")) & (high < float("inf")):
            mass = tl.sum(_share(x, high, temperature), 0)
            score, token, _ = _best(x, at, high, temperature, tl.load(settings + 4), logits)
    tl.store(numbers, tl.where(broken, float("nan"), high).to(tl.float64))
    tl.store(ids, tl.min(tl.where(x == high, at, NONE), 0))
    if DRAWN:
        tl.store(numbers + parts, mass.to(tl.float64))
        tl.store(numbers + 2 * parts, score)
        tl.store(ids + parts, token)


@triton.jit
def choose(
    logits,  # as above
    settings,
    numbers,
    ids,
    tokens,  # int64 [rows]
    failed,  # bool [rows]
    VOCABULARY: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,  # PARTS, or the next power of two
    PART: tl.constexpr,
    DRAWN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The token of one row."""
    await_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    logits += row * VOCABULARY
    settings += row * SETTINGS
    numbers += row * 3 * PARTS
    ids += row * 2 * PARTS

    part = tl.arange(0, WIDTH)
    highs = tl.load(numbers + part, mask=part < PARTS, other=float("-inf"))
    broken = tl.max((highs != highs).to(tl.int32), 0) > 0
    highest = tl.max(tl.where(highs != highs, float("-inf"), highs), 0)
    sound = (highest > float("-inf")) & (highest < float("inf"))
    fails = broken | (sound == 0)
    first = tl.min(tl.where(highs == highest, tl.load(ids + part, mask=part < PARTS, other=NONE), NONE), 0)
    token = tl.where(fails, 0, first)
    if DRAWN:  # noqa: SIM102 (known when it is compiled)
        if (fails == 0) & (tl.load(settings).to(tl.float32, bitcast=True) > 0):
            token = _drawn(logits, settings, numbers, ids, highs, highest, first, PARTS, WIDTH, PART, VOCABULARY)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(failed + row, fails)


@triton.jit
def _drawn(
    logits,
    settings,
    numbers,
    ids,
    highs,  # fp64 [WIDTH]: largest of each part
    highest,
    first,  # id of the largest
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    VOCABULARY: tl.constexpr,
):
    temperature = tl.load(settings).to(tl.float32, bitcast=True)
    top_k = tl.load(settings + 1)
    top_p = tl.load(settings + 2).to(tl.float32, bitcast=True)
    min_p = tl.load(settings + 3).to(tl.float32, bitcast=True)
    start = tl.load(settings + 4)
    part = tl.arange(0, WIDTH)
    real = part < PARTS
    below = (highs - highest) / temperature.to(tl.float64)
    masses = tl.load(numbers + PARTS + part, mask=real, other=0.0) * tl.exp(below)
    limit = tl.sum(masses, 0) * top_p.to(tl.float64)
    # Each part's best, which stands until a refusal shows that it comes too late itself.
    scores = tl.load(numbers + 2 * PARTS + part, mask=real, other=float("-inf")) + below
    tokens = tl.load(ids + PARTS + part, mask=real, other=NONE)
    values = tl.load(logits + tokens, mask=tokens < VOCABULARY, other=float("-inf")).to(tl.float32)
    top = highest.to(tl.float32)
    maxima = highs.to(tl.float32)

    token = _winner(scores, tokens, first)
    # The first token of all is always kept.
    pending = ((top_k > 0) | (top_p < 1) | (min_p > 0)) & (token != first)
    while pending:
        value = tl.load(logits + token).to(tl.float32)
        kept = _share(value, top, temperature) >= min_p
        rank = tl.full((), 0, tl.int32)
        before = tl.full((), 0.0, tl.float64)
        where = _following(maxima >= value, part, -1, WIDTH)
        if (top_k <= 0) & (top_p >= 1):
            where = tl.full((), WIDTH, tl.int32)
        while kept & (where < WIDTH):
            at = where * PART + tl.arange(0, PART)
            x = tl.load(logits + at, mask=at < VOCABULARY, other=float("-inf")).to(tl.float32)
            earlier = _precedes(x, at, value, token)
            rank += tl.sum(earlier.to(tl.int32), 0)
            before += tl.sum(tl.where(earlier, _share(x, top, temperature), 0.0), 0).to(tl.float64)
            kept = ((top_k <= 0) | (rank < top_k)) & ((top_p >= 1) | (before <= limit))
            where = _following(maxima >= value, part, where, WIDTH)
        if kept:
            pending = token < 0
        else:
            stands = _precedes(values, tokens, value, token) & (_share(values, top, temperature) >= min_p)
            scores = tl.where(stands, scores, float("-inf"))
            again = (stands == 0) & (maxima >= value) & (_share(maxima, top, temperature) >= min_p)
            where = _following(again, part, -1, WIDTH)
            while where < WIDTH:
                at = where * PART + tl.arange(0, PART)
                x = tl.load(logits + at, mask=at < VOCABULARY, other=float("-inf")).to(tl.float32)
                admitted = _precedes(x, at, value, token) & (_share(x, top, temperature) >= min_p)
                score, best, best_value = _best(tl.where(admitted, x, float("-inf")), at, top, temperature, start, logits)
                scores = tl.where(part == where, score, scores)
                tokens = tl.where(part == where, best, tokens)
                values = tl.where(part == where, best_value, values)
                where = _following(again, part, where, WIDTH)
            token = _winner(scores, tokens, first)
            pending = token != first
    return token


@triton.jit
def _best(x, at, high, temperature, start, logits):
    """The best score among the cells `at` of a row and relative to `high`, its token and that one's logit; cells with x = -inf are left
    out. If there is no other: -inf and NONE."""
    distance = (x - high) / temperature
    rough = distance + _rough_gumbel(_hash(start, at))
    near = (rough >= tl.max(rough, 0) - SLACK) & (rough > float("-inf"))
    score = tl.full((), float("-inf"), tl.float64)
    token = tl.full((), NONE, tl.int32)
    value = tl.full((), float("-inf"), tl.float32)
    candidate = _following(near, at, -1, NONE)
    while candidate < NONE:  # one of them, mostly
        other = tl.load(logits + candidate).to(tl.float32)
        exact = (other.to(tl.float64) - high.to(tl.float64)) / temperature.to(tl.float64) + _gumbel(_hash(start, candidate))
        better = exact > score
        score = tl.where(better, exact, score)
        token = tl.where(better, candidate, token)
        value = tl.where(better, other, value)
        candidate = _following(near, at, candidate, NONE)
    return score, token, value


@triton.jit
def _winner(scores, tokens, otherwise):
    """The token with the best score, of equal ones the lowest id; `otherwise`, if none has more than -inf."""
    best = tl.max(scores, 0)
    return tl.where(best > float("-inf"), tl.min(tl.where(scores == best, tokens, NONE), 0), otherwise)


@triton.jit
def _following(marked, numbers, last, end):
    """The least of the marked numbers beyond `last`; `end`, if there is none."""
    return tl.min(tl.where(marked & (numbers > last), numbers, end), 0)


@triton.jit
def _precedes(x, at, value, token):
    return (x > value) | ((x == value) & (at < token))


@triton.jit
def _share(x, high, temperature):
    """The probability relative to that of `high`, the largest."""
    return tl.exp((x - high) / temperature)


@triton.jit
def _hash(start, token):
    """noise.hashes, as uint32."""
    word = token.to(tl.uint32) * C1
    word = ((word << 15) | (word >> 17)) * C2
    bits = word ^ start.to(tl.uint32, bitcast=True)
    bits = ((bits << 13) | (bits >> 19)) * 5 + ADD
    bits ^= BYTES
    bits ^= bits >> 16
    bits *= MIX1
    bits ^= bits >> 13
    bits *= MIX2
    return bits ^ (bits >> 16)


@triton.jit
def _gumbel(bits):
    """noise.gumbel."""
    uniform = bits.to(tl.float64) / tl.full((), WORD, tl.uint32).to(tl.float64)
    return -tl.log(tl.maximum(-tl.log(uniform), LEAST))


@triton.jit
def _rough_gumbel(bits):
    """The same in fp32. Likely winners have u close to 1, which fp32 has few numbers for, but d = 1 - u is as good as exact."""
    d = (bits ^ WORD).to(tl.float32) * LEAST
    series = d * (1.0 + d * (1.0 / 2 + d * (1.0 / 3 + d * (1.0 / 4 + d * (1.0 / 5)))))  # of -log(1 - d); 2e-7 off at 1 / 16
    rest = tl.where(d < 1.0 / 16, series, -tl.log(bits.to(tl.float32) * LEAST))
    return -tl.log(tl.maximum(rest, LEAST))
