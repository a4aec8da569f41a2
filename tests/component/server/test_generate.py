"""SGLang's own calls: /generate and what stands beside it."""

from __future__ import annotations

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx2 as httpx
import pytest

from tests.support.server.process import ServerProcess, StartServer

GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
PROMPT = "The capital of France is"


def generate(server: ServerProcess, **body: Any) -> Any:
    response = httpx.post(f"{server.url}/generate", json=body, timeout=30)
    assert response.status_code == 200, response.text
    return response.json()


def events(server: ServerProcess, **body: Any) -> list[Any]:
    text = httpx.post(f"{server.url}/generate", json={**body, "stream": True}, timeout=30).text
    *found, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in found]


def tokenize(server: ServerProcess, prompt: Any, **options: Any) -> Any:
    return httpx.post(f"{server.url}/tokenize", json={"prompt": prompt, **options}).json()


def test_the_warm_up_call_of_the_seeds_answers(server: ServerProcess) -> None:
    answer = generate(server, text="The capital city of France is", sampling_params=GREEDY)
    meta = answer["meta_info"]
    assert (len(answer["output_ids"]), meta["completion_tokens"], meta["prompt_tokens"]) == (8, 8, 6)
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert meta["e2e_latency"] > 0


def test_text_and_ids_give_the_same_and_ids_decode_to_the_text(server: ServerProcess) -> None:
    tokens = tokenize(server, PROMPT)["tokens"]
    from_text = generate(server, text=PROMPT, sampling_params=GREEDY)
    from_ids = generate(server, input_ids=tokens, sampling_params=GREEDY)
    assert (from_text["text"], from_text["output_ids"]) == (from_ids["text"], from_ids["output_ids"])
    decoded = httpx.post(f"{server.url}/detokenize", json={"tokens": from_text["output_ids"]}).json()
    assert decoded["text"] == decoded["prompt"] == from_text["text"]
    assert httpx.put(f"{server.url}/generate", json={"text": PROMPT, "sampling_params": GREEDY}).json()["text"] == from_text["text"]


