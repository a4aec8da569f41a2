"""Everything of a model that has to do with text, loaded once: tokenizer, chat template, defaults, formats of reasoning and tool calls."""

from __future__ import annotations

import logging
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
from banyan_runtime.front.chat.reasoning.harmony import CHANNEL, END
from banyan_runtime.front.chat.template import ChatTemplate, Guard, TemplateError
from banyan_runtime.front.chat.tools.format import ToolFormat
from banyan_runtime.front.chat.tools.registry import NAMES, detect, find
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.text.defaults import GenerationDefaults
from banyan_runtime.front.text.embedding import Embedding
from banyan_runtime.front.text.tokenizer import Tokenizer
from banyan_runtime.hub.files import read_object_if_any, read_text

log = logging.getLogger("banyan")


@dataclass(frozen=True)
class Text:
    """The text side of one model. `tokenizer` is None with --skip-tokenizer-init: then only token ids are served."""

    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    defaults: GenerationDefaults
    reasoning: ReasoningReader | None
    tools: ToolFormat | None  # how the model writes calls; None: they stay text
    tool_marker_ids: frozenset[int]  # of its markers that are single tokens: they must reach the parser as text
    turn_end_ids: frozenset[int]  # tokens that end a turn in this chat template
    model_config: Mapping[str, Any]  # config.json
    embedding: Embedding | None = None  # what prompts become where vectors are served
    template_source: str | None = None  # of the chat template; None: there is none, or no tokenizer

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
    def load(
        config: ServerConfig,
        model_dir: Path,
        tokenizer_dir: Path | None = None,
        guard: Guard | None = nullcontext,
        tokenizer: bytes | None = None,
    ) -> Text:
        """Read the text files of a model; its chat template is compiled and renders in `guard`, and without one it is left out.
        `tokenizer`: as another process has loaded it (`Tokenizer.whole`). Raises ModelError for broken files, ConfigError for
        options that do not fit."""
        folder = tokenizer_dir or (Path(config.tokenizer_path) if config.tokenizer_path else model_dir)
        model_config = read_object_if_any(model_dir / "config.json")
        embedding = Embedding.load(config, model_dir, model_config) if config.serves_vectors else None
        if config.skip_tokenizer_init:
            defaults = GenerationDefaults.load(config, model_dir, None)
            return Text(None, None, defaults, None, None, frozenset(), frozenset(), model_config, embedding)
        loaded = Tokenizer.load(folder) if tokenizer is None else Tokenizer.restored(folder, tokenizer)
        template = None if guard is None else _template(config, folder, loaded, guard)
        source, _ = _template_source(config, folder, loaded)
        tools = _tool_format(config, source or "")
        markers = () if tools is None else tools.markers
        return Text(
            loaded,
            template,
            GenerationDefaults.load(config, model_dir, loaded.eos_id),
            _reader(config, loaded, tools),
            tools,
            frozenset(loaded.added[marker] for marker in markers if marker in loaded.added),
            frozenset() if template is None else _turn_end(template, loaded),
            model_config,
            embedding,
            source,
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
        kind = ConfigError if config.chat_template else ModelError
        raise kind(f"the chat template does not work: {str(error) or type(error).__name__}", field=where) from error
    if config.serves_text:
        _tell_unread(template)
    return template


def _tell_unread(template: ChatTemplate) -> None:
    unread = [name for name in ("tools", "documents") if name in template.unread]
    if not unread:
        return
    # Hardly any template shows documents: that alone is nothing to be warned of.
    level, forced = (logging.WARNING, ", but for a call that tool_choice forces") if "tools" in unread else (logging.INFO, "")
    log.log(
        level,
        "The chat template shows the model no %s: requests that bring some are answered as if they did not%s, and X-Banyan-Ignored says "
        "so. --chat-template FILE takes another template.",
        " and no ".join(unread),
        forced,
    )


def _template_source(config: ServerConfig, folder: Path, tokenizer: Tokenizer) -> tuple[str | None, str]:
    if config.chat_template is not None:
        if "{" in config.chat_template:
            return config.chat_template, "--chat-template"
        try:
            return Path(config.chat_template).read_text(encoding="utf-8"), f"--chat-template {config.chat_template}"
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot be read: {error}", field="--chat-template", value=config.chat_template) from error
    file, other = folder / "chat_template.jinja", folder / "additional_chat_templates" / "tool_use.jinja"
    if file.is_file():
        return template_of(read_text(file), read_text(other) if other.is_file() else None), str(file)
    listed = tokenizer.settings.get("chat_template")
    if isinstance(listed, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in listed if isinstance(entry, dict)}
        listed = template_of(named.get("default"), named.get("tool_use"))
    return (listed if isinstance(listed, str) else None), str(folder / "tokenizer_config.json")


def template_of(plain: object, with_tools: object) -> str | None:
    """One template of two: that for requests with tools, and that for all others. Of one alone that one."""
    if not isinstance(with_tools, str):
        return plain if isinstance(plain, str) else None
    if not isinstance(plain, str):
        return f"{{% set tools = tools or [] %}}{with_tools}"  # which is not written for requests without
    # Jinja drops blanks beside tags, and the last line break of a template: these are neither.
    one, other = (f"{{{{ '' }}}}{source.removesuffix(chr(10))}{{{{ '' }}}}" for source in (with_tools, plain))
    return f"{{% if tools %}}{one}{{% else %}}{other}{{% endif %}}"


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
            ends_message = content == END and CHANNEL in tokenizer.added  # of gpt-oss, which thinks in one and answers in the next
            return frozenset() if ends_message else frozenset({token_id})
    return frozenset()


def _tool_format(config: ServerConfig, template: str) -> ToolFormat | None:
    """Raises ConfigError for a name that there is not."""
    name = config.tool_call_parser
    if name == "auto":
        found = detect(template)
        return None if found is None else find(found)
    if name is None or name == "none":
        return None
    form = find(name)
    if form is None:
        raise ConfigError(f"must be auto, none or one of {', '.join(NAMES)}", field="--tool-call-parser", value=name)
    return form


def _reader(config: ServerConfig, tokenizer: Tokenizer, tools: ToolFormat | None) -> ReasoningReader | None:
    name = config.reasoning_parser
    if name is None and tools is find("gpt-oss"):
        name = "gpt-oss"  # its channels hold everything, so somebody has to read them
    if name is None:
        return None
    if name not in FORMATS:
        raise ConfigError(f"must be one of {', '.join(FORMATS)}", field="--reasoning-parser", value=name)
    form = FORMATS[name].fitting(tokenizer.added)
    ids = {marker: token_id for marker in form.markers if (token_id := tokenizer.added.get(marker)) is not None}
    return ReasoningReader(form, frozenset(ids.values()))
