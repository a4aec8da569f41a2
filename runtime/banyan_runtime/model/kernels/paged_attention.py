"""Attention of tiles of queries over keys and values that lie in slots anywhere, with a running softmax (FlashAttention's recurrence,
Dao et al. 2022; the split over the context is Flash-Decoding's, Dao et al. 2023).

A tile is some queries of one sequence that follow one another; with each come the heads that share a KV head, so what is read of
a key serves all of them. A program computes one tile, one KV head and one stretch of the context.
"""

from __future__ import annotations

import triton
import triton.language as tl

from banyan_runtime.model.kernels.dependent import await_earlier, bring_up_next
from banyan_runtime.model.kernels.rows import finite, marked, weighted

LOG2_E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
OWN = tl.constexpr(16)  # rows of the tile that a token's own key is in, as few as tensor cores take
MANY = tl.constexpr(64)  # rows of a tile: keys that all its queries see are not compared with their positions


@triton.jit(do_not_specialize=["tokens", "table_stride"])  # else one more is compiled for some of their numbers
def attend(
    q,  # [tokens, heads, DIM]
    keys,  # [kv_heads, slots, DIM], head_stride apart; in q's type or a narrower one
    values,  # likewise
    out,  # [tokens, heads, DIM]
    parts,  # SPLIT: fp32 [stretches, tokens, heads, DIM], not divided by the mass; of queries with no more keys nothing
    highs,  # SPLIT: fp32 [stretches, tokens, heads], largest score in powers of two
    masses,  # SPLIT: fp32 [stretches, tokens, heads], sum of powers of two relative to it
    rows_of,  # int32 [tiles]: row of `table`
    firsts,  # int32 [tiles]: first token
    counts,  # int32 [tiles]: queries
    positions,  # int32 [tiles]: position of the first query
    table,  # int32 [rows, table_stride]: in which slot each position's key lies
    table_stride,
    stretch_keys,  # int32 [1]: keys of a stretch
    head_stride,
    tokens,
    scale,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # DIM, or the next power of two
    ROWS: tl.constexpr,  # queries times group at most, a power of two
    KEYS: tl.constexpr,  # at a time
    SPLIT: tl.constexpr,  # whether a program meets a stretch of the context, or all of it
    WINDOW: tl.constexpr,  # 0: none
    CAP: tl.constexpr,  # scores become CAP * tanh(score / CAP); 0: they stay
    PRECISION: tl.constexpr,  # of products of fp32
    DEPENDENT: tl.constexpr,
):
    # Of a prompt the last queries see most keys; those that take longest come first. All along one axis, which alone may be so long.
    KV_HEADS: tl.constexpr = HEADS // GROUP
    turn, stretch = tl.program_id(0), tl.program_id(1)
    head, tile = turn % KV_HEADS, tl.num_programs(0) // KV_HEADS - 1 - turn // KV_HEADS
    # What the step was told is there; what it computes is waited for.
    first, count, position = tl.load(firsts + tile), tl.load(counts + tile), tl.load(positions + tile)
    table_row = tl.load(rows_of + tile).to(tl.int64)
    begin, end = 0, position + count
    length = tl.load(stretch_keys)
    if SPLIT:
        begin = stretch * length
        end = tl.minimum(end, begin + length)
    begin = _seen_from(begin, position, WINDOW, KEYS)
    own_slots = table + table_row * table_stride
    shift = head.to(tl.int64) * head_stride
    await_earlier(DEPENDENT)
    if SPLIT:
        unasked = stretch * length >= position + count
        if unasked:
            return
    rows = tl.arange(0, ROWS)
    query = rows // GROUP
    real = query < count
    row = (first + query).to(tl.int64) * HEADS + head * GROUP + rows % GROUP
    dims = tl.arange(0, WIDTH)
    inside = dims < DIM
    queries = tl.load(q + row[:, None] * DIM + dims[None, :], mask=real[:, None] & inside[None, :], other=0.0)
    high, mass, sums = _over(
        queries, position + query, keys + shift, values + shift, own_slots, _none_of(keys, KEYS, WIDTH), _none_of(keys, KEYS, WIDTH),
        begin, end, position, scale, WINDOW, False, DIM, WIDTH, ROWS, KEYS, WINDOW > 0, CAP, PRECISION,
    )  # fmt: skip
    whole = position + query < length
    _put(out, parts, highs, masses, high, mass, sums, row, stretch, tokens * HEADS, dims, real, inside, whole, DIM, SPLIT)


