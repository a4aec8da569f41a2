"""The request bodies of SGLang's own calls: /generate, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from banyan_runtime.front.chat.messages import FIRST_PROBLEM, ChatMessage
from banyan_runtime.front.errors import invalid
from banyan_runtime.front.openai.tools import Tool
from banyan_runtime.front.parsing import Int, Ints, Neutral, RequestModel, Texts, refuse_unsupported
from banyan_runtime.front.sampling import ANY_TEMPERATURE, SamplingFields

_OFF: Final[tuple[Any, ...]] = (False, 0, "", [], {})
UNSUPPORTED: Final[Neutral] = {
    "input_embeds": _OFF,
    "image_data": _OFF,
    "audio_data": _OFF,
    "video_data": _OFF,
    "lora_path": _OFF,
    "session_params": _OFF,
    "return_hidden_states": _OFF,
    "custom_logit_processor": _OFF,
}
TOKENIZE_UNSUPPORTED: Final[Neutral] = {"documents": _OFF, "chat_template": _OFF}
_UNSUPPORTED_SAMPLING: Final[Neutral] = {
    "custom_params": _OFF,
    "stop_regex": _OFF,
}
_IGNORED_SAMPLING: Final = frozenset({"spaces_between_special_tokens"})


class NativeSampling(SamplingFields):
    SILENT: ClassVar = frozenset(_UNSUPPORTED_SAMPLING) | _IGNORED_SAMPLING
    TEMPERATURES: ClassVar = ANY_TEMPERATURE
    LEAST_MAX_TOKENS: ClassVar = 0

    max_tokens: Int | None = Field(default=None, alias="max_new_tokens")
    min_tokens: Int | None = Field(default=None, alias="min_new_tokens")
    seed: Int | None = Field(default=None, alias="sampling_seed")
    stream_interval: Int | None = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None

    def check(self) -> None:
        """Raises ApiError for keys that are unknown here or not served: a typing error must not change the sampling."""
        refuse_unsupported(self, _UNSUPPORTED_SAMPLING)
        for name, value in (self.model_extra or {}).items():
            if name not in _UNSUPPORTED_SAMPLING and name not in _IGNORED_SAMPLING and value is not None:
                raise invalid("sampling_params", f"Unknown sampling parameter '{name[:64]}'.", "unknown_parameter")
        if self.stream_interval is not None and not 0 < self.stream_interval < 1 << 31:
            raise invalid("stream_interval", "stream_interval must be at least 1 and below 2147483648.")


class NativeGenerateRequest(RequestModel):
    """Lists in, lists out: what is a list has an item for each prompt, what is not holds for all."""

    text: str | Texts | None = None
    input_ids: list[Any] | None = None
    sampling_params: NativeSampling | Annotated[list[NativeSampling], FIRST_PROBLEM] = NativeSampling()
    rid: str | Texts | None = None
    stream: bool = False
    priority: Int | None = None
    return_logprob: bool | Annotated[list[bool], FIRST_PROBLEM] = False
    logprob_start_len: Int | Ints = -1  # first prompt position to tell of; -1: none
    top_logprobs_num: Int | Ints = 0
    token_ids_logprob: list[Any] | None = None  # token ids told beside each token: for all prompts, or a list for each
    return_text_in_logprobs: bool = False


class TokenizeRequest(RequestModel):
    model: str | None = None
    prompt: str | Texts | None = None
    messages: Annotated[list[ChatMessage], FIRST_PROBLEM] | None = None
    add_special_tokens: bool | None = None  # default: for a prompt, not for messages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Annotated[list[Tool], FIRST_PROBLEM] = Field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    return_token_strs: bool = False


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: list[Any]
    skip_special_tokens: bool = True
