"""The request bodies of embeddings, score and rerank: which fields are known, and what becomes of each."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from banyan_runtime.front.chat.messages import FIRST_PROBLEM, ChatMessage
from banyan_runtime.front.errors import invalid, missing, unsupported
from banyan_runtime.front.parsing import Int, Ints, Neutral, Number, RequestModel, check_choice, refuse_unsupported, shown, unknown

_OFF: Final[tuple[Any, ...]] = (False, 0, "", [], {})
UNSUPPORTED: Final[Neutral] = {
    "chat_template": _OFF,
    "normalize": (True,),
    "embed_dtype": ("float32", "auto"),
    "endianness": ("native", "little"),
    "lora_path": _OFF,
    "image": _OFF,
    "video": _OFF,
    "softmax": (True,),
    "activation": (True,),
    "use_activation": (True,),
}
"""Fields that ask for something this server does not have, with the values that ask for nothing."""
_RERANK_ALONE: Final[Neutral] = {"instruct": _OFF, "instruction": _OFF}
_EMBEDDINGS_ALONE: Final[Neutral] = {"messages": ([],), "chat_template_kwargs": _OFF}


class VectorRequest(RequestModel):
    """The fields that all of them share."""

    UNSUPPORTED: ClassVar[Neutral] = {**UNSUPPORTED, **_RERANK_ALONE, **_EMBEDDINGS_ALONE}

    model: str | None = None
    rid: str | None = None
    request_id: str | None = None
    priority: Int | None = None
    add_special_tokens: bool | None = None  # default: for texts, not for messages
    truncate_prompt_tokens: Int = 0  # that are kept of each input; 0: all, -1: as many as fit
    truncation_side: str = "left"

    def check(self) -> None:
        """Check what the types leave open. Raises ApiError."""
        refuse_unsupported(self, self.UNSUPPORTED)
        if self.truncate_prompt_tokens < -1:
            message = f"truncate_prompt_tokens must be at least -1, got {shown(self.truncate_prompt_tokens)}."
            raise invalid("truncate_prompt_tokens", message, "integer_below_min_value")
        check_choice("truncation_side", self.truncation_side, ("left", "right"))

    def without_effect(self) -> tuple[str, ...]:
        """The fields that nobody knows."""
        return unknown(self, {*self.UNSUPPORTED, "user"})


class EmbeddingRequest(VectorRequest):
    """`input`: a text, token ids, or a list of either; in its place a conversation, of which one vector is made."""

    UNSUPPORTED: ClassVar[Neutral] = {**UNSUPPORTED, **_RERANK_ALONE}

    input: str | list[Any] | None = None
    messages: Annotated[list[ChatMessage], FIRST_PROBLEM] | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    encoding_format: str | None = None
    dimensions: Int | None = None

    def check(self) -> None:
        super().check()
        if self.input is None and self.messages is None:
            raise missing("input")
        if self.input is not None and self.messages is not None:
            raise invalid("messages", "'input' and 'messages' exclude each other. Remove one of them.")
        check_choice("encoding_format", self.encoding_format, ("float", "base64"))


class ScoreRequest(VectorRequest):
    """vLLM's, which compares pairs under one of several names, and SGLang's, which has `label_token_ids`."""

    text_1: str | list[Any] | None = None
    text_2: str | list[Any] | None = None
    data_1: str | list[Any] | None = None
    data_2: str | list[Any] | None = None
    queries: str | list[Any] | None = None
    documents: str | list[Any] | None = None
    query: str | list[Any] | None = None
    items: str | list[Any] | None = None
    label_token_ids: Ints | None = None
    apply_softmax: bool = False
    item_first: bool = False
    temperature: Number = 1.0

    def check(self) -> None:
        super().check()
        if self.label_token_ids is not None and self.truncate_prompt_tokens:
            raise unsupported("truncate_prompt_tokens", "what stands behind a cut prompt would get other probabilities")
        if not 0 < self.temperature <= 1e6:
            raise invalid("temperature", f"temperature must be in (0, 1000000], got {shown(self.temperature)}.")
        if self.temperature != 1 and not self.apply_softmax:
            raise invalid("temperature", "temperature changes a softmax over the labels alone; set apply_softmax to true.")


class Document(RequestModel):
    text: str


class RerankRequest(VectorRequest):
    UNSUPPORTED: ClassVar[Neutral] = {**UNSUPPORTED, **_EMBEDDINGS_ALONE}

    query: str
    documents: Annotated[list[str | Document], FIRST_PROBLEM]
    top_n: Int = 0  # 0: all
    return_documents: bool = True
    instruct: str = ""  # what the query is asked for; `instruction` is another name
    instruction: str = ""

    def check(self) -> None:
        super().check()
        if self.instruct and self.instruction and self.instruct != self.instruction:
            raise invalid(
                "instruction", "'instruct' and 'instruction' are names of one field, and say different things. Remove one of them."
            )
        if self.top_n < 0:
            raise invalid("top_n", f"top_n must be at least 0, got {shown(self.top_n)}.", "integer_below_min_value")
