"""What the server is: /model_info, /server_info, /version, under SGLang's and vLLM's names."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime import __version__
from banyan_runtime.front.admission import admit
from banyan_runtime.front.answers import to_json
from banyan_runtime.front.context import Context


async def model_info(context: Context, request: Request) -> Response:
    admit(context)
    assert context.text is not None
    config, info, model = context.config, context.client.info, context.text.model_config
    return _json(
        {
            "model_path": config.model_path,
            "served_model_name": config.names[0],
            "tokenizer_path": config.tokenizer,
            "is_generation": config.serves_text,
            "preferred_sampling_params": config.preferred_sampling_params,
            "default_sampling_params": dict(context.text.defaults.openai),
            "weight_version": "default",
            "load_format": config.load_format,
            "revision": config.revision,
            "reasoning_parser": config.reasoning_parser,
            "tool_call_parser": None if context.text.tools is None else context.text.tools.names[0],
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": model.get("model_type", info.model_type),
            "architectures": model.get("architectures", [info.architecture]),
            "context_length": info.context_len,
            "max_model_len": info.max_model_len,
            "dtype": info.dtype,
            "batch_invariant": info.batch_invariant,
        }
    )


async def server_info(context: Context, request: Request) -> Response:
    """Every option as it is in force, secrets masked."""
    admit(context)
    info = context.client.info
    return _json(
        {
            **context.config.public(),
            "context_length": info.context_len,
            "max_total_num_tokens": info.max_total_tokens,
            "max_model_len": info.max_model_len,
            "max_req_input_len": info.max_req_input_len,
            "max_running_requests": info.max_running_requests,
            "device": info.device,
            "attention_backend": info.attention_backend,
            "startup_time": sum(context.state.phase_seconds.values()),
            "version": __version__,
            "internal_states": [{}],
        }
    )


async def tokenizer_info(context: Context, request: Request) -> Response:
    """The special tokens and the chat template, for clients that render and tokenize prompts themselves."""
    admit(context)
    assert context.text is not None
    tokenizer = context.text.needed_tokenizer
    return _json(
        {
            "tokenizer_class": tokenizer.settings.get("tokenizer_class"),
            **{name: tokenizer.named.get(name) for name in ("bos_token", "eos_token", "pad_token")},
            "chat_template": context.text.template_source,
        }
    )


async def version(context: Context, request: Request) -> Response:
    return _json({"version": __version__})


def _json(body: dict[str, Any]) -> Response:
    return Response(to_json(body), media_type="application/json")
