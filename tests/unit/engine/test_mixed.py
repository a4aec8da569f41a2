"""Prompts and the next tokens of running requests in one step: the texts are those of steps apart."""

from __future__ import annotations

from tests.unit.engine.session import LOOPS, Session, limits


@LOOPS
def test_who_runs_gets_a_token_in_each_step_of_prompts(overlap: bool) -> None:
    session = Session(limits(overlap=overlap, mixed=True, pool_tokens=2000))
    session.submit([1, 2, 3], 60)
    session.turn()
    for number in range(8):
        session.submit([10 + number, 7, number], 30)
        session.turn()
    session.drain()
    kinds = "".join(phase[0] for phase, _, _ in session.runner.log)
    assert kinds.startswith("p" + "m" * 8 + "d")
    assert [(sequences, tokens) for _, sequences, tokens in session.runner.log[1:9]] == [(count + 1, count + 3) for count in range(1, 9)]
    session.check_texts()


def test_a_long_prompt_is_computed_beside_who_runs_in_pieces_that_leave_room_for_them() -> None:
    session = Session(limits(mixed=True, chunk=16, pool_tokens=2000))
    for number in range(3):
        session.submit([number, 1], 60)
    session.turn()
    session.submit([5] * 40, 4)
    for _ in range(4):
        session.turn()
    assert session.runner.log[1:5] == [("mixed", 4, 16), ("mixed", 4, 16), ("mixed", 4, 16), ("mixed", 4, 4)]
    assert max(tokens for _, _, tokens in session.runner.log) == 16
    session.drain()
    session.check_texts()


def test_prompts_go_alone_where_there_is_no_room_for_the_next_tokens_of_who_runs() -> None:
    session = Session(limits(mixed=True, pool_tokens=48, page_size=16, radix=False))
    session.submit([1] * 16, 16)
    session.turn()
    session.engine.scheduler.ratio.value = 0.0  # nothing is kept free for who runs
    session.submit([2] * 30, 1)
    for _ in range(3):
        session.turn()
    assert session.runner.log[:3] == [("prefill", 1, 16), ("prefill", 1, 30), ("decode", 1, 1)]
    session.drain()
    session.check_texts()


def test_background_prompts_are_computed_beside_nobody() -> None:
    session = Session(limits(mixed=True, pool_tokens=2000))
    session.submit([1, 2, 3], 600)
    session.submit([4, 5], 30, priority=-5)
    session.drain()
    assert "mixed" not in {phase for phase, _, _ in session.runner.log}
    session.submit([1, 2, 3], 60, priority=-5)
    session.turn()
    session.submit([8, 9], 3)
    session.turn()
    assert session.runner.log[-1] == ("prefill", 1, 2), "online prompts wait for nothing of background's"


def test_background_alone_gets_a_token_after_each_step_of_prompts_as_without() -> None:
    kinds = []
    for together in (False, True):
        session = Session(limits(mixed=together, pool_tokens=2000))
        session.submit([9], 60, priority=-5)
        session.turn()
        session.turn()
        for number in range(8):
            session.submit([10 + number] * 3, 60, priority=-5)
            session.turn()
        session.drain()
        kinds.append("".join(phase[0] for phase, _, _ in session.runner.log))
    assert kinds[0] == kinds[1]
    assert kinds[1].startswith("pdpdpdpd")


def test_where_more_run_than_half_a_step_has_tokens_prompts_and_they_take_turns() -> None:
    session = Session(limits(mixed=True, chunk=16, pool_tokens=2000))
    for number in range(12):
        session.submit([10 + number], 60)
    session.turn()
    session.submit([5] * 60, 4)
    session.drain()
    steps = session.runner.log[1:9]
    assert [phase for phase, _, _ in steps] == ["prefill", "decode"] * 4
    assert [tokens for phase, _, tokens in steps if phase == "prefill"] == [16, 16, 16, 12]
    session.check_texts()


def test_tokens_of_mixed_steps_count_as_generated_and_their_seconds_as_those_of_prompts() -> None:
    session = Session(limits(mixed=True, pool_tokens=2000, decode_log_interval=1))
    session.submit([1], 20)
    session.turn(1.0)
    session.submit([2], 20)
    session.turn(1.0)
    stats = session.engine.stats(session.now)
    assert (stats.prefill.steps, stats.decode.steps, stats.generation_tokens) == (2, 0, 3)
    session.turn(1.0)
    assert "gen throughput (token/s): 1.00" in session.lines[-1], "three tokens of who ran, in three seconds"
