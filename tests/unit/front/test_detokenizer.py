"""Text from tokens, delta by delta."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan_runtime.front.text.detokenizer import ByteDetokenizer, WindowDetokenizer
from banyan_runtime.front.text.tokenizer import Tokenizer
from tests.unit.front import support

MULTILINGUAL = [
    "Hello, world!",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "こんにちは 👋 你好 🙏 مرحبا नमस्ते",
    "👨‍👩‍👧‍👦 family, 🏳️‍🌈 flag, é combining, zero​width",
    "tab\tand\r\nlines\n\n   spaces  ",
]


def stream(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=options.get("skip", True))
    return [detokenizer.feed([token_id]) for token_id in ids] + [detokenizer.finish()]


def table(*deltas: bytes) -> ByteDetokenizer:
    return ByteDetokenizer(deltas, frozenset())


@pytest.mark.parametrize("text", MULTILINGUAL)
def test_a_streamed_text_is_the_text_and_no_piece_holds_half_a_character(text: str, bytes_tokenizer: Tokenizer) -> None:
    deltas = stream(bytes_tokenizer, bytes_tokenizer.encode(text, add_special_tokens=False))
    assert "".join(deltas) == text
    assert not any("�" in delta for delta in deltas)


@given(st.lists(st.integers(0, 258), max_size=40), st.data())
def test_however_ids_are_cut_the_text_is_that_of_all_at_once(ids: list[int], data: st.DataObject) -> None:
    deltas = [b"<eos>", b"", b"word ", *(bytes([byte]) for byte in range(256))]
    whole = ByteDetokenizer(deltas, frozenset({0}))
    expected = whole.feed(ids) + whole.finish()
    cut = ByteDetokenizer(deltas, frozenset({0}))
    parts, rest = [], ids
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        parts.append(cut.feed(rest[:size]))
        rest = rest[size:]
    assert "".join(parts) + cut.finish() == expected
    assert expected == b"".join(deltas[token_id] for token_id in ids if token_id != 0).decode("utf-8", "replace")


def test_a_character_in_two_tokens_comes_with_the_second() -> None:
    detokenizer = table(b"\xf0\x9f\x98", b"\x80")
    assert [detokenizer.feed([0]), detokenizer.feed([1]), detokenizer.finish()] == ["", "😀", ""]


def test_a_character_that_never_ends_becomes_one_replacement_when_the_next_begins() -> None:
    detokenizer = table(b"\xf0\x9f", b"hi")
    assert [detokenizer.feed([0]), detokenizer.feed([1])] == ["", "�hi"]


def test_an_impossible_byte_is_replaced_at_once() -> None:
    detokenizer = table(b"\xe4", b"\xbd", b"\xa0", b"\xff", b"A")
    assert [detokenizer.feed([token_id]) for token_id in range(5)] == ["", "", "你", "�", "A"]


def test_tokens_that_are_the_replacement_character_itself_do_not_stall_the_stream() -> None:
    detokenizer = table("�".encode())
    assert [detokenizer.feed([0]) for _ in range(3)] == ["�", "�", "�"]


def test_an_incomplete_character_at_the_end_is_released_as_a_replacement() -> None:
    detokenizer = table(b"ok\xe4\xbd")
    assert detokenizer.feed([0]) + detokenizer.finish() == "ok�"


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    assert table(b"a").feed([0, 7, -1, 0]) == "aa"


def test_special_tokens_are_left_out_unless_asked_for_or_needed_by_a_parser(bytes_tokenizer: Tokenizer) -> None:
    ids = bytes_tokenizer.encode("a<|im_end|>b", add_special_tokens=False)
    end = bytes_tokenizer.token_id("<|im_end|>")
    assert end is not None
    assert end in ids
    assert bytes_tokenizer.decode(ids, skip_special_tokens=True) == "ab"
    assert bytes_tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"
    assert bytes_tokenizer.detokenizer(skip_special_tokens=True, keep=frozenset({end})).feed(ids) == "a<|im_end|>b"


def test_byte_fallback_pieces_make_characters_and_a_continuation_keeps_its_space(pieces_tokenizer: Tokenizer) -> None:
    assert pieces_tokenizer.has_bytes
    ids = [pieces_tokenizer.token_id(delta) for delta in ("▁a", "b", "▁", "你", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "</s>")]
    assert "".join(stream(pieces_tokenizer, [token_id for token_id in ids if token_id is not None])) == " ab 你😀"


def test_a_vocabulary_without_bytes_is_decoded_over_a_window(words_tokenizer: Tokenizer) -> None:
    assert not words_tokenizer.has_bytes
    ids = words_tokenizer.encode("playing chess and chess !", add_special_tokens=False)
    assert "".join(stream(words_tokenizer, ids)) == "playing chess and chess !"
    assert words_tokenizer.decode(ids, skip_special_tokens=True) == "playing chess and chess !"


def test_a_window_gives_up_waiting_after_eight_tokens() -> None:
    detokenizer = WindowDetokenizer(lambda ids: "�" * bool(ids), frozenset())
    assert "".join(detokenizer.feed([token_id]) for token_id in range(40)) != ""


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_ids_and_text_equal_those_of_transformers(name: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(name.replace(".", "") + "_tokenizer")
    reference, ours = support.reference(folder), support.ours(folder)
    assert ours.has_bytes
    assert ours.eos_id == reference.eos_token_id
    for text in [*MULTILINGUAL, "<|im_start|>user\nhi<|im_end|>", "The capital city of France is"]:
        for special in (True, False):
            assert ours.encode(text, add_special_tokens=special) == reference.encode(text, add_special_tokens=special)
        ids = reference.encode(text)
        assert "".join(stream(ours, ids)) == reference.decode(ids, skip_special_tokens=True)
    dice = random.Random(1)
    for _ in range(100):
        ids = [dice.randrange(len(reference)) for _ in range(12)]
        assert ours.decode(ids, skip_special_tokens=False) == reference.decode(ids)


def test_tokens_named_only_in_the_configuration_are_known(tmp_path: Path) -> None:
    folder = support.byte_level(tmp_path, added_tokens_decoder={"259": {"content": "<extra>", "special": True}})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("a<extra>", add_special_tokens=False)[-1] == 259
    assert 259 in tokenizer.special_ids