@triton.jit
def _put(
    out, parts, highs, masses, high, mass, sums, row, stretch, pairs, dims, real, inside, whole, DIM: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    """What comes of a stretch: of rows whose keys are all in the first one, the `whole`, the result; of others a part of it."""
    writable = real & whole & (stretch == 0)
    if SPLIT:
        cut = real & (whole == 0)
        part = stretch.to(tl.int64) * pairs + row
        tl.store(parts + part[:, None] * DIM + dims[None, :], sums, mask=cut[:, None] & inside[None, :])
        tl.store(highs + part, high, mask=cut)
        tl.store(masses + part, mass, mask=cut)
    else:
        writable = real
    result = sums / tl.where(writable, mass, 1.0)[:, None]
    tl.store(out + row[:, None] * DIM + dims[None, :], result.to(out.dtype.element_ty), mask=writable[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["tokens", "table_stride"])
def turn_and_attend(
    qkv,  # [tokens, (HEADS + 2 * KV heads) * DIM], `stride` apart: one token of each sequence
    cos,  # [tokens, DIM]
    sin,  # likewise, with the sign that the first half gets
    q_weight,  # [DIM]; NORMED: of the norm of a query's head
    k_weight,  # likewise
    slots,  # int32 [tokens]: where a token's own key and value go; PADDING: nowhere
    keys,  # as `attend` has it, as what follows
    values,
    out,
    parts,
    highs,
    masses,
    rows_of,
    counts,
    positions,
    table,
    table_stride,
    stretch_keys,
    stride,
    head_stride,
    tokens,
    eps,
    scale,
    NORMED: tl.constexpr,
    WIDE: tl.constexpr,  # whether the weight is applied before a norm is rounded
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    AHEAD: tl.constexpr,  # whether the first keys are read before what the kernels before wrote is there: they are of earlier steps
    PADDING: tl.constexpr,
    LARGEST: tl.constexpr,  # finite number that is kept
    NARROW: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`rows.place` and `attend` of a decode step. A token's own key and value come from registers, and go to their slot."""
    KV_HEADS: tl.constexpr = HEADS // GROUP
    if AHEAD:  # the next kernel has as long to ask for its weights as this one for its keys
        bring_up_next(DEPENDENT)
    turn, stretch = tl.program_id(0), tl.program_id(1)
    head, tile = turn % KV_HEADS, tl.num_programs(0) // KV_HEADS - 1 - turn // KV_HEADS
    count, position = tl.load(counts + tile), tl.load(positions + tile)
    table_row, slot = tl.load(rows_of + tile).to(tl.int64), tl.load(slots + tile).to(tl.int64)
    length = tl.load(stretch_keys)
    begin, end = 0, position
    newest = count > 0
    if SPLIT:
        begin = stretch * length
        newest &= (begin <= position) & (position < begin + length)
        end = tl.minimum(end, begin + length)
        unasked = begin > position
        if unasked:  # who waits for this kernel waits for its other programs, one of which is never unasked
            return
    begin = _seen_from(begin, position, WINDOW, KEYS)
    own_slots = table + table_row * table_stride
    shift = head.to(tl.int64) * head_stride
    own_keys, own_values = keys + shift, values + shift
    first_key, first_value = _none_of(keys, KEYS, WIDTH), _none_of(keys, KEYS, WIDTH)
    if AHEAD:
        places = begin + tl.arange(0, KEYS)
        known = places < end
        earlier = tl.load(own_slots + places, mask=known, other=0).to(tl.int64)
        first_key, first_value = _in(own_keys, own_values, earlier, known, DIM, WIDTH)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside, real = dims < DIM, (rows < GROUP) & (count > 0)
    across = (dims + DIM // 2) % DIM  # the other half's number, which a number is turned with
    q_gain, q_across = _gains(q_weight, dims, across, inside, NORMED)
    k_gain, k_across = _gains(k_weight, dims, across, inside, NORMED)
    await_earlier(DEPENDENT, AHEAD)
    at = tl.cast(tile, tl.int64)
    # Whatever is there once is read for each row of a tile: what lies spread over threads in another way would have to change its place.
    cosines, sines = _spread(cos + at * DIM, dims, rows, inside), _spread(sin + at * DIM, dims, rows, inside)
    one = tl.arange(0, OWN)
    own_cosines, own_sines = cosines, sines
    if ROWS != OWN:
        own_cosines, own_sines = _spread(cos + at * DIM, dims, one, inside), _spread(sin + at * DIM, dims, one, inside)
    own = qkv + at * stride
    heads = own + (head * GROUP + rows[:, None]) * DIM
    readable = real[:, None] & inside[None, :]
    queries = _turned(
        tl.load(heads + dims[None, :], mask=readable, other=0.0), tl.load(heads + across[None, :], mask=readable, other=0.0),
        q_gain, q_across, cosines, sines, eps, NORMED, WIDE, DIM,
    )  # fmt: skip
    own_key = own + (HEADS + head) * DIM
    key = _turned(
        _spread(own_key, dims, one, inside), _spread(own_key, across, one, inside), k_gain, k_across, own_cosines, own_sines, eps,
        NORMED, WIDE, DIM,
    )  # fmt: skip
    value = _spread(own_key + KV_HEADS * DIM, dims, one, inside)
    queries, key, value = _here(queries), _here(key), _here(value)
    kept_key, kept_value = marked(key, value, keys.dtype.element_ty, LARGEST, NARROW), finite(value, LARGEST).to(values.dtype.element_ty)
    stored = inside[None, :] & (one == 0)[:, None] & newest & (slot != PADDING)
    place = slot * DIM + dims[None, :] + 0 * one[:, None]
    tl.store(own_keys + place, kept_key, mask=stored)
    tl.store(own_values + place, kept_value, mask=stored)
    high, mass, sums = _over(
        queries, position + 0 * rows, own_keys, own_values, own_slots, first_key, first_value, begin, end, position, scale, WINDOW,
        AHEAD, DIM, WIDTH, ROWS, KEYS, WINDOW > 0, CAP, PRECISION,
    )  # fmt: skip
    if newest:  # a turn of one key that is seen
        high, mass, sums = _weighed(
            queries, position + 0 * rows, kept_key, kept_value, position + one, position + 1, scale * LOG2_E, WINDOW, high, mass, sums,
            True, False, CAP, PRECISION,
        )  # fmt: skip
    row = at * HEADS + head * GROUP + rows
    whole = (position + 0 * rows) < length
    _put(out, parts, highs, masses, high, mass, sums, row, stretch, tokens * HEADS, dims, real, inside, whole, DIM, SPLIT)


@triton.jit
def _spread(line, columns, rows, inside):
    """Some numbers of a line, for each row of a tile."""
    return tl.load(line + columns[None, :] + 0 * rows[:, None], mask=inside[None, :] & (rows >= 0)[:, None], other=0.0)


@triton.jit
def _here(x):
    """x, in the threads that its parts were loaded by. Without this the compiler brings each part to the threads that a product wants it in
    before it computes x of them, and so waits for the first part before it loads the next."""
    BITS: tl.constexpr = x.dtype.primitive_bitwidth
    if BITS == 16 and not INTERPRETED:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def _gains(weight, dims, across, inside, NORMED: tl.constexpr):
    """NORMED: a norm's weight, and that of the other half's numbers."""
    own = tl.zeros((dims.shape[0],), weight.dtype.element_ty)
    other = own
    if NORMED:
        own, other = tl.load(weight + dims, mask=inside, other=0.0), tl.load(weight + across, mask=inside, other=0.0)
    return own, other


@triton.jit
def _turned(own, other, gain, other_gain, cosines, sines, eps, NORMED: tl.constexpr, WIDE: tl.constexpr, DIM: tl.constexpr):
    """Heads [n, WIDTH], normed and turned to their position, of which `other` has the halves exchanged; sines and cosines likewise."""
    kind = own.dtype
    if NORMED:
        wide = own.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
        own = weighted(wide * scale, gain[None, :], kind, WIDE)
        other = weighted(other.to(tl.float32) * scale, other_gain[None, :], kind, WIDE)
    return own * cosines + other * sines


@triton.jit
def _seen_from(begin, position, WINDOW: tl.constexpr, KEYS: tl.constexpr):
    """Where a stretch begins that nobody sees before `position - WINDOW`: at a multiple of KEYS, so that a query's sums are the same in
    any tile."""
    if WINDOW > 0:
        begin = tl.maximum(begin, tl.maximum(position - WINDOW + 1, 0) // KEYS * KEYS)
    return begin


@triton.jit
def _none_of(keys, KEYS: tl.constexpr, WIDTH: tl.constexpr):
    return tl.zeros((KEYS, WIDTH), keys.dtype.element_ty)


@triton.jit
def _in(keys, values, slot, known, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Keys and values of some slots."""
    dims = tl.arange(0, WIDTH)
    readable = known[:, None] & (dims < DIM)[None, :]
    at = slot[:, None] * DIM + dims[None, :]
    return tl.load(keys + at, mask=readable, other=0.0), tl.load(values + at, mask=readable, other=0.0)


@triton.jit
def _over(
    queries,  # [ROWS, WIDTH]
    at,  # [ROWS] positions
    keys,  # [slots, DIM] of one head
    values,  # likewise
    own_slots,  # int32 [positions]: in which slot each position's key lies
    key,  # [KEYS, WIDTH]; AHEAD: the first ones of the stretch, which were read before
    value,  # likewise
    begin,  # of the stretch: `_seen_from`
    end,
    position,  # of the first query
    scale,
    window,
    AHEAD: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One stretch: the rows' largest scores in powers of two, the sums of powers of two relative to them, and those of values."""
    scale *= LOG2_E
    high = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    if AHEAD:
        places = begin + tl.arange(0, KEYS)
        high, mass, sums = _weighed(queries, at, key, value, places, end, scale, window, high, mass, sums, True, WINDOWED, CAP, PRECISION)
        begin += KEYS
    if ROWS >= MANY and not WINDOWED:  # of few queries a second loop would cost more than it spares: its first reads are waited for
        whole = begin + tl.maximum(tl.minimum(end, position + 1) - begin, 0) // KEYS * KEYS
        for start in range(begin, whole, KEYS):
            high, mass, sums = _turn(
                queries, at, keys, values, own_slots, start, end, scale, window, high, mass, sums, DIM, WIDTH, KEYS, False, False, CAP,
                PRECISION,
            )  # fmt: skip
        begin = whole
    some = True
    if AHEAD:  # of what follows only programs with more keys wait for the first reads
        some = begin < end
    if some:
        for start in range(begin, end, KEYS):
            high, mass, sums = _turn(
                queries, at, keys, values, own_slots, start, end, scale, window, high, mass, sums, DIM, WIDTH, KEYS, True, WINDOWED,
                CAP, PRECISION,
            )  # fmt: skip
    return high, mass, sums


@triton.jit
def _turn(
    queries, at, keys, values, own_slots, start, end, scale, window, high, mass, sums,
    DIM: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, PARTLY: tl.constexpr, WINDOWED: tl.constexpr, CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Some keys and values; PARTLY: not every query sees all of them."""
    places = start + tl.arange(0, KEYS)
    known = places < end if PARTLY else tl.full((KEYS,), True, tl.int1)
    key, value = _in(keys, values, tl.load(own_slots + places, mask=known, other=0).to(tl.int64), known, DIM, WIDTH)
    return _weighed(queries, at, key, value, places, end, scale, window, high, mass, sums, PARTLY, WINDOWED, CAP, PRECISION)


@triton.jit
def _weighed(
    queries, at, key, value, places, end, scale, window, high, mass, sums,
    PARTLY: tl.constexpr, WINDOWED: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    key, value = _widened(key, queries.dtype), _widened(value, queries.dtype)
    scores = tl.dot(queries, tl.trans(key), input_precision=PRECISION)
    if CAP > 0:
        # tanh(x) = 1 - 2 / (1 + e^2x). The scale is in powers of two here.
        scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (scale * (2.0 / CAP))))
        scale = CAP * LOG2_E
    if PARTLY:
        seen = (places < end)[None, :] & (places[None, :] <= at[:, None])
        if WINDOWED:
            seen &= places[None, :] > at[:, None] - window
        scores = tl.where(seen, scores, float("-inf"))
    # The largest product is that of the largest, for a positive scale; and what follows is one operation, as a compiler makes it for
    # some keys and not for others.
    higher = tl.maximum(high, tl.max(scores, 1) * scale)
    base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: all weights are 0
    kept = tl.exp2(high - base)
    weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, 0.0, tl.float32) + scale, tl.broadcast_to(-base[:, None], scores.shape)))
    mass = mass * kept + tl.sum(weights, 1)
    sums = sums * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
    return higher, mass, sums


@triton.jit
def _widened(x, kind: tl.constexpr):
    """As q's type. To bfloat16 Triton shifts the bits of E5M2, and makes numbers of NaN and infinity; float16 has its range."""
    if x.dtype == tl.float8e5:
        x = x.to(tl.float16)
    return x.to(kind)


@triton.jit(do_not_specialize=["pairs"])
def join(
    parts,  # fp32 [stretches, tokens * heads, DIM]
    highs,  # fp32 [stretches, tokens * heads]
    masses,
    ends,  # int32 [tokens]: keys that a token sees, those before its window included
    out,  # [tokens, heads, DIM]
    stretch_keys,  # int32 [1]
    pairs,  # tokens * heads
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TOGETHER: tl.constexpr,  # stretches that are read at once
    DEPENDENT: tl.constexpr,
):
    """One token and head."""
    pair = tl.program_id(0)
    length = tl.maximum(tl.load(stretch_keys), 1)  # 0 before a first step is told
    stretches = (tl.load(ends + pair // HEADS) + length - 1) // length
    await_earlier(DEPENDENT)
    if stretches == 1:  # who attended has put it there
        return
    dims = tl.arange(0, WIDTH)
    inside = dims < DIM
    high = float("-inf")
    mass = 0.0
    sums = tl.zeros((WIDTH,), tl.float32)
    for first in range(0, stretches, TOGETHER):
        stretch = first + tl.arange(0, TOGETHER)
        there = stretch < stretches
        part = tl.cast(pair, tl.int64) + stretch * pairs
        here = tl.load(highs + part, mask=there, other=float("-inf"))
        higher = tl.maximum(high, tl.max(here, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept, share = tl.exp2(high - base), tl.exp2(here - base)
        mass = mass * kept + tl.sum(tl.load(masses + part, mask=there, other=0.0) * share, 0)
        taken = tl.load(parts + part[:, None] * DIM + dims[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        sums = sums * kept + tl.sum(taken * share[:, None], 0)
        high = higher
    mass = tl.where(mass == 0.0, 1.0, mass)  # of a padded row
    tl.store(out + tl.cast(pair, tl.int64) * DIM + dims, (sums / mass).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["table_stride"])
def note(
    table,  # int32 [rows, table_stride]
    table_stride,
    rows,  # int32 [n], as all that follow
    positions,
    slots,
    counts,  # 0: of a padded row
    DEPENDENT: tl.constexpr,
):
    """Where a step puts its keys."""
    await_earlier(DEPENDENT)
    at = tl.program_id(0)
    cell = tl.load(rows + at).to(tl.int64) * table_stride + tl.load(positions + at)
    tl.store(table + cell, tl.load(slots + at), mask=tl.load(counts + at) > 0)
