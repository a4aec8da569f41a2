"""Models that the transformers library computes over our pool give what the library gives by itself, or are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError, ModelError
from banyan_runtime.model import device as devices
from banyan_runtime.model.decoder import Decoder
from banyan_runtime.model.torch_forward import TorchForward
from banyan_runtime.model.transformers_backend.decoder import TransformersDecoder
from banyan_runtime.model.transformers_backend.kind import TransformersModel
from banyan_runtime.models.compared import COMPARED
from tests.support.models.driver import Driver, Request
from tests.support.models.library import ARCHITECTURES, LOCAL, make
from tests.support.models.tiny import COMMON, FAMILIES, VISION, VOCAB, TinyModel, gate

Models = Callable[[str], TinyModel]
REFUSED = ("granite4", "qwen2-vl", "qwen2.5-vl", "qwen3-vl")  # a class that may keep another state, and no class of the text decoder
CLOSE = 2e-3  # log probabilities; these models blow rounding up


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def assert_equal(model: TinyModel, requests: list[Request]) -> None:
    """Tokens are transformers' own, and so are the scores of all tokens, of prompts too."""
    for request in requests:
        assert request.output == model.choices(request.prompt, request.output), f"row {request.row}"
        with torch.inference_mode():
            scores = model.reference(torch.tensor([request.tokens])).logits[0].double().log_softmax(-1)
        wanted = scores[:-1].gather(1, torch.tensor(request.tokens[1:])[:, None])[:, 0].numpy()
        prompts, drawn = wanted[: len(request.prompt) - 1], wanted[len(request.prompt) - 1 :]
        found = [one.values for one in request.prompt_logprobs], [one.values for one in request.logprobs]
        if request.score_prompt:
            np.testing.assert_allclose(np.concatenate([*found[0], prompts[:0]]), prompts, atol=CLOSE)
        np.testing.assert_allclose(np.concatenate(found[1]), drawn, atol=CLOSE)


def play(model: TinyModel, page_size: int, shortest: int = 1) -> None:
    """A request alone, then a crowd with chunks, of which some start behind its beginning."""
    common = prompt(7, 100)
    first = asked(common + prompt(8, 9), new_tokens=24, row=0)
    shared = [asked(common[: 32 * i] + prompt(20 + i, 5), new_tokens=16, row=i) for i in (1, 2, 3)]
    crowd = [asked(prompt(i, shortest + 17 * (i - 4)), new_tokens=16, row=i, start=i - 4) for i in range(4, 9)]
    runner = model.load(model_impl="transformers", page_size=page_size)
    driver = Driver(runner, rows=9, context=256, page_size=page_size)
    driver.run([first])
    for i, request in enumerate(shared, 1):
        driver.share(first, request, 32 * i)
        assert request.computed == 32 * i
        request.score_prompt = False
    driver.run([*shared, *crowd], chunk=32 if page_size == 16 else 29)
    assert_equal(model, [first, *shared, *crowd])


def asked(tokens: list[int], **options: Any) -> Request:
    return Request(tokens, top_logprobs=0, score_prompt=True, **options)


@pytest.mark.parametrize("page_size", gate([16, 1]))
@pytest.mark.parametrize("architecture", gate(ARCHITECTURES, 2))
def test_a_crowd_with_chunks_and_cached_prefixes_equals_transformers(library_model: Models, architecture: str, page_size: int) -> None:
    play(library_model(architecture), page_size)


@pytest.mark.long
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in REFUSED])
def test_families_of_our_own_equal_transformers_through_it_too(tiny_model: Models, family: str) -> None:
    play(tiny_model(family), 16, shortest=40 if family == "phi3-longrope" else 1)  # which transformers computes otherwise


def test_the_compared_architectures_are_those_of_the_tests() -> None:
    own = {f"{name}ForCausalLM" for family, (name, _) in FAMILIES.items() if family not in VISION}
    assert {*ARCHITECTURES} | own == COMPARED


@pytest.mark.parametrize(
    ("implementation", "architecture", "decoder"),
    [
        ("auto", "MixtralForCausalLM", TransformersDecoder),
        ("auto", "LlamaForCausalLM", Decoder),
        ("transformers", "LlamaForCausalLM", TransformersDecoder),
    ],
)
def test_auto_takes_our_own_code_where_there_is_some(
    library_model: Models, implementation: str, architecture: str, decoder: type[object]
) -> None:
    forward = library_model(architecture).load(model_impl=implementation).forward
    assert isinstance(forward, TorchForward)
    assert isinstance(forward.decoder, decoder)


def test_a_family_with_a_config_that_our_code_does_not_read_is_computed_by_transformers(tmp_path: Path) -> None:
    model = make(tmp_path, "LlamaForCausalLM", hidden_act="gelu")
    with pytest.raises(ModelError, match="hidden_act=gelu"):
        model.load(model_impl="banyan")
    request = asked(prompt(1, 40), new_tokens=16, row=0)
    Driver(model.load(model_impl="auto"), rows=1, context=64).run([request])
    assert_equal(model, [request])


def test_auto_says_of_a_broken_config_what_the_family_says(tmp_path: Path) -> None:
    model = make(tmp_path, "LlamaForCausalLM")
    with pytest.raises(ModelError, match="num_key_value_heads=5"):
        model.load(json_model_override_args='{"num_key_value_heads": 5}')


def test_our_own_code_alone_refuses_what_is_no_family(library_model: Models) -> None:
    with pytest.raises(ModelError, match="architecture MixtralForCausalLM is not supported"):
        library_model("MixtralForCausalLM").load(model_impl="banyan")


