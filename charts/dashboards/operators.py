"""The operator: its resources, reconciles, watches, calls and process."""

from typing import Final

from panels import Board, Panel, Variable, good_below, stat

OURS: Final = 'controller=~"inferenceserver|batchjob"'  # other operators have series of these names too
OF_OURS: Final = "and on (namespace, pod) banyan_operator_build_info"  # where no label tells
# An operator that stands by tells of resources too: one of equal series counts.
READY: Final = 'banyan_inferenceserver_status_condition{namespace=~"$namespace",condition="Ready",status="True"}'
REPLICAS: Final = 'max by (namespace, name, state) (banyan_inferenceserver_replicas{namespace=~"$namespace",state'

OPERATOR = Board(
    "banyan-operator",
    "Banyan / Operator",
    "Reconciles, queue, watches, API calls and the resources that the operator looks after.",
    [Variable("namespace", "Namespace", "label_values(banyan_inferenceserver_replicas, namespace)")],
    [
        (
            "Now",
            [
                stat("Leaders", "sum(banyan_operator_leader)", steps=((None, "red"), (1, "green")), width=4),
                stat("Reconciles", f"sum(rate(controller_runtime_reconcile_total{{{OURS}}}[$__rate_interval]))", "ops", width=4),
                stat(
                    "Errors",
                    f"sum(rate(controller_runtime_reconcile_errors_total{{{OURS}}}[$__rate_interval]))",
                    "ops",
                    steps=good_below(0.01, 0.1),
                    width=4,
                ),
                stat("Queue", f"sum(workqueue_depth{{{OURS}}})", steps=good_below(50, 500), width=4),
                stat(
                    "Servers not ready",
                    f"count(max by (namespace, name) ({READY}) == 0) or vector(0)",
                    steps=((None, "green"), (1, "orange")),
                    width=4,
                ),
                stat(
                    "Replicas missing",
                    f'sum({REPLICAS}="desired"}})) - sum({REPLICAS}="ready"}}))',
                    steps=((None, "green"), (1, "orange")),
                    width=4,
                ),
            ],
        ),
        (
            "Resources",
            [
                Panel(
                    "Replicas",
                    [
                        (
                            f'{REPLICAS}=~"desired|ready"}})',
                            "{{namespace}}/{{name}} {{state}}",
                        )
                    ],
                ),
                Panel(
                    "Conditions that are False",
                    [('max by (kind, condition) (banyan_operator_resources{status="False"})', "{{kind}} {{condition}}")],
                    text="Not every one is bad: Progressing is False when all is done.",
                ),
                Panel(
                    "Batches by phase",
                    [
                        (
                            'sum by (phase) (max by (namespace, name, phase) (banyan_batchjob_phase{namespace=~"$namespace"})) > 0',
                            "{{phase}}",
                        )
                    ],
                    stacked=True,
                ),
            ],
        ),
        (
            "Reconciles",
            [
                Panel(
                    "Reconciles by result",
                    [
                        (
                            f"sum by (controller, result) (rate(controller_runtime_reconcile_total{{{OURS}}}[$__rate_interval]))",
                            "{{controller}} {{result}}",
                        )
                    ],
                    "ops",
                ),
                Panel(
                    "Time of a reconcile",
                    [
                        (
                            f"histogram_quantile({q}, sum by (le, controller) "
                            f"(rate(controller_runtime_reconcile_time_seconds_bucket{{{OURS}}}[$__rate_interval])))",
                            f"p{q * 100:g} {{{{controller}}}}",
                        )
                        for q in (0.5, 0.99)
                    ],
                    "s",
                ),
                Panel(
                    "Failures",
                    [
                        (f"sum by (controller) (rate({metric}{{{OURS}}}[$__rate_interval]))", f"{{{{controller}}}} {what}")
                        for metric, what in (
                            ("controller_runtime_reconcile_errors_total", "errors"),
                            ("controller_runtime_terminal_reconcile_errors_total", "refused for good"),
                            ("controller_runtime_reconcile_panics_total", "bugs"),
                        )
                    ],
                    "ops",
                ),
                Panel("Queue depth", [(f"sum by (name) (workqueue_depth{{{OURS}}})", "{{name}}")]),
                Panel(
                    "Time in the queue p99",
                    [
                        (
                            "histogram_quantile(0.99, sum by (le, name) "
                            f"(rate(workqueue_queue_duration_seconds_bucket{{{OURS}}}[$__rate_interval])))",
                            "{{name}}",
                        )
                    ],
                    "s",
                ),
                Panel(
                    "Workers at work",
                    [
                        (f"sum by (controller) (controller_runtime_active_workers{{{OURS}}})", "{{controller}}"),
                        (f"max(controller_runtime_max_concurrent_reconciles{{{OURS}}})", "limit"),
                        (f"max(workqueue_longest_running_processor_seconds{{{OURS}}})", "oldest work, s"),
                    ],
                ),
            ],
        ),
        (
            "Watches and the API server",
            [
                Panel(
                    "Calls by status",
                    [
                        (
                            f"sum by (code, method) (rate(rest_client_requests_total[$__rate_interval]) {OF_OURS})",
                            "{{method}} {{code}}",
                        )
                    ],
                    "ops",
                    text="<error>: no answer.",
                ),
                Panel(
                    "Time of a call p99",
                    [
                        (
                            "histogram_quantile(0.99, sum by (le, verb) "
                            f"(rate(rest_client_request_duration_seconds_bucket[$__rate_interval]) {OF_OURS}))",
                            "{{verb}}",
                        )
                    ],
                    "s",
                ),
                Panel(
                    "Since a kind was last heard of",
                    [("time() - max by (kind) (banyan_operator_watch_last_event_timestamp_seconds)", "{{kind}}")],
                    "s",
                    text="Falls at each event and at the list every five minutes.",
                ),
                Panel(
                    "What watches missed",
                    [("sum by (kind) (rate(banyan_operator_resync_repairs_total[$__rate_interval])) or vector(0)", "{{kind}}")],
                    "ops",
                ),
                Panel(
                    "Objects put back after a change by others",
                    [("sum by (kind) (rate(banyan_operator_drift_total[$__rate_interval])) or vector(0)", "{{kind}}")],
                    "ops",
                ),
                Panel(
                    "Status writes that failed",
                    [
                        (
                            "sum by (kind, code) (rate(banyan_operator_status_patch_errors_total[$__rate_interval])) or vector(0)",
                            "{{kind}} {{code}}",
                        )
                    ],
                    "ops",
                ),
            ],
        ),
        (
            "Process",
            [
                Panel(
                    "CPU by pod",
                    [(f"sum by (pod) (rate(process_cpu_seconds_total[$__rate_interval]) {OF_OURS})", "{{pod}}")],
                    width=12,
                    text="Cores.",
                ),
                Panel(
                    "Resident memory by pod",
                    [(f"sum by (pod) (process_resident_memory_bytes {OF_OURS})", "{{pod}}")],
                    "bytes",
                    width=12,
                ),
            ],
        ),
    ],
)
