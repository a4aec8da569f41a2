"""The vocabulary, as it is read from a model's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.llguidance import LlguidanceBackend
from banyan_runtime.grammar.vocabulary import Vocabulary
from banyan_runtime.wire import Grammar


def test_tokens_that_only_the_settings_name_are_added(tiny_chat: Path, tmp_path: Path) -> None:
    whole = Vocabulary.load(tiny_chat, 0, ())
    data = json.loads((tiny_chat / "tokenizer.json").read_text())
    last = data["added_tokens"].pop()
    assert last["id"] == max(entry["id"] for entry in data["added_tokens"]) + 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    assert last["content"] not in Vocabulary.load(tmp_path, 0, ()).added
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {str(last["id"]): last}}))
    assert Vocabulary.load(tmp_path, 0, ()).added == whole.added


@pytest.mark.parametrize(
    "content", [None, "", "{", "[]", '{"model": 7}', '{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "[" * 100_000]
)
def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(GrammarError, match="tokenizer"):
        LlguidanceBackend(Vocabulary.load(tmp_path, 100, [1])).compile(Grammar("regex", "a"))


def test_a_head_smaller_than_the_vocabulary_masks_what_it_has(tiny_chat: Path) -> None:
    from tests.unit.grammar.walks import Language

    language = Language.load(tiny_chat, padding=-37)
    matcher = language.matcher(Grammar("json_schema", '{"type":"string"}'), [])
    assert matcher.accept(language.ids('"')[0])
    assert 0 < max(language.admitted(matcher)) < language.vocabulary.size
