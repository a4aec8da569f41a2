"""What /progress and /metrics say about a run, on a clock of the test's own."""

from __future__ import annotations

from banyan_runtime.batch.progress import Progress
from banyan_runtime.batch.records import Usage


def test_before_the_lines_are_counted_nothing_is_promised() -> None:
    report = Progress().report(now=100.0)
    assert (report.phase, report.total, report.percent, report.eta_seconds, report.requests_per_second) == ("starting", None, 0, None, 0.0)


def test_rates_and_time_left_follow_the_last_half_minute() -> None:
    progress = Progress()
    progress.begin(total=10_000, now=0.0)
    for second in range(1, 121):
        speed = 10 if second <= 60 else 50  # lines per second
        progress.completed += speed
        progress.usage.add(Usage(completion_tokens=speed * 20))
        report = progress.report(now=float(second))
    assert report.requests_per_second == 50.0
    assert report.tokens_per_second == 1000.0
    assert report.eta_seconds == (10_000 - 3_600) // 50 + 1
    assert report.percent == 36


def test_a_hundred_percent_means_published() -> None:
    progress = Progress()
    progress.begin(total=4, now=0.0)
    progress.completed, progress.failed = 3, 1
    progress.usage.add(Usage(prompt_tokens=100, completion_tokens=80))
    progress.end(now=2.0)
    report = progress.report(now=50.0)
    assert (report.phase, report.percent, report.eta_seconds) == ("publishing", 99, 0)
    progress.phase = "done"
    report = progress.report(now=99.0)
    assert (report.percent, report.requests_per_second, report.tokens_per_second) == (100, 2.0, 40.0)


def test_embeddings_count_the_tokens_that_were_read() -> None:
    progress = Progress()
    progress.begin(total=1, now=0.0)
    progress.usage.add(Usage(prompt_tokens=500, total_tokens=500))
    assert progress.report(now=10.0).tokens_per_second == 50.0


def test_every_series_is_there_from_the_start() -> None:
    text = Progress().prometheus()
    for sample in (
        'banyan_batch_lines_total{status="failed"} 0',
        "banyan_batch_line_retries_total 0",
        'banyan_batch_s3_errors_total{operation="multipart"} 0',
        'banyan_batch_s3_bytes_total{direction="write"} 0',
    ):
        assert sample in text.splitlines()
