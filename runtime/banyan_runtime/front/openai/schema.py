"""The request bodies of chat completions and completions: which fields are known, and what becomes of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field

from banyan_runtime.front.chat.messages import FIRST_PROBLEM, ChatMessage
from banyan_runtime.front.parsing import Int, Ints, Number, RequestModel, Texts
from banyan_runtime.front.sampling import SamplingFields

HARMLESS: Final = frozenset(
    {
        "user", "safety_identifier", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "verbosity",
        "prediction", "parallel_tool_calls", "spaces_between_special_tokens", "web_search_options", "session_id", "extra_key",
    }
)  # fmt: skip
"""OpenAI's and the peers' fields that need nothing done."""

_OFF: Final[tuple[Any, ...]] = (False, 0, "", [], {})
UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "logit_bias": _OFF,
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (False,),
    "return_tokens_as_token_ids": _OFF,
    "response_format": ({"type": "text"},),
    "regex": _OFF,
    "ebnf": _OFF,
    "json_schema": _OFF,
    "structured_outputs": _OFF,
    "structural_tag": _OFF,
    "guided_json": _OFF,
    "guided_regex": _OFF,
    "guided_choice": _OFF,
    "guided_grammar": _OFF,
    "stop_regex": _OFF,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"], []),
    "audio": _OFF,
    "documents": _OFF,
    "chat_template": _OFF,
    "input_ids": _OFF,
    "lora_path": _OFF,
    "custom_logit_processor": _OFF,
    "custom_params": _OFF,
    "use_beam_search": _OFF,
    "bad_words": _OFF,
    "allowed_token_ids": _OFF,
    "truncate_prompt_tokens": (-1, 0),
    "thinking_token_budget": _OFF,
    "return_hidden_states": _OFF,
    "return_token_ids": _OFF,
    "return_prompt_token_ids": _OFF,
    "return_meta_info": _OFF,
    "suffix": ("",),
}
"""Fields that ask for something this server does not have, with the values that ask for nothing."""

KNOWN_EXTRA: Final = HARMLESS | UNSUPPORTED.keys()


class StreamOptions(RequestModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(RequestModel):
    """The fields that chat completions and completions share."""

    model: str | None = None
    max_tokens: Int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Int | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    n: Int | None = None
    seed: Int | None = None
    stop: str | Texts | None = None
    stop_token_ids: Ints | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool = False
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    rid: str | None = None
    request_id: str | None = None
    priority: Int | None = None
    cache_salt: str | None = None

    def sampling_fields(self, *, max_tokens: int | None, names: Mapping[str, str], min_max_tokens: int) -> SamplingFields:
        return SamplingFields(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            seed=self.seed,
            n=self.n,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            include_stop=self.no_stop_trim or self.include_stop_str_in_output,
            names=names,
            min_max_tokens=min_max_tokens,
        )


class Effort(RequestModel):
    """SGLang's `reasoning` object."""

    effort: str | None = None
    enabled: bool | None = None


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
    prompt: str | list[Any]
    echo: bool = False
    best_of: Int | None = None
    add_special_tokens: bool = True
