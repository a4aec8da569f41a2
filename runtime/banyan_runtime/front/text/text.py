"""Everything of a model that has to do with text, loaded once: tokenizer, chat template, defaults, reasoning format."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError, ModelError
from banyan_runtime.front.chat.messages import ChatMessage
from banyan_runtime.front.chat.prompt import ChatOptions, ReasoningReader, render
from banyan_runtime.front.chat.reasoning import FORMATS
from banyan_runtime.front.chat.template import ChatTemplate, Guard, TemplateError
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.text.defaults import GenerationDefaults
from banyan_runtime.front.text.tokenizer import Tokenizer
from banyan_runtime.hub.files import read_object_if_any, read_text


@dataclass(frozen=True)
class Text:
    """The text side of one model. `tokenizer` is None with --skip-tokenizer-init: then only token ids are served."""

    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    defaults: GenerationDefaults
    reasoning: ReasoningReader | None
    turn_end_ids: frozenset[int]  # tokens that end a turn in this chat template
    model_config: Mapping[str, Any]  # config.json

    @property
    def needed_tokenizer(self) -> Tokenizer:
        """The tokenizer, for requests that cannot do without. Raises ApiError where none is loaded."""
        if self.tokenizer is None:
            raise ApiError(400, "This server has no tokenizer (--skip-tokenizer-init); only /generate with input_ids works.")
        return self.tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the tokenizer adds. Raises ApiError without tokenizer."""
        return self.needed_tokenizer.encode(text, add_special_tokens=True)

    @staticmethod
    def load(config: ServerConfig, model_dir: Path, tokenizer_dir: Path | None = None, guard: Guard | None = nullcontext) -> Text:
        """Read the text files of a model; its chat template is compiled and renders in `guard`, and without one it is left out.
        Raises ModelError for broken files, ConfigError for options that do not fit."""
        folder = tokenizer_dir or (Path(config.tokenizer_path) if config.tokenizer_path else model_dir)
        model_config = read_object_if_any(model_dir / "config.json")
        if config.skip_tokenizer_init:
            return Text(None, None, GenerationDefaults.load(config, model_dir, None), None, frozenset(), model_config)
        tokenizer = Tokenizer.load(folder)
        template = None if guard is None else _template(config, folder, tokenizer, guard)
        return Text(
            tokenizer,
            template,
            GenerationDefaults.load(config, model_dir, tokenizer.eos_id),
            _reader(config, tokenizer),
            frozenset() if template is None else _turn_end(template, tokenizer),
            model_config,
        )


def _template(config: ServerConfig, folder: Path, tokenizer: Tokenizer, guard: Guard) -> ChatTemplate | None:
    """--chat-template, else chat_template.jinja, else tokenizer_config.json. It is tried on one message, so that a broken one
    stops the start and not the first request."""
    source, where = _template_source(config, folder, tokenizer)
    if source is None:
        return None
    hello = [ChatMessage(role="user", content="Hello")]
    try:
        template = ChatTemplate(source, tokenizer.named, guard)
        render(template, hello, ChatOptions())
    except (TemplateError, ApiError, SyntaxError, RecursionError, MemoryError, OverflowError, ValueError) as error:
        # The latter are what Python says of a template that is nested too deeply or takes too much memory.
        message = f"{where}: the chat template does not work: {str(error) or type(error).__name__}"
        raise (ConfigError(message) if config.chat_template else ModelError(message)) from error
    return template


def _template_source(config: ServerConfig, folder: Path, tokenizer: Tokenizer) -> tuple[str | None, str]:
    if config.chat_template is not None:
        if "{" in config.chat_template:
            return config.chat_template, "--chat-template"
        try:
            return Path(config.chat_template).read_text(encoding="utf-8"), f"--chat-template {config.chat_template}"
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template={config.chat_template} cannot be read: {error}") from error
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_text(file), str(file)
    listed = tokenizer.settings.get("chat_template")
    if isinstance(listed, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in listed if isinstance(entry, dict)}
        listed = named.get("default")
    return (listed if isinstance(listed, str) else None), str(folder / "tokenizer_config.json")


def _turn_end(template: ChatTemplate, tokenizer: Tokenizer) -> frozenset[int]:
    """The token that the template puts behind an answer: base models often name another end of text."""
    answer = "Certainly"
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": answer}]
    try:
        text = template.render(turns, add_generation_prompt=False, variables={})
    except TemplateError:
        return frozenset()
    _, found, rest = text.rpartition(answer)
    for content, token_id in tokenizer.added.items():
        if found and token_id in tokenizer.special_ids and rest.lstrip().startswith(content):
            return frozenset({token_id})
    return frozenset()


def _reader(config: ServerConfig, tokenizer: Tokenizer) -> ReasoningReader | None:
    if config.reasoning_parser is None:
        return None
    form = FORMATS[config.reasoning_parser]
    ids = {marker: token_id for marker in (form.start, form.end) if (token_id := tokenizer.added.get(marker)) is not None}
    return ReasoningReader(form, form.end in ids, frozenset(ids.values()))
