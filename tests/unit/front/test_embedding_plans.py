"""What requests for vectors become, and what a model's files say of its vectors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from banyan_runtime import step, wire
from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError, ModelError, UserError
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.openai.vector_schema import UNSUPPORTED
from banyan_runtime.front.plan import AnswerPlan, EmbeddingPlan, Endpoint, LabelScorePlan, Plan, RerankPlan, ScorePlan
from banyan_runtime.front.prepare.planner import Planner
from banyan_runtime.front.prepare.worker_client import LENGTH, Planned, decode_message, framed
from banyan_runtime.front.text.embedding import Embedding
from banyan_runtime.front.text.text import Text
from banyan_runtime.front.text.tokenizer import Tokenizer as OurTokenizer
from tests.unit.front.support import engine_info

PLANS: dict[Endpoint, dict[str, Any]] = {
    "embeddings": {"input": ["one", "two"], "priority": -3, "encoding_format": "base64"},
    "score": {"text_1": "one", "text_2": ["two", "three"]},
    "rerank": {"query": "one", "documents": ["two", {"text": "three"}], "top_n": 1},
}


def planner(folder: Path, **options: Any) -> Planner:
    config = ServerConfig(model_path=str(folder), served_model_name=("tiny",), **options)
    text = Text.load(config, folder)
    return Planner(config, text, engine_info(vocab_size=text.model_config["vocab_size"]))


@pytest.fixture(scope="module")
def vectors(tiny_chat: Path) -> Planner:
    return planner(tiny_chat, enable_embeddings=True, pooling_type="cls")


def plan(planner: Planner, endpoint: Endpoint, body: dict[str, Any]) -> Plan:
    return planner.plan(endpoint, json.dumps(body).encode(), "request")


def refused(planner: Planner, endpoint: Endpoint, body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as error:
        plan(planner, endpoint, body)
    assert error.value.status in (400, 404)
    return error.value


def test_every_input_is_a_sequence_without_tokens_to_generate(vectors: Planner) -> None:
    made = plan(vectors, "embeddings", PLANS["embeddings"])
    assert isinstance(made, EmbeddingPlan)
    assert [request.pooling for request in made.requests] == [step.Pooling.CLS] * 2
    assert {request.sampling.max_new_tokens for request in made.requests} == {0}
    assert {request.priority for request in made.requests} == {-3}
    assert made.base64


def test_a_query_is_computed_once_for_all_that_it_is_compared_with(vectors: Planner) -> None:
    made = plan(vectors, "score", PLANS["score"])
    assert isinstance(made, ScorePlan)
    assert (len(made.requests), made.pairs) == (3, ((0, 1), (0, 2)))
    pairs = plan(vectors, "score", {"queries": ["one", "two"], "items": ["three", "four"]})
    assert isinstance(pairs, ScorePlan)
    assert (len(pairs.requests), pairs.pairs) == (4, ((0, 2), (1, 3)))
    ranked = plan(vectors, "rerank", PLANS["rerank"])
    assert isinstance(ranked, RerankPlan)
    assert (len(ranked.requests), ranked.documents) == (3, (b'{"text":"two"}', b'{"text":"three"}'))


def test_labels_stand_behind_their_prompt_and_are_scored_there(vectors: Planner) -> None:
    made = plan(vectors, "score", {"query": [1, 2], "items": [[3], [4, 5]], "label_token_ids": [7, 8]})
    assert isinstance(made, LabelScorePlan)
    prompts = [wire.unpack_ids(request.token_ids).tolist() for request in made.requests]
    assert prompts == [[1, 2, 3, 7], [1, 2, 3, 8], [1, 2, 4, 5, 7], [1, 2, 4, 5, 8]]
    assert [request.logprobs.prompt_from for request in made.requests if request.logprobs] == [3, 3, 4, 4]
    assert [request.told_tokens for request in made.requests] == [3, 0, 4, 0], "of each item once, and not its labels"


@pytest.mark.parametrize("first", ["one", {"text": "one"}])
def test_documents_are_texts_or_objects_in_any_mixture(vectors: Planner, first: Any) -> None:
    made = plan(vectors, "rerank", {"query": "a", "documents": [first, {"text": "two"}, "three"], "top_n": 10**30})
    assert isinstance(made, RerankPlan)
    assert made.documents == (b'{"text":"one"}', b'{"text":"two"}', b'{"text":"three"}')
    assert made.top_n == 3
    assert refused(vectors, "rerank", {"query": "a", "documents": ["b", {"title": "c"}]}).param == "documents[1].text"


@pytest.mark.parametrize("endpoint", PLANS)
def test_a_plan_crosses_whole(vectors: Planner, endpoint: Endpoint) -> None:
    made = plan(vectors, endpoint, PLANS[endpoint])
    told = decode_message.decode(framed(Planned.of(made, last=False))[LENGTH.size :])
    assert isinstance(told, Planned)
    assert told.whole() == made


@pytest.mark.parametrize("endpoint", PLANS)
def test_a_server_of_text_says_how_to_have_vectors(tiny_chat: Path, endpoint: Endpoint) -> None:
    error = refused(planner(tiny_chat), endpoint, PLANS[endpoint])
    assert "--enable-embeddings" in error.message
    assert error.code == "unsupported"


def test_a_server_of_vectors_plans_no_text(tiny_chat: Path) -> None:
    alone = planner(tiny_chat, is_embedding=True)
    without = {"tokenize", "detokenize", *PLANS}
    for endpoint in get_args(Endpoint):
        if endpoint not in without:
            error = refused(alone, endpoint, {})
            assert (error.code, "--is-embedding" in error.message) == ("unsupported", True), endpoint
    assert isinstance(plan(alone, "embeddings", {"input": "a"}), EmbeddingPlan)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_field_that_would_change_the_answer_is_refused_by_name(vectors: Planner, name: str) -> None:
    for value in UNSUPPORTED[name]:
        plan(vectors, "embeddings", {"input": "a", name: value})
    error = refused(vectors, "embeddings", {"input": "a", name: "something"})
    assert (error.code, error.param) == ("unsupported", name)


def test_another_model_and_fields_that_nobody_knows(vectors: Planner) -> None:
    assert refused(vectors, "embeddings", {"input": "a", "model": "other"}).code == "model_not_found"
    made = plan(vectors, "embeddings", {"input": "a", "user": "me", "colour": "red"})
    assert isinstance(made, EmbeddingPlan)
    assert made.envelope.ignored == ("colour",)


def ids_of(made: Plan) -> list[list[int]]:
    assert isinstance(made, EmbeddingPlan | RerankPlan | ScorePlan)
    return [wire.unpack_ids(request.token_ids).tolist() for request in made.requests]


def test_an_input_is_cut_to_so_many_tokens_where_that_is_asked_for(vectors: Planner) -> None:
    ids = [1 + at % 800 for at in range(2000)]
    (longest,) = ids_of(plan(vectors, "embeddings", {"input": [5] * 5000, "truncate_prompt_tokens": -1}))
    plan(vectors, "embeddings", {"input": longest})
    assert refused(vectors, "embeddings", {"input": [*longest, 5, 5]}).code == "context_length_exceeded"
    for side, kept in (("left", ids[-3:]), ("right", ids[:3])):
        assert ids_of(plan(vectors, "embeddings", {"input": ids, "truncate_prompt_tokens": 3, "truncation_side": side})) == [kept]
    assert ids_of(plan(vectors, "embeddings", {"input": [5, 6, 7], "truncate_prompt_tokens": 0})) == [[5, 6, 7]]
    assert refused(vectors, "embeddings", {"input": [5_000_000, 6], "truncate_prompt_tokens": 1}).param == "input"
    assert ids_of(plan(vectors, "score", {"text_1": [7, 8], "text_2": [9, 8, 7], "truncate_prompt_tokens": 2})) == [[7, 8], [8, 7]]
    for wrong in (-2, 10**30, len(longest) + 1):
        assert refused(vectors, "embeddings", {"input": "a", "truncate_prompt_tokens": wrong}).param == "truncate_prompt_tokens"
    assert refused(vectors, "embeddings", {"input": "a", "truncation_side": "middle"}).param == "truncation_side"
    labels = {"query": "a", "items": ["b"], "label_token_ids": [1], "truncate_prompt_tokens": 2}
    assert refused(vectors, "score", labels).param == "truncate_prompt_tokens"


def test_a_text_that_is_cut_keeps_the_special_tokens_around_it(tiny_chat: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_chat, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    ends = [(name, tokenizer.token_to_id(name)) for name in ("<|im_start|>", "<|im_end|>")]
    tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A <|im_end|>", special_tokens=ends)
    tokenizer.save(str(file))
    model = planner(tmp_path / "model", enable_embeddings=True)
    (whole,) = ids_of(plan(model, "embeddings", {"input": "one two three four"}))
    assert [whole[0], whole[-1]] == [token for _, token in ends]
    for side, kept in (("left", whole[-3:-1]), ("right", whole[1:3])):
        body = {"input": "one two three four", "truncate_prompt_tokens": 4, "truncation_side": side}
        assert ids_of(plan(model, "embeddings", body)) == [[whole[0], *kept, whole[-1]]]
    bare = {"input": "one two three four", "truncate_prompt_tokens": 2, "add_special_tokens": False}
    assert ids_of(plan(model, "embeddings", bare)) == [whole[-3:-1]]
    for few in (1, 2):  # no token of the text
        error = refused(model, "embeddings", {"input": "one two", "truncate_prompt_tokens": few})
        assert (error.param, error.code) == ("truncate_prompt_tokens", "integer_below_min_value")
        assert f" {few}" in error.message


@pytest.mark.parametrize("side", ["left", "right"])
def test_of_a_long_text_that_is_cut_only_what_may_be_kept_is_tokenized(
    vectors: Planner, tiny_chat: Path, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    text = " ".join(f"{number} words" for number in range(20_000))
    whole = OurTokenizer.load(tiny_chat).encode(text, add_special_tokens=False)
    encoded: list[int] = []
    true_encode = OurTokenizer.encode

    def encode(self: OurTokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        encoded.append(len(text))
        return true_encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(OurTokenizer, "encode", encode)
    body = {"input": text, "truncate_prompt_tokens": 100, "truncation_side": side}
    assert ids_of(plan(vectors, "embeddings", body)) == [whole[-100:] if side == "left" else whole[:100]]
    assert sum(encoded) < len(text) / 10


def test_a_conversation_has_one_vector_of_what_its_template_says(vectors: Planner) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Well"}]

    def tokenized(**options: Any) -> list[list[int]]:
        told = plan(vectors, "tokenize", {"messages": messages, **options})
        assert isinstance(told, AnswerPlan)
        return [json.loads(told.body)["tokens"]]

    for given, options in (
        ({}, {"add_generation_prompt": False}),
        ({"add_generation_prompt": True}, {}),
        ({"continue_final_message": True}, {"continue_final_message": True}),
    ):
        assert ids_of(plan(vectors, "embeddings", {"messages": messages, **given})) == tokenized(**options)
    assert refused(vectors, "embeddings", {"messages": messages, "input": "a"}).param == "messages"
    assert refused(vectors, "embeddings", {"messages": []}).param == "messages"
    assert refused(vectors, "embeddings", {"messages": [{"role": "clown", "content": "a"}]}).param == "messages[0].role"


@pytest.mark.parametrize("name", ["instruct", "instruction"])
def test_an_instruction_stands_before_the_query_alone(vectors: Planner, name: str) -> None:
    made = plan(vectors, "rerank", {"query": "Paris?", "documents": ["a", "b"], name: "Find cities"})
    written_out = {"input": ["Instruct: Find cities\nQuery: Paris?", "a", "b"]}
    assert ids_of(made) == ids_of(plan(vectors, "embeddings", written_out))
    empty = plan(vectors, "rerank", {"query": "Paris?", "documents": ["a"], name: ""})
    assert ids_of(empty) == ids_of(plan(vectors, "embeddings", {"input": ["Paris?", "a"]}))
    assert refused(vectors, "rerank", {"query": " ", "documents": ["a"], name: "x"}).param == "query"
    assert refused(vectors, "rerank", {"query": "a", "documents": ["a"], name: 5}).param == name
    both = {"query": "a", "documents": ["a"], "instruct": "x", "instruction": "y"}
    assert refused(vectors, "rerank", both).param == "instruction"
    for endpoint in ("embeddings", "score"):
        body = {"input": "a", "text_1": "a", "text_2": "b", name: "x"}
        assert refused(vectors, endpoint, body).code == "unsupported"  # type: ignore[arg-type]


def test_too_many_inputs_of_all_prompts_together_are_refused(vectors: Planner) -> None:
    assert refused(vectors, "rerank", {"query": "a", "documents": ["b"] * 2049}).param == "documents"
    assert refused(vectors, "score", {"query": "a", "items": ["b"] * 300, "label_token_ids": [1] * 7}).param == "items"


# --- the model's files ---


def written(folder: Path, modes: dict[str, Any] | None = None, modules: list[str] | None = None, **config: Any) -> Embedding:
    """What is read of a folder with these files; `modes`: of 1_Pooling/config.json."""
    flags = config.pop("flags", {})
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, **config}))
    if modes is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8, **modes}))
    if modules is not None:
        listed = [
            {"idx": at, "path": f"{at}_{name}" if at else "", "type": f"sentence_transformers.models.{name}"}
            for at, name in enumerate(modules)
        ]
        (folder / "modules.json").write_text(json.dumps(listed))
    options = ServerConfig(model_path=str(folder), is_embedding=True, **flags)
    return Embedding.load(options, folder, json.loads((folder / "config.json").read_text()))


def test_the_names_of_poolings_mean_the_same_to_the_model() -> None:
    assert {"last": step.Pooling.LAST, "mean": step.Pooling.MEAN, "cls": step.Pooling.CLS} == wire.POOLINGS


@pytest.mark.parametrize(
    ("prompts", "query"),
    [
        ({"query": "Instruct: Given a web search query, retrieve passages\nQuery:", "document": ""}, "Instruct: cities\nQuery:Paris?"),
        ({"document": "Represent: "}, "Instruct: cities\nQuery: Paris?"),
        ("none", "Instruct: cities\nQuery: Paris?"),
    ],
)
def test_an_instruction_is_told_as_in_the_models_own_prompt(tmp_path: Path, prompts: Any, query: str) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    assert written(tmp_path).instructed("Paris?", "cities") == query


@pytest.mark.parametrize(
    ("mode", "pooling"), [("pooling_mode_lasttoken", "last"), ("pooling_mode_mean_tokens", "mean"), ("pooling_mode_cls_token", "cls")]
)
def test_the_models_own_pooling_holds_unless_the_option_names_another(tmp_path: Path, mode: str, pooling: str) -> None:
    modes = {"pooling_mode_cls_token": False, "pooling_mode_max_tokens": False, mode: True}
    assert written(tmp_path, modes, ["Transformer", "Pooling", "Normalize"]).pooling == wire.POOLINGS[pooling]
    other = "mean" if pooling != "mean" else "last"
    assert written(tmp_path, flags={"pooling_type": other}).pooling == wire.POOLINGS[other]


def test_a_model_that_says_nothing_gives_its_last_tokens_vector(tmp_path: Path) -> None:
    assert written(tmp_path) == Embedding(wire.POOLINGS["last"], 8, None)


@pytest.mark.parametrize(
    ("files", "error", "said"),
    [
        ({"modules": ["Transformer", "Pooling"]}, ConfigError, "1_Pooling/config.json"),
        ({"modes": {"pooling_mode_max_tokens": True}}, ConfigError, "pooling_mode_max_tokens"),
        ({"modes": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}}, ConfigError, "pooling_mode"),
        (
            {"modules": ["Transformer", "Pooling", "Dense"], "modes": {"pooling_mode_cls_token": True}},
            ModelError,
            "'Dense'",
        ),
        ({"modules": ["Transformer", "Dense"], "flags": {"pooling_type": "last"}}, ModelError, "'Dense'"),
        ({"matryoshka_dimensions": [0]}, ModelError, "matryoshka_dimensions"),
    ],
    ids=["missing", "max", "two", "dense", "dense-whatever-the-option", "sizes"],
)
def test_files_that_ask_for_what_there_is_not_are_refused(tmp_path: Path, files: dict[str, Any], error: type[UserError], said: str) -> None:
    with pytest.raises(error, match=said):
        written(tmp_path, **files)


def test_vectors_are_cut_only_where_the_model_was_trained_for_it(tmp_path: Path) -> None:
    plain = Embedding(1, 8, None)
    plain.check(8)
    any_size = written(tmp_path, flags={"json_model_override_args": '{"is_matryoshka": true}'})
    any_size.check(3)
    listed = written(tmp_path, matryoshka_dimensions=[2, 4])
    listed.check(4)
    for embedding, dimensions in ((plain, 4), (any_size, 9), (any_size, 0), (listed, 3)):
        with pytest.raises(ApiError, match="dimensions") as error:
            embedding.check(dimensions)
        assert error.value.param == "dimensions"
