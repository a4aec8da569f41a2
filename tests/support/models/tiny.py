"""Tiny random models of each supported architecture, saved by transformers itself and loaded by ours, and the instruction sets that
the native runner is tried with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers

from banyan_runtime.config import ServerConfig
from banyan_runtime.model import host
from banyan_runtime.model.native import variants
from banyan_runtime.model.runner import ModelRunner
from banyan_runtime.model.runners import load
from tests.support.models import interpreted

VOCAB = 503
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 12.0],
}  # fmt: skip
"""transformers takes the short factors up to the original context, and the long ones beyond; every text is longer than this one."""
TWO_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 96, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3, "eos_token_id": None, "bos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32, "num_key_value_heads": 6}),
    "mistral-window": ("Mistral", {"sliding_window": 37}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "num_key_value_heads": 3}),
    "qwen3-yarn": ("Qwen3", {"head_dim": 32, "num_key_value_heads": 3, "rope_parameters": YARN}),
    "ministral": (
        "Ministral",
        {
            "head_dim": 16,
            "sliding_window": 37,
            "layer_types": TWO_KINDS,
        },
    ),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 32,
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 40,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "phi3": (
        "Phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}, "sliding_window": 60},
    ),
    "phi3-longrope": ("Phi3", {"original_max_position_embeddings": 32, "rope_parameters": LONGROPE}),
    "granite": (
        "Granite",
        {
            "attention_multiplier": 0.4,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "mlp_bias": True,
            "attention_bias": True,
        },
    ),
    "granite4": (
        "GraniteMoeHybrid",
        {
            "layer_types": ["attention"] * 3,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 176,
            "position_embedding_type": "rope",
            "mamba_n_heads": 4,
            "attention_multiplier": 0.4,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "olmo2": ("Olmo2", {"num_key_value_heads": 3}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 37,
            "layer_types": TWO_KINDS,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": YARN,
            },
        },
    ),
    "seed-oss": (
        "SeedOss",
        {"head_dim": 32, "attention_out_bias": True, "mlp_bias": True, "residual_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "exaone4": ("Exaone4", {"sliding_window": 37, "layer_types": TWO_KINDS}),
    "glm4": ("Glm4", {"head_dim": 32, "num_key_value_heads": 2}),
    "cohere2": ("Cohere2", {"sliding_window": 37, "layer_types": TWO_KINDS, "logit_scale": 0.3}),
    "starcoder2": ("Starcoder2", {"sliding_window": 37, "tie_word_embeddings": False}),
    "ernie": ("Ernie4_5", {"head_dim": 32, "use_bias": True}),
    "hunyuan": (
        "HunYuanDenseV1",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 10000.0,
                "alpha": 50.0,
                "factor": 1.0,
            },
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "sliding_window": 37,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 9.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "sliding_window": 37,
            "layer_types": TWO_KINDS,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 37,
            "num_key_value_heads": 3,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "layer_types": [*TWO_KINDS, "full_attention"],
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 9.0,
        },
    ),
    "gemma4-shared": (
        "Gemma4",
        {
            "num_hidden_layers": 5,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 37,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 24,
            "vocab_size_per_layer_input": VOCAB,
            "use_double_wide_mlp": True,
        },
    ),
}
_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
_QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 96}
VISION: dict[str, dict[str, Any] | None] = {
    "mistral3-tower": _SMALL | {"model_type": "pixtral", "head_dim": 16},
    "ministral3-tower": _SMALL | {"model_type": "pixtral", "head_dim": 16},
    "qwen2-vl": {"depth": 1, "embed_dim": 32, "hidden_size": 96, "num_heads": 2},
    "qwen2.5-vl": _QWEN,
    "qwen3-vl": _QWEN | {"deepstack_visual_indexes": []},
    "gemma3-tower": _SMALL,
    "gemma4-tower": None,
}
"""Families whose decoder reads text beside a tower for images, and the tower's config."""
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
FAMILIES |= {
    "mistral3-tower": ("Mistral3ForConditionalGeneration", {"model_type": "mistral", "head_dim": 16, "sliding_window": None}),
    "ministral3-tower": (
        "Mistral3ForConditionalGeneration", {
            "model_type": "ministral3", "head_dim": 16, "rope_parameters": FAMILIES["ministral3"][1]["rope_parameters"],
        },
    ),
    "qwen2-vl": ("Qwen2VLForConditionalGeneration", {"rope_parameters": _MROPE}),
    "qwen2.5-vl": ("Qwen2_5_VLForConditionalGeneration", {"rope_parameters": _MROPE}),
    "qwen3-vl": ("Qwen3VLForConditionalGeneration", {"head_dim": 16, "rope_parameters": _MROPE}),
    "gemma3-tower": ("Gemma3ForConditionalGeneration", FAMILIES["gemma3"][1]),
    "gemma4-tower": ("Gemma4ForConditionalGeneration", FAMILIES["gemma4-shared"][1] | {"pad_token_id": 0}),
}  # fmt: skip
MECHANISMS: Final = (
    "llama3-rope", "qwen3", "mistral-window", "ministral3", "phi3-longrope", "granite", "smollm3", "olmo3", "glm4", "cohere2", "starcoder2",
    "hunyuan", "gemma2", "gemma4-shared", "qwen3-vl",
)  # fmt: skip
"""One family for each thing that a spec can say; the gate compares these."""
WIDE = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "initializer_range": 0.05}
"""Changes that bring a model to a real one's widths, where rounding depends on the number of rows if one lets it."""
HERE: Final = [variant.name for variant in variants.usable(host.instruction_sets())]
WIDEST: Final = variants.usable(host.instruction_sets())[0]
PAIRS: Final = variants.Variant("pairs", WIDEST.needs, (*WIDEST.options, "-DBANYAN_PAIRS"), WIDEST.machine)
"""As where processors multiply bfloat16: activations are rounded to it, before they meet weights in pairs."""
ROUNDING: Final = HERE if "avx512bf16" in HERE else [*HERE, PAIRS.name]


