"""The models that are compared, as folders with safetensors and a tokenizer: made here with random weights, or fetched.

    python benchmarks/shapes.py [0.5b 7m smollm2]

Random weights soon repeat one token, which costs the same as any other. Folders are kept in ~/.cache/banyan/bench/models.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any, Final

from banyan_runtime.hub import resolve
from banyan_runtime.hub.gguf.conversion import convert

CACHE: Final = Path.home() / ".cache" / "banyan" / "bench"
CATALOG: Final = {"smollm2": "catalog://smollm2-135m"}
QWEN2: Final[dict[str, dict[str, Any]]] = {
    "0.5b": {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "vocab_size": 151_936, "max_position_embeddings": 32_768,
    },
    "7m": {
        "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 8192, "max_position_embeddings": 32_768,
    },
}  # fmt: skip
LLAMA3: Final = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
SHAPES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "0.5b": ("Qwen2", {**QWEN2["0.5b"], "tie_word_embeddings": True}),
    "qwen3-0.6b": ("Qwen3", {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True,
    }),
    "1b": ("Llama", {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "vocab_size": 128_256, "tie_word_embeddings": True, "rope_scaling": LLAMA3,
    }),
    "8b": ("Llama", {
        "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 128_256, "tie_word_embeddings": False, "rope_scaling": LLAMA3,
    }),
}  # fmt: skip
"""Of models that are measured on GPUs, with weights that nobody wrote down: class, and what its config.json says beside `describe`'s."""
RANDOM: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    **{name: ("Qwen2", {
        **shape, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }) for name, shape in QWEN2.items()},
    "gemma3-1b": ("Gemma3", {
        "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "vocab_size": 262_144, "max_position_embeddings": 32_768, "sliding_window": 512,
    }),
    "phi4-mini": ("Phi3", {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 24, "num_key_value_heads": 8,
        "vocab_size": 200_064, "max_position_embeddings": 131_072, "original_max_position_embeddings": 4096, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "short_factor": [1.0] * 48,
            "long_factor": [1.0 + index for index in range(48)],
        },
    }),
}  # fmt: skip
"""Models with random weights: the class in transformers, and its config."""
TITLES: Final = {
    "0.5b": "Qwen2.5-0.5B's shape, random weights",
    "7m": "Qwen2's shape with 7 M parameters, random weights",
    "smollm2": "SmolLM2-135M-Instruct",
    "gemma3-1b": "Gemma 3 1B's shape, random weights",
    "phi4-mini": "Phi-4-mini's shape with 8 of its 32 layers, random weights",
}
SPECIAL: Final = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BPE_ENTRIES: Final = 4000


def folder(name: str) -> Path:
    """The model's folder, in bfloat16; it is made or fetched first if it is not there. Raises ValueError for a name that there is not."""
    if name not in RANDOM and name not in CATALOG:
        raise ValueError(f"there is no model {name!r}; there are {', '.join([*RANDOM, *CATALOG])}")
    made = CACHE / "models" / name
    if not (made / "config.json").exists() and name in CATALOG:
        (file,) = resolve(CATALOG[name]).glob("*.gguf")
        convert(file, made)
    elif not (made / "config.json").exists():
        scratch = made.with_suffix(".making")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        _write_weights(*RANDOM[name], scratch)
        write_tokenizer(RANDOM[name][1]["vocab_size"], scratch)
        scratch.rename(made)
    return made


def describe(name: str, out: Path) -> None:
    """The config.json of one of SHAPES into the folder `out`, for `--load-format dummy`."""
    kind, shape = SHAPES[name]
    config = {
        "architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(), "max_position_embeddings": 16_384, "dtype": "bfloat16",
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config | shape))


def _write_weights(kind: str, shape: dict[str, Any], out: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    made = getattr(transformers, f"{kind}ForCausalLM")
    made(made.config_class(**shape, eos_token_id=0, bos_token_id=None, pad_token_id=None)).save_pretrained(out)
    torch.set_default_dtype(torch.float32)


def write_tokenizer(vocab_size: int, out: Path) -> None:
    """Byte-level BPE trained on words that are made up, then entries that no merge leads to, so that every id has a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    dice = random.Random(0)
    words = ["".join(dice.choices("etaoinshrdlucmfwypvbgk", k=dice.randint(2, 9))) for _ in range(20_000)]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_ENTRIES,
        special_tokens=[AddedToken(word, special=True) for word in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator([" ".join(words)], trainer)
    trained.decoder = decoders.ByteLevel()
    content = json.loads(trained.to_str())
    vocab = content["model"]["vocab"]
    for number in range(len(vocab), vocab_size):
        vocab[f"Ġw{number}"] = number
    (out / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False))
    (out / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": SPECIAL[0], "pad_token": SPECIAL[0], "chat_template": TEMPLATE})
    )


if __name__ == "__main__":
    for one in sys.argv[1:] or TITLES:
        print(folder(one))