def test_a_stream_is_cumulative(server: ServerProcess) -> None:
    sampling = {**GREEDY, "max_new_tokens": 64}
    whole = generate(server, text=PROMPT, sampling_params=sampling)
    stream = events(server, text=PROMPT, sampling_params=sampling)
    assert 1 < len(stream) <= 64, "tokens that come while others are sent share an event"
    for before, after in itertools.pairwise(stream):
        assert after["text"].startswith(before["text"])
        assert len(after["output_ids"]) > len(before["output_ids"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
    assert (stream[-1]["text"], stream[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    assert stream[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


def test_lists_in_give_lists_out_in_order(server: ServerProcess) -> None:
    prompts = [PROMPT, "Count to"]
    answers = generate(server, text=prompts, sampling_params=[GREEDY, {**GREEDY, "max_new_tokens": 3}], rid="group")
    singles = [generate(server, text=prompt, sampling_params=GREEDY) for prompt in prompts]
    assert answers[0]["text"] == singles[0]["text"]
    assert answers[1]["output_ids"] == singles[1]["output_ids"][:3]
    assert [answer["meta_info"]["id"] for answer in answers] == ["group_0", "group_1"]
    assert isinstance(generate(server, text=[PROMPT], sampling_params=GREEDY), list)
    last = {event["index"]: event["text"] for event in events(server, text=prompts, sampling_params=GREEDY)}
    assert last == {index: single["text"] for index, single in enumerate(singles)}


def test_several_samples_of_one_prompt_are_a_list(server: ServerProcess) -> None:
    params = {"temperature": 2.0, "max_new_tokens": 12, "n": 2, "ignore_eos": True, "sampling_seed": 4}
    first, second = generate(server, text=PROMPT, sampling_params=params)
    assert first["text"] != second["text"]
    assert generate(server, text=PROMPT, sampling_params=params)[0]["text"] == first["text"]


def test_stop_tokens_and_strings_are_named_as_matched(server: ServerProcess) -> None:
    ids = generate(server, text=PROMPT, sampling_params=GREEDY)["output_ids"]
    stopped = generate(server, text=PROMPT, sampling_params={**GREEDY, "stop_token_ids": [ids[2]]})
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[2]}
    assert stopped["output_ids"] == ids[:3]
    paris = generate(server, text=PROMPT, sampling_params={**GREEDY, "stop": "aris"})
    assert (paris["text"], paris["meta_info"]["finish_reason"]) == (" P", {"type": "stop", "matched": "aris"})


def test_null_in_the_parameters_is_their_default(server: ServerProcess) -> None:
    nulls = dict.fromkeys(["stop", "top_p", "n", "regex", "stop_token_ids", "ignore_eos"])
    assert generate(server, text=PROMPT, sampling_params={**GREEDY, **nulls}, rid=None)["text"]
    assert generate(server, text=PROMPT, sampling_params=None)["meta_info"]["completion_tokens"] <= 128


@pytest.mark.usefixtures("slowed")
def test_a_request_is_aborted_by_its_id_and_all_by_none(server: ServerProcess) -> None:
    endless = {"temperature": 0, "max_new_tokens": 1900, "ignore_eos": True}
    pool = ThreadPoolExecutor(1)
    for abort in ({"rid": "long"}, {"abort_all": True}):
        server.until_idle()
        reader = pool.submit(generate, server, text="a", sampling_params=endless, rid="long")
        server.eventually(lambda: server.metric("banyan_requests_running") == 1, "a running request", 10)
        response = httpx.post(f"{server.url}/abort_request", json=abort)
        assert (response.status_code, response.content) == (200, b"")
        answer = reader.result(10)
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(answer["output_ids"]) < 1900
    assert httpx.post(f"{server.url}/abort_request", json={"rid": ""}).status_code == 200


@pytest.mark.parametrize("abort", [{"rid": "early"}, {"abort_all": True}])
def test_an_abort_reaches_a_request_that_is_still_being_planned(server: ServerProcess, abort: dict[str, Any]) -> None:
    endless = {"temperature": 0, "max_new_tokens": 1900, "ignore_eos": True}
    server.eventually(lambda: server.metric("banyan_http_requests_in_flight") == 1, "nothing but this scrape", 10)
    workers = server.zygote.children()
    for worker in workers:
        worker.suspend()
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(generate, server, text="a", sampling_params=endless, rid="early")
        try:
            server.eventually(lambda: server.metric("banyan_http_requests_in_flight") == 2, "the request and this scrape", 10)
            assert httpx.post(f"{server.url}/abort_request", json=abort).status_code == 200
        finally:
            for worker in workers:
                worker.resume()
        meta = early.result(20)["meta_info"]
    assert (meta["id"], meta["finish_reason"]["type"]) == ("early", "abort")
    assert generate(server, text="a", sampling_params={"max_new_tokens": 1}, rid="early")["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.usefixtures("slowed")
def test_a_list_is_aborted_by_the_id_that_its_client_gave_it_and_no_other(server: ServerProcess) -> None:
    endless = {"temperature": 0, "max_new_tokens": 1900, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        listed = pool.submit(generate, server, text=["a", "b"], sampling_params=endless, rid="a1")
        other = pool.submit(generate, server, text="a", sampling_params=endless, rid="a10")
        server.eventually(lambda: server.metric("banyan_requests_running") == 3, "running requests", 10)
        taken = httpx.post(f"{server.url}/generate", json={"text": "c", "rid": "a1"})
        assert (taken.status_code, taken.json()["error"]["param"]) == (400, "rid")
        assert httpx.post(f"{server.url}/abort_request", json={"rid": "a1"}).status_code == 200
        metas = [answer["meta_info"] for answer in listed.result(10)]
        assert [(meta["id"], meta["finish_reason"]["type"]) for meta in metas] == [("a1_0", "abort"), ("a1_1", "abort")]
        assert not other.done()
        httpx.post(f"{server.url}/abort_request", json={"rid": "a10"})
        assert other.result(10)["meta_info"]["finish_reason"]["type"] == "abort"
    assert generate(server, text="a", sampling_params={"max_new_tokens": 1}, rid="a1")["meta_info"]["id"] == "a1"


MESSAGES: Final[list[dict[str, Any]]] = [
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}], "foo": 1},
    {"role": "assistant", "content": "hello", "refusal": None, "annotations": [], "audio": None},
    {"role": "user", "content": "hi"},
]
IN_MESSAGES: Final = "messages[0].foo, messages[0].content[0].cache_control"


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/generate", {"text": "a", "return_logprobs": True, "foo": 1, "lora_path": None}, "return_logprobs, foo"),
        ("/generate", {"text": "a", "stream": True, "foo": 1}, "foo"),
        ("/generate", {"text": "a"}, None),
        ("/tokenize", {"prompt": "a", "foo": 1, "model": "default"}, "foo"),
        ("/tokenize", {"messages": MESSAGES}, IN_MESSAGES),
        ("/detokenize", {"tokens": [5], "foo": 1}, "foo"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, "bar": 1, "reasoning": {"summary": "auto"}},
         f"bar, {IN_MESSAGES}, reasoning.summary"),
        ("/v1/chat/completions", {"messages": MESSAGES[2:], "max_tokens": 1, "stream": True, "stream_options": {"foo": 1}},
         "stream_options.foo"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "", "x": 1}] * 300, "max_tokens": 1},
         ", ".join(f"messages[{index}].x" for index in range(20))),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_named_wherever_it_is(server: ServerProcess, path: str, body: dict[str, Any], named: str | None) -> None:
    response = httpx.post(server.url + path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers.get("x-banyan-ignored") == named


def test_an_answer_cannot_hold_any_number_of_log_probabilities(server: ServerProcess) -> None:
    body = {"text": ["a"] * 128, "sampling_params": {"max_new_tokens": 1900}, "return_logprob": True, "top_logprobs_num": 20}
    error = httpx.post(f"{server.url}/generate", json=body).json()["error"]
    assert (error["param"], error["code"]) == ("top_logprobs_num", "integer_above_max_value")


@pytest.mark.usefixtures("slowed")
def test_the_cache_is_flushed_unless_a_request_runs(server: ServerProcess) -> None:
    prompt = "one two three four five six"
    generate(server, text=prompt, sampling_params=GREEDY)
    assert generate(server, text=prompt, sampling_params=GREEDY)["meta_info"]["cached_tokens"] > 0
    flushed = server.http.post(f"{server.url}/flush_cache")
    assert (flushed.status_code, flushed.text.startswith("Cache flushed.\n")) == (200, True)
    assert generate(server, text=prompt, sampling_params=GREEDY)["meta_info"]["cached_tokens"] == 0
    server.until_idle()
    endless = {"temperature": 0, "max_new_tokens": 1900, "ignore_eos": True}
    thread = threading.Thread(target=generate, args=(server,), kwargs={"text": "a", "sampling_params": endless, "rid": "busy"})
    thread.start()
    server.eventually(lambda: server.metric("banyan_requests_running") == 1, "a running request", 10)
    refused = server.http.post(f"{server.url}/flush_cache")
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    httpx.post(f"{server.url}/abort_request", json={"rid": "busy"})
    thread.join(30)
    assert server.http.post(f"{server.url}/flush_cache?timeout=20").status_code == 200


def test_the_cache_is_flushed_by_get_too_but_not_by_a_web_page(server: ServerProcess) -> None:
    prompt = "seven eight nine ten eleven twelve"
    generate(server, text=prompt, sampling_params=GREEDY)
    page = httpx.get(f"{server.url}/flush_cache", headers={"Sec-Fetch-Site": "cross-site"})
    assert (page.status_code, page.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert generate(server, text=prompt, sampling_params=GREEDY)["meta_info"]["cached_tokens"] > 0
    for path in ("/flush_cache", "/flush_cache?timeout=1"):
        flushed = server.get(path)
        assert (flushed.status_code, flushed.text) == (200, "Cache flushed.\nPlease check backend logs for more details.\n")
    assert generate(server, text=prompt, sampling_params=GREEDY)["meta_info"]["cached_tokens"] == 0


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info_tells_what_is_served(server: ServerProcess, path: str) -> None:
    info = server.get(path).json()
    assert (info["architectures"], info["model_type"], info["is_generation"]) == (["Qwen3ForCausalLM"], "qwen3", True)
    assert info["model_path"].endswith("tiny-chat")
    assert (info["batch_invariant"], info["max_model_len"], info["context_length"]) == (True, 2048, 2048)
    assert {"tokenizer_path", "served_model_name", "preferred_sampling_params", "weight_version", "load_format", "reasoning_parser"} <= set(
        info
    )


def test_server_info_tells_every_option_and_the_version(server: ServerProcess) -> None:
    info = server.get("/get_server_info").json()
    assert info["random_seed"] == 0
    assert info["max_total_num_tokens"] > 0
    assert info["version"] == server.get("/version").json()["version"]
    assert info["internal_states"] == [{}]


def test_tokenize_counts_prompts_lists_and_messages(server: ServerProcess) -> None:
    one, two = tokenize(server, PROMPT), tokenize(server, [PROMPT, "Hi"])
    assert (one["count"], one["max_model_len"]) == (len(one["tokens"]), 2048)
    assert two["tokens"][0] == one["tokens"]
    strings = tokenize(server, "héllo 👋", return_token_strs=True)
    assert len(strings["token_strs"]) == strings["count"]
    messages = httpx.post(f"{server.url}/v1/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    back = httpx.post(f"{server.url}/v1/detokenize", json={"tokens": messages["tokens"], "skip_special_tokens": False}).json()["text"]
    assert back == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.long
def test_without_a_tokenizer_ids_alone_are_served(start_server: StartServer, server: ServerProcess) -> None:
    bare = start_server("--skip-tokenizer-init", "--stream-interval", "4").ready()
    ids = tokenize(server, PROMPT)["tokens"]
    answer = generate(bare, input_ids=ids, sampling_params=GREEDY)
    assert (answer["text"], answer["output_ids"]) == ("", generate(server, input_ids=ids, sampling_params=GREEDY)["output_ids"])
    lengths = [len(event["output_ids"]) for event in events(bare, input_ids=ids, sampling_params={**GREEDY, "max_new_tokens": 64})]
    assert len(lengths) > 1
    assert lengths == sorted(set(lengths))
    assert {length % 4 for length in lengths} == {0}
    assert lengths[-1] == 64
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for path, body in (("/generate", {"text": "a"}), ("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", chat)):
        refused = httpx.post(bare.url + path, json=body)
        assert refused.status_code == 400
        assert "--skip-tokenizer-init" in refused.json()["error"]["message"]
