"""The Anthropic SDK: a message, a stream and a count."""

from __future__ import annotations

from typing import Any

import anthropic
from asking import CAPITAL, Questions

question = Questions("anthropic")
MESSAGES: Any = [{"role": "user", "content": CAPITAL}]


@question
def messages(url: str) -> Any:
    client = anthropic.Anthropic(base_url=url, api_key="None", max_retries=0)
    message = client.messages.create(model="tiny", max_tokens=200, messages=MESSAGES)
    with client.messages.stream(model="tiny", max_tokens=200, messages=MESSAGES) as stream:
        text = "".join(stream.text_stream)
    count = client.messages.count_tokens(model="tiny", messages=MESSAGES)
    return {
        "text": "".join(block.text for block in message.content if block.type == "text"),
        "stream": text,
        "prompt": message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0),
        "count": count.input_tokens,
    }


question.main()
