"""GGUF (llama architecture) to a model folder: config.json, model.safetensors in bfloat16, tokenizer.json, chat template.

Needs the package `gguf` (extra `fetch`). The layout of tensors and keys is that of the GGUF specification; query and key
rows come in the interleaved order of llama.cpp's rope and are put back into the half-split order of the safetensors world.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from banyan_runtime.errors import ConfigError, ModelError, UserError
from banyan_runtime.hub.progress import Bar, Report, silent

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

Field = Callable[[str], Any]

_MOST_PIECES: Final = 1_000_000  # of a header: the one tokenizer that can be converted takes 300,000; each costs 250 bytes and 13 us
_SHOWN_CHARACTERS: Final = 300  # of a library's own words


def convert(source: Path, folder: Path, report: Report = silent) -> None:
    """Write the model of the GGUF file `source` into the new folder `folder`.

    Raises ModelError for another architecture or tokenizer than this converter knows, and for a file that is damaged; then
    nothing is left of the folder.
    """
    try:
        import gguf
    except ImportError:
        raise ConfigError("converting a GGUF file needs the package gguf: pip install 'banyan-runtime[fetch]'") from None
    folder.mkdir(parents=True)
    try:
        _convert(gguf, source, folder, report)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, UserError | OSError) or not isinstance(error, Exception):
            raise
        words = " ".join(str(error).split())[:_SHOWN_CHARACTERS]  # whatever a damaged file makes the libraries raise
        raise ModelError(f"{source}: is damaged or cannot be converted ({type(error).__name__}: {words}); fetch it again") from error


def _convert(gguf: Any, source: Path, folder: Path, report: Report) -> None:
    reader = _bounded_reader(gguf)(source)

    def field(key: str) -> Any:
        found = reader.get_field(key)
        if found is None:
            raise ModelError(f"{source.name}: key '{key}' is missing")
        return found.contents()

    # Tensors that share their bytes would let a small file ask for any amount of memory.
    if (promised := sum(int(tensor.n_bytes) for tensor in reader.tensors)) > source.stat().st_size:
        raise ModelError(f"{source}: its tensors have {promised} bytes together, more than the file")
    config = _config(source, field, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    tensors: dict[str, npt.NDArray[np.uint16]] = {}
    with Bar(f"Converting {source.stem}", len(reader.tensors), unit="tensor", phase="loading", report=report) as bar:
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            if ".attn_q." in tensor.name:
                values = _half_split(values, config["num_attention_heads"])
            elif ".attn_k." in tensor.name:
                values = _half_split(values, config["num_key_value_heads"])
            tensors[_name(source, tensor.name)] = _bfloat16(values)
            bar.advance()
    _save(tensors, folder / "model.safetensors")
    _write(folder / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")})
    _write_tokenizer(source, folder, field)
    _write(folder / "config.json", config)  # last: its presence says that the folder is whole


def _bounded_reader(gguf: Any) -> Any:
    """The library's reader, with bounds: by itself it reads behind the end of the file, as nothing, for as long as a count says."""

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        _pieces = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, *more: Any, **options: Any) -> Any:
            found = super()._get(offset, dtype, count, *more, **options)
            self._pieces += 1
            if len(found) < int(count):
                raise ValueError(f"the file ends where {int(count)} values of {np.dtype(dtype)} should be, at byte {offset}")
            if self._pieces > _MOST_PIECES:
                raise ValueError(f"more than {_MOST_PIECES} values in its header")
            return found

    return Reader


def _name(source: Path, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    block, _, part = stem.removeprefix("blk.").partition(".")
    if not stem.startswith("blk.") or part not in _LAYER_NAMES:
        raise ModelError(f"{source.name}: tensor '{name}' is unknown to the llama architecture")
    return f"model.layers.{block}.{_LAYER_NAMES[part]}.{kind}"


def _half_split(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """[heads * dim, hidden] with rope pairs (2i, 2i+1) -> the same rows with pairs (i, i + dim/2)."""
    out, hidden = rows.shape
    return rows.reshape(heads, out // heads // 2, 2, hidden).swapaxes(1, 2).reshape(out, hidden)


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper halves of float32, rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _save(tensors: dict[str, npt.NDArray[np.uint16]], path: Path) -> None:
    """Write bfloat16 tensors as safetensors. The library takes bfloat16 from torch alone, and a server's front, which fetches
    models too, has no torch; the format is eight bytes of length, a JSON header and the data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, values in tensors.items():
        header[name] = {"dtype": "BF16", "shape": values.shape, "data_offsets": [end, end := end + values.nbytes]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data shall be aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in tensors.values():
            file.write(values.tobytes())


def _config(source: Path, field: Field, *, tied: bool) -> dict[str, Any]:
    architecture = field("general.architecture")
    if architecture != "llama":
        raise ModelError(f"{source.name}: general.architecture is '{architecture}'; only 'llama' can be converted")
    heads, hidden = field("llama.attention.head_count"), field("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": round(field("llama.attention.layer_norm_rms_epsilon"), 9),  # stored as float32
        "rope_parameters": {"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        "vocab_size": field("llama.vocab_size"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
    }


_CONTROL_TOKEN = 3
"""GGUF token type of special tokens."""


def _write_tokenizer(source: Path, folder: Path, field: Field) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if field("tokenizer.ggml.model") != "gpt2" or field("tokenizer.ggml.pre") != "smollm":
        raise ModelError(
            f"{source.name}: tokenizer '{field('tokenizer.ggml.pre')}' cannot be converted; only 'smollm' (byte-level BPE) can"
        )
    tokens: list[str] = field("tokenizer.ggml.tokens")
    kinds: list[int] = field("tokenizer.ggml.token_type")
    merges: list[tuple[str, str]] = []
    for merge in field("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[field("tokenizer.ggml.bos_token_id")],
            "eos_token": tokens[field("tokenizer.ggml.eos_token_id")],
            "unk_token": tokens[field("tokenizer.ggml.unknown_token_id")],
            "pad_token": tokens[field("tokenizer.ggml.padding_token_id")],
            "model_max_length": field("llama.context_length"),
            "clean_up_tokenization_spaces": False,
            "chat_template": field("tokenizer.chat_template"),
        },
    )


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
