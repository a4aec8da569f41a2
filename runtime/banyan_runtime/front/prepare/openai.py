"""What chat completions and completions check alike, before anything is rendered or tokenized."""

from __future__ import annotations

from dataclasses import dataclass

from banyan_runtime.front.errors import invalid, unknown_model
from banyan_runtime.front.openai.schema import GenerationRequest, StreamOptions
from banyan_runtime.front.parsing import Neutral, refuse_unsupported
from banyan_runtime.front.prepare.sequences import MAX_SALT, Served, check_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """The part of a plan that has nothing to do with the prompt."""

    model: str
    own_id: str | None
    own_id_param: str
    include_usage: bool
    continuous_usage: bool
    ignored: tuple[str, ...]


def begin(served: Served, asked: GenerationRequest, unsupported: Neutral) -> Common:
    """Raises ApiError."""
    names = served.config.names
    if asked.model is not None and asked.model != "default" and asked.model not in names:
        raise unknown_model(asked.model)
    refuse_unsupported(asked, unsupported)
    asked.check()
    own_id, param = asked.rid or asked.request_id, "rid" if asked.rid else "request_id"
    if own_id is not None:
        check_id(own_id, param)
    options = asked.stream_options or StreamOptions()
    return Common(
        model=asked.model or names[0],
        own_id=own_id or None,
        own_id_param=param,
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage_stats,
        ignored=asked.without_effect(),
    )


def salt_of(asked: GenerationRequest) -> str:
    """What keeps the cached prefixes of this client apart from those of others. Raises ApiError."""
    for name, value in (("cache_salt", asked.cache_salt), ("extra_key", asked.extra_key)):
        if value is not None and len(value) > MAX_SALT:
            raise invalid(name, f"{name} can have at most {MAX_SALT} characters, got {len(value)}.", "string_above_max_length")
    return "\0".join(filter(None, (asked.cache_salt, asked.extra_key)))
