"""Whether a job is set up wrongly, decided from how its lines are refused."""

from __future__ import annotations

from banyan_runtime.batch.problems import error_code, missing_model
from banyan_runtime.batch.refusals import Expected, Refusals, Verdict

LINE, JOB, UNKNOWN = Verdict.LINE, Verdict.JOB, Verdict.UNKNOWN


def refused(refusals: Refusals, lines: int, model: str | None = None) -> list[Verdict]:
    return [refusals.refused(line, model, alone=False) for line in range(lines)]


def test_a_job_is_misconfigured_when_its_first_lines_are_all_refused_and_until_then_none_is_blamed() -> None:
    assert refused(Refusals(Expected(1000)), 8) == [UNKNOWN] * 7 + [JOB]
    assert refused(Refusals(Expected(1)), 1) == [JOB]


def test_the_same_lines_refused_again_are_no_proof_unless_nothing_else_is_being_served() -> None:
    refusals = Refusals(Expected(1000))
    assert {refusals.refused(1, None, alone=False) for _ in range(100)} == {UNKNOWN}
    assert [refusals.refused(1, None, alone=True) for _ in range(8)] == [UNKNOWN] * 7 + [JOB]


def test_once_a_line_was_served_a_refusal_blames_neither_the_line_nor_the_job() -> None:
    refusals = Refusals(Expected(1000))
    refused(refusals, 7)
    refusals.answered(200)
    assert refused(refusals, 50) == [UNKNOWN] * 50
    assert refused(Refusals(Expected(1000, served_before=True)), 50) == [UNKNOWN] * 50


def test_many_lines_refused_with_no_answer_between_them_are_told_from_a_few() -> None:
    refusals = Refusals(Expected(1000, served_before=True))
    refused(refusals, 7)
    for line in range(100, 200):
        refusals.refused(line, None, alone=True, known=True)
    assert not refusals.several, "lines that others passed by are known"
    refused(refusals, 8)
    assert refusals.several
    refusals.answered(200)
    assert not refusals.several


def test_models_are_missing_only_when_all_that_the_file_names_are_refused() -> None:
    refusals = Refusals(Expected(1000, frozenset({"a", "b"})))
    assert refused(refusals, 50, "a") == [UNKNOWN] * 7 + [LINE] * 43
    assert refused(refusals, 1, "b") == [JOB]
    assert JOB not in refused(Refusals(Expected(1000, None)), 50, "a"), "too many names to know"
    assert refused(Refusals(Expected(2, frozenset({"a"}))), 2, "a") == [UNKNOWN, JOB]


def test_a_missing_model_is_the_lines_own_error_unless_that_model_was_served() -> None:
    refusals = Refusals(Expected(1000, frozenset({"a", "b"})))
    refusals.answered(200, "a")
    refusals.answered(400, "b")
    assert refused(refusals, 1, "b") == [LINE]
    assert refused(refusals, 1, "a") == [UNKNOWN]
    only = Refusals(Expected(1000, frozenset({"a"}), served_before=True))
    assert refused(only, 1, "a") == [UNKNOWN]


OPENAI = b'{"error":{"message":"The model `a` does not exist.","type":"invalid_request_error","param":"model","code":"model_not_found"}}'
FLAT = b'{"object":"error","message":"The model `a` does not exist.","type":"NotFoundError","param":null,"code":404}'
NESTED = b'{"error":{"message":"The model `a` does not exist.","type":"NotFoundError","param":"model","code":404}}'


def test_a_missing_model_is_told_from_a_missing_path_in_every_servers_words() -> None:
    for answer in (OPENAI, FLAT, NESTED):
        assert missing_model(404, answer, b'{"model":"a"}') == "a"
        assert missing_model(404, answer, b"{}") == ""
        assert missing_model(404, answer, b'{"model":7}') == ""
        assert missing_model(401, answer, b'{"model":"a"}') is None
    for answer in (
        b'{"detail":"Not Found"}',
        b"<html>",
        b"[]",
        b'{"error":"no"}',
        b'{"error":{"type":"NotFoundError","message":"no path"}}',
    ):
        assert missing_model(404, answer, b'{"model":"a"}') is None


def test_the_code_of_an_error_is_read_where_there_is_one() -> None:
    assert error_code(b'{"error":{"code":"queue_full"}}') == "queue_full"
    assert [error_code(body) for body in (b'{"error":{"code":503}}', b'{"error":null}', b"", b"nonsense")] == [""] * 4