def gate(values: Iterable[Any], first: int = 1) -> list[Any]:
    """For `parametrize` and for `params` of a fixture: the gate takes the first of these values. Along several axes, the first of each."""
    return [value if at < first else pytest.param(value, marks=pytest.mark.long) for at, value in enumerate(values)]


ON_A_GPU: Final = (
    pytest.mark.gpu,
    pytest.mark.long,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
)
DEVICES = ["cpu", pytest.param("cuda", marks=ON_A_GPU)]


@pytest.fixture(autouse=True, scope="session")
def _few_threads() -> None:
    """Two test workers share two cores."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpreted.hasten()


TIE: Final = 1e-4
"""Logits of about 10 in float32 that are nearer than this are equal; two processors were seen to disagree about 1.3e-5."""


@dataclass
class TinyModel:
    """A folder with a checkpoint, and the transformers model that wrote it."""

    folder: Path
    reference: Any
    runner = "torch"

    def generate(self, prompt: list[int], new_tokens: int) -> list[int]:
        """transformers' own greedy continuation, token by token; it ends behind an EOS token."""
        with torch.inference_mode():
            out = self.reference.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=new_tokens, do_sample=False,
            )  # fmt: skip
        return list(out[0, len(prompt) :].tolist())

    def choices(self, prompt: list[int], output: list[int]) -> list[int]:
        """What transformers would choose for each token of `output`, given all before it.

        They equal `output` exactly when `output` is the greedy continuation: by induction from the first token. One pass
        instead of one a token. Of two that are as good as each other (`TIE`), the one of `output`: which of them is a hair ahead
        depends on the order of additions, and so on the processor.
        """
        with torch.inference_mode():
            logits = self.reference(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        chosen = torch.tensor(output)[:, None]
        tied = logits.amax(-1) - logits.gather(1, chosen)[:, 0] < TIE
        return list(torch.where(tied, chosen[:, 0], logits.argmax(-1)).tolist())

    def load(self, **options: Any) -> ModelRunner:
        settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_total_tokens": 8192, "runner": self.runner} | options
        if settings["device"] != "cpu":
            settings["runner"] = "torch"
            settings.setdefault("cuda_graph_max_tokens", 48)  # so that graphs are captured in little time, and some prompts go without
            settings.setdefault("chunked_prefill_size", 64)  # so are the largest steps tried
            settings.setdefault("max_running_requests", 8)
        runner = load(ServerConfig(model_path=str(self.folder), **settings), self.folder, lambda *_: None)
        assert isinstance(runner, ModelRunner)
        return runner


def make(folder: Path, family: str, **changes: Any) -> TinyModel:
    name, options = FAMILIES[family]
    model_class = getattr(transformers, name if family in VISION else f"{name}ForCausalLM")
    options = COMMON | options | changes
    if family in VISION:
        options = {"text_config": options, "vision_config": VISION[family], "tie_word_embeddings": False}
    torch.manual_seed(len(family))
    reference = model_class(model_class.config_class(**options)).eval()
    with torch.no_grad():
        for parameter_name, parameter in reference.named_parameters():
            if parameter_name.endswith("embed_tokens.weight") and family.startswith("gemma"):
                parameter.mul_(0.1)  # else a token that is its own head is followed by itself
            if parameter.ndim == 1:  # biases start as zero and norms as one: both would hide mistakes
                parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter_name.endswith("norm.weight") else 0.0))
        for name, buffer in reference.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.8)
    reference.save_pretrained(folder)
    return TinyModel(folder, reference)


@pytest.fixture(params=["torch", "native"])
def either_runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Models of the test are loaded with one runner, then with the other."""
    monkeypatch.setattr(TinyModel, "runner", request.param)
    return str(request.param)


@pytest.fixture(params=gate(HERE))
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(variants.VARIABLE, request.param)
    return str(request.param)


@pytest.fixture(params=gate(ROUNDING))
def variant_or_pairs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(variants, "VARIANTS", (PAIRS, *variants.VARIANTS))
    monkeypatch.setenv(variants.VARIABLE, request.param)
    return str(request.param)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    made: dict[str, TinyModel] = {}

    def get(family: str) -> TinyModel:
        if family not in made:
            name = family.removesuffix("-576")
            made[family] = make(tmp_path_factory.mktemp(family), name, **(WIDE if family != name else {}))
        return made[family]

    return get


@pytest.fixture(scope="session")
def shallow_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Likewise, of one layer: what it is about is not what layers leave one another, and Triton's interpreter takes long for each."""
    made: dict[str, TinyModel] = {}

    def get(family: str) -> TinyModel:
        if family not in made:
            made[family] = make(tmp_path_factory.mktemp(family), family, num_hidden_layers=1)
        return made[family]

    return get


def resident_bytes() -> int:
    """Memory of this process that was written."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
