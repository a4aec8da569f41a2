"""What /progress and /metrics say about a run, on a clock of the test's own."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from banyan_runtime.batch.metrics import Metrics
from banyan_runtime.batch.progress import Progress
from banyan_runtime.batch.records import Record, Usage
from banyan_runtime.batch.sender import Load


def test_before_the_lines_are_counted_nothing_is_promised() -> None:
    report = Progress().report(now=100.0)
    assert (report.phase, report.total, report.percent, report.eta_seconds, report.requests_per_second) == ("starting", None, 0, None, 0.0)


def test_rates_and_time_left_follow_the_last_half_minute() -> None:
    progress = Progress()
    progress.begin(total=10_000, now=0.0)
    for second in range(1, 121):
        speed = 10 if second <= 60 else 50  # lines per second
        progress.completed += speed
        for _ in range(speed):
            progress.did(Record("output", b"", Usage(completion_tokens=20)))
        report = progress.report(now=float(second))
    assert report.requests_per_second == 50.0
    assert report.tokens_per_second == 1000.0
    assert report.eta_seconds == (10_000 - 3_600) // 50 + 1
    assert report.percent == 36


def test_a_hundred_percent_means_published() -> None:
    progress = Progress()
    progress.begin(total=4, now=0.0)
    progress.completed, progress.failed = 3, 1
    for _ in range(4):
        progress.did(Record("output", b"", Usage(prompt_tokens=25, completion_tokens=20)))
    progress.end(now=2.0)
    report = progress.report(now=50.0)
    assert (report.phase, report.percent, report.eta_seconds) == ("publishing", 99, 0)
    progress.phase = "done"
    report = progress.report(now=99.0)
    assert (report.percent, report.requests_per_second, report.tokens_per_second) == (100, 2.0, 40.0)


def test_the_server_is_waited_for_only_while_there_are_lines_for_it() -> None:
    progress = Progress(ask_load=lambda: Load(waiting_for="the server"))
    progress.begin(total=1, now=0.0)
    assert progress.report(now=1.0).waiting_for == "the server"
    progress.end(now=2.0)
    assert progress.report(now=3.0).waiting_for == ""
    progress.waiting_for_storage = "the storage"
    progress.waiting_for_others = "other workers"
    assert progress.report(now=4.0).waiting_for == "the storage"


def test_embeddings_count_the_tokens_that_were_read() -> None:
    progress = Progress()
    progress.begin(total=1, now=0.0)
    progress.did(Record("output", b"", Usage(prompt_tokens=500, total_tokens=500)))
    assert progress.report(now=10.0).tokens_per_second == 50.0


def page(progress: Progress) -> dict[tuple[str, str, str], float]:
    """The samples of /metrics as Prometheus' own parser reads them, by type, name and the one label's `name=value`."""
    families = list(text_string_to_metric_families(Metrics(progress).text().decode()))
    assert all(family.documentation for family in families)
    return {
        (family.type, sample.name, "".join(f"{name}={value}" for name, value in sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_the_metrics_have_every_series_from_the_start_and_the_counters_of_now() -> None:
    progress = Progress()
    before = page(progress)
    progress.begin(total=20, now=0.0)
    progress.completed, progress.failed = 8, 2
    progress.ask_load = lambda: Load(in_flight=4, limit=5, retries=3)
    progress.usage.add(Usage(prompt_tokens=100, cached_tokens=60, completion_tokens=80))
    progress.storage_errors["put"] += 6
    progress.storage_bytes.update(read=7000, write=9000)
    expected = {
        ("counter", "banyan_batch_lines_total", "status=completed"): 8,
        ("counter", "banyan_batch_lines_total", "status=failed"): 2,
        ("counter", "banyan_batch_lines_total", "status=cancelled"): 0,
        ("counter", "banyan_batch_lines_total", "status=expired"): 0,
        ("gauge", "banyan_batch_lines_remaining", ""): 10,
        ("counter", "banyan_batch_line_retries_total", ""): 3,
        ("gauge", "banyan_batch_requests_in_flight", ""): 4,
        ("gauge", "banyan_batch_concurrency_limit", ""): 5,
        ("counter", "banyan_batch_tokens_total", "kind=prompt"): 100,
        ("counter", "banyan_batch_tokens_total", "kind=cached"): 60,
        ("counter", "banyan_batch_tokens_total", "kind=completion"): 80,
        ("counter", "banyan_batch_s3_errors_total", "operation=get"): 0,
        ("counter", "banyan_batch_s3_errors_total", "operation=put"): 6,
        ("counter", "banyan_batch_s3_errors_total", "operation=list"): 0,
        ("counter", "banyan_batch_s3_errors_total", "operation=head"): 0,
        ("counter", "banyan_batch_s3_errors_total", "operation=multipart"): 0,
        ("counter", "banyan_batch_s3_bytes_total", "direction=read"): 7000,
        ("counter", "banyan_batch_s3_bytes_total", "direction=write"): 9000,
    }
    assert before == dict.fromkeys(expected, 0)
    assert page(progress) == expected
