"""lm-eval with tasks of ours: no hub, no tokenizer but the server's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lm_eval
from asking import Questions
from lm_eval.tasks import TaskManager

question = Questions("lm-eval", "datasets")
MANAGER = TaskManager(include_defaults=False)  # reading the thousands that come along takes half a minute
LINES = str(Path(__file__).parent.parent / "tasks" / "capitals.jsonl")
COMMON: dict[str, Any] = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": LINES}},
    "test_split": "test",
    "metadata": {"version": 1},
}
CHOICE = {
    **COMMON,
    "task": "capitals_choice",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
TEXT = {
    **COMMON,
    "task": "capitals_text",
    "output_type": "generate_until",
    "doc_to_text": "What is the continuation of this? {{question}}",
    "doc_to_target": "{{text}}",
    "generation_kwargs": {"until": ["Question:", "Answer:", "###", "<stop>", "</s>", "Q:"], "max_gen_toks": 40},
    "metric_list": [{"metric": "exact_match"}],
}
ROLLING = {
    **COMMON,
    "task": "capitals_rolling",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{question}} {{text}}.",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
}


def evaluate(url: str, model: str, path: str, tasks: list[Any], **options: Any) -> Any:
    arguments = {"model": "tiny", "base_url": url + path, "num_concurrent": 3, "max_retries": 1, "max_length": 2048}
    return lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=tasks, task_manager=MANAGER, log_samples=True, bootstrap_iters=0, **options
    )


def samples(results: Any, task: str) -> Any:
    return [sample["filtered_resps"] for sample in results["samples"][task]]


@question
def completions(url: str) -> Any:
    results = evaluate(url, "local-completions", "/v1/completions", [CHOICE, TEXT, ROLLING])
    return {
        "metrics": {
            task: {key: float(value) for key, value in of.items() if "," in key and "stderr" not in key}
            for task, of in results["results"].items()
        },
        "choice": samples(results, "capitals_choice"),
        "text": samples(results, "capitals_text"),
        "rolling": samples(results, "capitals_rolling"),
    }


def scored(url: str, batch: int) -> Any:
    task = {**CHOICE, "num_fewshot": 2, "fewshot_split": "test"}
    return samples(evaluate(url, "local-completions", "/v1/completions", [task], batch_size=batch), "capitals_choice")


@question
def few_shot(url: str) -> Any:
    return scored(url, 4)


@question
def few_shot_again(url: str) -> Any:
    return scored(url, 1)


@question
def chat(url: str) -> Any:
    results = evaluate(url, "local-chat-completions", "/v1/chat/completions", [TEXT], apply_chat_template=True)
    return samples(results, "capitals_text")


if __name__ == "__main__":
    question.main()
