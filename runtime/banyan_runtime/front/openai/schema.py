"""The request bodies of chat completions and completions: which fields are known, and what becomes of each."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

from pydantic import BeforeValidator, Field

from banyan_runtime.front.chat.messages import FIRST_PROBLEM, ChatMessage
from banyan_runtime.front.errors import invalid
from banyan_runtime.front.openai.tools import Tool, check_tools, refuse_custom
from banyan_runtime.front.parsing import INSTEAD, Int, Neutral, RequestModel, check_choice, check_top_logprobs, shown, unknown
from banyan_runtime.front.sampling import SamplingFields

_OFF: Final[tuple[Any, ...]] = (False, 0, "", [], {})
REMOVED: Final[Neutral] = {**dict.fromkeys((*INSTEAD, "chat_template"), _OFF), "function_call": ("none", "auto")}
_UNSUPPORTED: Final[Neutral] = {
    **REMOVED,
    "prompt_logprobs": (False,),
    "modalities": (["text"], []),
    "audio": _OFF,
    "input_ids": _OFF,
    "lora_path": _OFF,
    "custom_logit_processor": _OFF,
    "custom_params": _OFF,
    "use_beam_search": _OFF,
    "bad_words": _OFF,
    "allowed_token_ids": _OFF,
    "truncate_prompt_tokens": (-1, 0),
    "thinking_token_budget": _OFF,
    "token_ids_logprob": _OFF,
    "return_hidden_states": _OFF,
    "return_token_ids": _OFF,
    "return_prompt_token_ids": _OFF,
    "return_meta_info": _OFF,
    "web_search_options": (False,),
}
"""Fields that ask for something this server does not have, with the values that ask for nothing."""
CHAT_UNSUPPORTED: Final[Neutral] = _UNSUPPORTED
COMPLETION_UNSUPPORTED: Final[Neutral] = {
    **_UNSUPPORTED,
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "documents": _OFF,
}

SILENT: Final[frozenset[str]] = frozenset(COMPLETION_UNSUPPORTED)
"""Fields without a class attribute of their own that need no mention where they have no effect: those that were refused or
asked for nothing."""


TIERS: Final[dict[str, int]] = {"flex": -1, "priority": 1}
"""Tiers of service with an effect, and the priority that they mean."""


class StreamOptions(RequestModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(SamplingFields):
    """The fields that chat completions and completions share. What constrains the output is read by `prepare.constraints`."""

    model: str | None = None
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    rid: str | None = None
    request_id: str | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    store: bool = False
    metadata: dict[str, str] = Field(default_factory=dict)
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    spaces_between_special_tokens: bool = True
    return_tokens_as_token_ids: bool = False
    response_format: Any = None
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None
    structural_tag: Any = None
    structured_outputs: Any = None

    def check(self) -> None:
        """Check what the types leave open. Raises ApiError."""
        check_choice("service_tier", self.service_tier, ("auto", "default", "flex", "scale", "priority"))

    def without_effect(self) -> tuple[str, ...]:
        """The fields that ask for something harmless that does not happen, and those that nobody knows."""
        idle = {
            "store": self.store,
            "metadata": bool(self.metadata),
            "prompt_cache_key": self.prompt_cache_key is not None,
            "service_tier": self.service_tier == "scale",
            "spaces_between_special_tokens": not self.spaces_between_special_tokens,
            "stream_options": self.stream_options is not None and not self.stream,
        }
        return (*(name for name, asked in idle.items() if asked), *unknown(self, SILENT))

    @property
    def urgency(self) -> int | None:
        """The priority that it asks for, itself or by its tier: flex is background, priority goes before others."""
        return TIERS.get(self.service_tier or "auto") if self.priority is None else self.priority

    @property
    def tier(self) -> str | None:
        """What the answer says of the tier; None: it was not asked for."""
        return None if self.service_tier is None else self.service_tier if self.service_tier in TIERS else "default"

    @property
    def include_stop(self) -> bool:
        return self.no_stop_trim or self.include_stop_str_in_output


class Effort(RequestModel):
    """SGLang's `reasoning` object."""

    effort: str | None = None
    enabled: bool | None = None


MAX_BEST_OF: Final = 20
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class ChatRequest(GenerationRequest):
    messages: Annotated[list[ChatMessage], FIRST_PROBLEM]
    max_completion_tokens: Int | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    include_reasoning: bool = True
    reasoning_effort: str | None = None
    reasoning: Effort = Effort()
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    logprobs: bool = False
    top_logprobs: Int = 0
    verbosity: str | None = None
    tools: Annotated[list[Tool], FIRST_PROBLEM, BeforeValidator(refuse_custom)] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    documents: list[dict[str, Any]] = Field(default_factory=list)
    prediction: dict[str, Any] | None = None

    @property
    def limit(self) -> tuple[str, int | None]:
        return super().limit if self.max_completion_tokens is None else ("max_completion_tokens", self.max_completion_tokens)

    def check(self) -> None:
        super().check()
        check_choice("reasoning_effort", self.reasoning_effort, EFFORTS)
        check_choice("reasoning.effort", self.reasoning.effort, EFFORTS)
        check_choice("verbosity", self.verbosity, ("low", "medium", "high"))
        check_tools(self.tools)
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid("continue_final_message", "continue_final_message and add_generation_prompt exclude each other.")
        check_top_logprobs("top_logprobs", self.top_logprobs)
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "when using `top_logprobs`, `logprobs` must be set to true.")

    def without_effect(self) -> tuple[str, ...]:
        idle = {"verbosity": self.verbosity in ("low", "high"), "prediction": self.prediction is not None}
        return (*(name for name, asked in idle.items() if asked), *super().without_effect())

    def template_variables(self) -> dict[str, Any]:
        """`chat_template_kwargs`, with thinking switched by the effort unless they say it themselves."""
        variables = dict(self.chat_template_kwargs)
        effort = self.reasoning_effort or self.reasoning.effort
        enabled = self.reasoning.enabled if effort is None else effort != "none"
        if enabled is not None:
            variables.setdefault("enable_thinking", enabled)
            variables.setdefault("thinking", enabled)
        if effort is not None:
            variables.setdefault("reasoning_effort", effort)
        return variables


class CompletionRequest(GenerationRequest):
    LEAST_MAX_TOKENS: ClassVar = 0

    prompt: str | list[Any]
    echo: bool = False
    best_of: Int | None = None
    suffix: str | None = None
    add_special_tokens: bool = True
    logprobs: Int | None = None

    def check(self) -> None:
        super().check()
        if self.logprobs is not None:
            check_top_logprobs("logprobs", self.logprobs)
        n = self.n or 1
        if self.best_of is not None and not n <= self.best_of <= MAX_BEST_OF:
            message = f"best_of must be at least n={n} and at most {MAX_BEST_OF}, got {shown(self.best_of)}."
            raise invalid("best_of", message, "integer_below_min_value" if self.best_of < n else "integer_above_max_value")
        if self.best_of is not None and self.best_of > n and self.stream:
            raise invalid("best_of", "best_of cannot be streamed: which choices are best is known at their end.")
        if self.suffix and self.echo:
            raise invalid("suffix", "suffix and echo exclude each other.")
