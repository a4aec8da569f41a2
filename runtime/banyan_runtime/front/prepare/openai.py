"""What chat completions and completions check alike, before anything is rendered or tokenized."""

from __future__ import annotations

from banyan_runtime.front.errors import invalid, unknown_model
from banyan_runtime.front.openai.schema import TIERS, GenerationRequest, StreamOptions
from banyan_runtime.front.parsing import Neutral, refuse_unsupported
from banyan_runtime.front.plan import Envelope
from banyan_runtime.front.prepare.sequences import MAX_SALT, Served, check_id


def begin(served: Served, asked: GenerationRequest, unsupported: Neutral) -> Envelope:
    """Raises ApiError."""
    names = served.config.names
    if asked.model is not None and not served.config.serves(asked.model):
        raise unknown_model(asked.model, names)
    refuse_unsupported(asked, unsupported)
    asked.check()
    own_id, param = asked.rid or asked.request_id, "rid" if asked.rid else "request_id"
    if own_id is not None:
        check_id(own_id, param)
    options = asked.stream_options or StreamOptions()
    return Envelope(
        model=asked.model or names[0],
        own_id=own_id or None,
        own_id_param=param,
        stream=asked.stream,
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage_stats,
        ignored=asked.without_effect(),
        tier=_tier(served, asked),
    )


def _tier(served: Served, asked: GenerationRequest) -> str | None:
    """What the answer says of the tier: the one that was asked for only where the server gives what it means."""
    meant = TIERS.get(asked.tier or "default", 0)
    return asked.tier if served.config.priority(meant) == meant else "default"


def salt_of(asked: GenerationRequest) -> str:
    """What keeps the cached prefixes of this client apart from those of others. Raises ApiError."""
    for name, value in (("cache_salt", asked.cache_salt), ("extra_key", asked.extra_key)):
        if value is not None and len(value) > MAX_SALT:
            raise invalid(name, f"{name} can have at most {MAX_SALT} characters, got {len(value)}.", "string_above_max_length")
    return "\0".join(filter(None, (asked.cache_salt, asked.extra_key)))