def test_the_text_decoder_of_a_model_that_reads_images_serves_text(tmp_path: Path) -> None:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text = {"model_type": "mixtral", **COMMON, **LOCAL}
    config = transformers.LlavaConfig(
        vision_config={"model_type": "clip_vision_model", **vision}, text_config=text, image_token_id=1, tie_word_embeddings=False
    )
    torch.manual_seed(1)
    whole = transformers.LlavaForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path)
    request = asked(prompt(3, 40), new_tokens=16, row=0)
    model = TinyModel(tmp_path, whole)
    Driver(model.load(), rows=1, context=64).run([request])
    assert_equal(model, [request])


def test_dummy_weights_need_no_checkpoint(library_model: Models, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((library_model("MixtralForCausalLM").folder / "config.json").read_bytes())
    runner = TinyModel(tmp_path, None).load(load_format="dummy")
    request = asked(prompt(1, 20), new_tokens=4, row=0)
    Driver(runner, rows=1, context=64).run([request])
    assert runner.info.weights_bytes == 4 * sum(each.numel() for each in library_model("MixtralForCausalLM").reference.parameters())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (transformers.MambaConfig(architectures=["MambaForCausalLM"]), "MambaForCausalLM .*neither keys nor values"),
        (transformers.BloomConfig(architectures=["BloomForCausalLM"]), "BloomForCausalLM .*attention interface"),
        (
            transformers.Lfm2Config(architectures=["Lfm2ForCausalLM"], num_hidden_layers=2, layer_types=["conv", "full_attention"]),
            "convolution over tokens",
        ),
        (transformers.T5Config(architectures=["T5ForConditionalGeneration"]), "T5ForConditionalGeneration has an encoder"),
        (transformers.BertConfig(architectures=["BertForMaskedLM"]), "BertForMaskedLM"),
        (transformers.BertGenerationConfig(architectures=["BertGenerationDecoder"]), "attends to later tokens"),
        (transformers.Llama4TextConfig(architectures=["Llama4ForCausalLM"], num_hidden_layers=4), "masks other keys"),
        (transformers.DiffLlamaConfig(architectures=["DiffLlamaForCausalLM"], num_hidden_layers=2), "more than once"),
        (transformers.MixtralConfig(architectures=["MixtralForCausalLM"], num_hidden_layers=2000), "num_hidden_layers' is 2000"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.architectures[0],
)
def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path, config: Any, said: str) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=said):
        TinyModel(tmp_path, None).load(load_format="dummy")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}, "quantization_config .*gptq"),
        ({"model_type": "mixtral9"}, "model_type=mixtral9 is not known to transformers"),
        ({"model_type": "mixtral9", "auto_map": {"AutoConfig": "configuration.Own"}}, "--trust-remote-code"),
        ({"hidden_act": "own"}, "makes no model of it"),
        ({"hidden_size": "64"}, "hidden_size' is '64'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers' is 1000000000"),
        ({"max_position_embeddings": None}, "max_position"),
        ({"architectures": ["MixtralForSequenceClassification"]}, "no text decoder"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(library_model: Models, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    contents = json.loads((library_model("MixtralForCausalLM").folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(contents | changes))
    with pytest.raises(ModelError, match=said):
        TinyModel(tmp_path, None).load(load_format="dummy")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"runner": "native"}, "--runner"),
        ({"quantization": "w8a16"}, "--quantization"),
        ({"context_length": 1024}, "--context-length"),
        ({"autotune": True}, "--autotune"),
    ],
)
def test_options_of_our_own_code_are_refused(library_model: Models, options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        library_model("MixtralForCausalLM").load(**options)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda tensors: tensors.pop("model.layers.1.self_attn.q_proj.weight"), "q_proj.*missing"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}), "model.norm.weight"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.ones(VOCAB, 96, dtype=torch.float8_e4m3fn)}), "F8_E4M3"),
        (lambda tensors: tensors.clear(), "missing"),
    ],
    ids=["missing", "misshapen", "quantized", "none"],
)
def test_weights_that_contradict_the_config_are_refused(
    library_model: Models, tmp_path: Path, edit: Callable[[dict[str, torch.Tensor]], object], said: str
) -> None:
    model = library_model("MixtralForCausalLM")
    tensors = load_file(model.folder / "model.safetensors")
    edit(tensors)
    (tmp_path / "config.json").write_bytes((model.folder / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=said):
        TinyModel(tmp_path, None).load()


@pytest.mark.parametrize("form", ["auto", "dummy"])
def test_weights_for_which_there_is_no_memory_are_refused_before_they_are_read(
    library_model: Models, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(devices, "available_bytes", lambda device: 100_000)
    monkeypatch.setattr(TransformersModel, "__init__", None)
    with pytest.raises(ConfigError) as refused:
        library_model("MixtralForCausalLM").load(load_format=form)
    assert refused.value.code == "insufficient_memory"


def test_code_of_a_folder_runs_only_if_it_is_trusted(tmp_path: Path) -> None:
    transformers.MixtralConfig(**COMMON, **LOCAL).save_pretrained(tmp_path)
    contents = json.loads((tmp_path / "config.json").read_text())
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (tmp_path / "config.json").write_text(
        json.dumps(contents | {"auto_map": own, "model_type": "own", "architectures": ["OwnForCausalLM"]})
    )
    (tmp_path / "own.py").write_text(
        "from transformers import MixtralConfig, MixtralForCausalLM\n"
        "class OwnConfig(MixtralConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(MixtralForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = {"model_path": str(tmp_path), "load_format": "dummy"}
    assert not ServerConfig(**config).trust_remote_code
    with pytest.raises(ModelError, match="--trust-remote-code"):
        TinyModel(tmp_path, None).load(load_format="dummy")
    runner = TinyModel(tmp_path, None).load(load_format="dummy", trust_remote_code=True)
    assert runner.info.architecture == "OwnForCausalLM"
