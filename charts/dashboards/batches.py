"""Batches: progress, rate, failures and the time left."""

from typing import Final

from panels import Board, Panel, Variable, stat

# Each worker counts the lines of all workers, as far as it knows: the most that one has seen is the whole.
RATE: Final = "max by (namespace, batchjob) (sum by (namespace, batchjob, pod) (rate(banyan_batch_lines_total{B}[WINDOW])))"
LEFT: Final = f"max by (namespace, batchjob) (banyan_batch_lines_remaining{{B}}) / ({RATE.replace('WINDOW', '5m')} > 0)"
# An operator that stands by tells of resources too: one of equal series counts.
LINES: Final = "max by (namespace, name, state) (banyan_batchjob_lines{J,state"
PHASES: Final = "max by (namespace, name, phase) (banyan_batchjob_phase{J"
DONE: Final = f'sum by (namespace, name) ({LINES}=~"completed|failed"}}))'
PROGRESS: Final = f'{DONE} / (sum by (namespace, name) ({LINES}="total"}})) > 0)'

BATCHES = Board(
    "banyan-batches",
    "Banyan / Batches",
    "Progress, rate, failures and end of BatchJobs. Counts are the operator's, which asks workers every 10 s; rates are the workers'.",
    [
        Variable("namespace", "Namespace", "label_values(banyan_batchjob_lines, namespace)"),
        Variable("batchjob", "Batch", 'label_values(banyan_batchjob_lines{namespace=~"$namespace"}, name)'),
    ],
    [
        (
            "Now",
            [
                stat("Running", f'sum({PHASES},phase=~"Planning|Running|Merging"}}))', width=4),
                stat("Lines left", f'sum({LINES}="total"}})) - sum({LINES}!="total"}}))', width=4),
                stat(
                    "Lines per second",
                    f"sum({RATE.replace('WINDOW', '$__rate_interval')})",
                    "ops",
                    width=4,
                ),
                stat(
                    "Failed lines",
                    f'sum({LINES}="failed"}}))',
                    width=4,
                    steps=((None, "green"), (1, "orange")),
                ),
                stat(
                    "Failed batches",
                    f'sum({PHASES},phase=~"Failed|Expired"}}))',
                    width=4,
                    steps=((None, "green"), (1, "red")),
                ),
                stat(
                    "Last one done in",
                    f"max({LEFT})",
                    "s",
                    width=4,
                    text="Lines left over the rate of the last five minutes, of the batch that takes longest.",
                ),
            ],
        ),
        (
            "Progress",
            [
                Panel(
                    "Progress",
                    [(PROGRESS, "{{namespace}}/{{name}}")],
                    "percentunit",
                    "bargauge",
                    most=1,
                    text="Lines with an outcome.",
                ),
                Panel(
                    "Progress over time",
                    [(PROGRESS, "{{namespace}}/{{name}}")],
                    "percentunit",
                    most=1,
                ),
                Panel(
                    "Time left",
                    [(LEFT, "{{namespace}}/{{batchjob}}")],
                    "s",
                    text="Lines left over the rate of the last five minutes.",
                ),
                Panel(
                    "Lines per second",
                    [(RATE.replace("WINDOW", "$__rate_interval"), "{{namespace}}/{{batchjob}}")],
                    "ops",
                    text="Each worker counts the lines of all workers, so the most that one has seen is the whole.",
                ),
                Panel(
                    "Tokens per second",
                    [
                        (
                            "max by (namespace, batchjob, kind) (rate(banyan_batch_tokens_total{B}[$__rate_interval]))",
                            "{{batchjob}}, {{kind}}",
                        )
                    ],
                    "tokens/s",
                ),
                Panel("Batches by phase", [(f"sum by (phase) ({PHASES}}})) > 0", "{{phase}}")], stacked=True),
            ],
        ),
        (
            "Failures",
            [
                Panel(
                    "Failed lines",
                    [('max by (namespace, name) (banyan_batchjob_lines{J,state="failed"})', "{{namespace}}/{{name}}")],
                ),
                Panel(
                    "Share of lines that failed",
                    [
                        (
                            f'max by (namespace, name) (banyan_batchjob_lines{{J,state="failed"}}) / ({DONE} > 0)',
                            "{{namespace}}/{{name}}",
                        )
                    ],
                    "percentunit",
                ),
                Panel(
                    "Tries beyond a line's first",
                    [
                        (
                            "sum by (namespace, batchjob) (rate(banyan_batch_line_retries_total{B}[$__rate_interval]))",
                            "{{namespace}}/{{batchjob}}",
                        )
                    ],
                    "ops",
                ),
            ],
        ),
        (
            "Workers and storage",
            [
                Panel(
                    "Requests in flight by worker",
                    [
                        ("sum by (pod) (banyan_batch_requests_in_flight{B})", "{{pod}}"),
                        ("max(banyan_batch_concurrency_limit{B})", "limit of a worker"),
                    ],
                    text="The limit falls while the server refuses or is away.",
                ),
                Panel(
                    "Storage traffic",
                    [("sum by (direction) (rate(banyan_batch_s3_bytes_total{B}[$__rate_interval]))", "{{direction}}")],
                    "Bps",
                ),
                Panel(
                    "Failed storage calls",
                    [("sum by (operation) (rate(banyan_batch_s3_errors_total{B}[$__rate_interval]))", "{{operation}}")],
                    "ops",
                ),
                Panel(
                    "Duration of finished batches, median",
                    [
                        (
                            "histogram_quantile(0.5, sum by (le, result) (increase(banyan_batchjob_duration_seconds_bucket[$__range])))",
                            "{{result}}",
                        )
                    ],
                    "s",
                    "bargauge",
                    width=12,
                    text="Of those that ended in the time range, over all namespaces.",
                ),
                Panel(
                    "Conditions that are False",
                    [('max by (condition) (banyan_operator_resources{kind="BatchJob",status="False"})', "{{condition}}")],
                    width=12,
                    text="Not every one is bad: Running is False when all is done.",
                ),
            ],
        ),
    ],
)
