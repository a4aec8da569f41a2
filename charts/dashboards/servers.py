"""Servers: traffic, latency, tokens, cache, load and engine, by pod."""

from panels import Board, Panel, Variable, good_below, percentiles, stat

# Probes and scrapes: a server that loads answers /readyz with 503, and pickers scrape 20 times a second.
WORK = 'handler!~"/(ping|livez|ready.*|health.*|metrics.*|load|v1/loads)?"'

RUNTIME = Board(
    "banyan-runtime",
    "Banyan / Servers",
    "Traffic, latency, tokens, cache and engine of InferenceServers.",
    [
        Variable("namespace", "Namespace", "label_values(banyan_requests_running, namespace)"),
        Variable("inferenceserver", "Server", 'label_values(banyan_requests_running{namespace=~"$namespace"}, inferenceserver)'),
        Variable(
            "pod",
            "Pod",
            'label_values(banyan_requests_running{namespace=~"$namespace",inferenceserver=~"$inferenceserver"}, pod)',
        ),
    ],
    [
        (
            "Now",
            [
                stat("Requests", "sum(rate(banyan_requests_total{S}[$__rate_interval]))", "reqps"),
                stat("Generated", "sum(rate(banyan_generation_tokens_total{S}[$__rate_interval]))", "tokens/s"),
                stat(
                    "TTFT p95",
                    "histogram_quantile(0.95, sum by (le) (rate(banyan_time_to_first_token_seconds_bucket{S}[$__rate_interval])))",
                    "s",
                    steps=good_below(1, 5),
                    text="From receipt to the first token.",
                ),
                stat(
                    "ITL p95",
                    "histogram_quantile(0.95, sum by (le) (rate(banyan_inter_token_latency_seconds_bucket{S}[$__rate_interval])))",
                    "s",
                    steps=good_below(0.1, 0.5),
                    text="Between two tokens of a request.",
                ),
                stat(
                    "Cache hits",
                    'sum(rate(banyan_prompt_tokens_total{S,source="cached"}[$__rate_interval]))'
                    " / (sum(rate(banyan_prompt_tokens_total{S}[$__rate_interval])) > 0)",
                    "percentunit",
                    text="Share of prompt tokens that the prefix cache gave.",
                ),
                stat("Waiting", "sum(banyan_requests_waiting{S})", steps=good_below(10, 50)),
                stat(
                    "5xx",
                    f'(sum(rate(banyan_http_requests_total{{S,code=~"5..",{WORK}}}[$__rate_interval])) or vector(0))'
                    f" / (sum(rate(banyan_http_requests_total{{S,{WORK}}}[$__rate_interval])) > 0)",
                    "percentunit",
                    steps=good_below(0.001, 0.02),
                    text="Share of HTTP answers, probes and scrapes left out.",
                ),
                stat(
                    "Pods not ready",
                    'count(banyan_engine_state{S,state="ready"} == 0) or vector(0)',
                    steps=((None, "green"), (1, "red")),
                    text="Of those that answer the scrape.",
                ),
            ],
        ),
        (
            "Traffic",
            [
                Panel(
                    "Requests by endpoint",
                    [("sum by (endpoint) (rate(banyan_requests_total{S}[$__rate_interval]))", "{{endpoint}}")],
                    "reqps",
                    stacked=True,
                ),
                Panel(
                    "Requests by end",
                    [("sum by (finish_reason) (rate(banyan_requests_total{S}[$__rate_interval]))", "{{finish_reason}}")],
                    "reqps",
                    stacked=True,
                ),
                Panel(
                    "Requests by pod",
                    [("sum by (pod) (rate(banyan_requests_total{S}[$__rate_interval]))", "{{pod}}")],
                    "reqps",
                    stacked=True,
                ),
                Panel(
                    "Errors by route and status",
                    [
                        (
                            'sum by (handler, code) (rate(banyan_http_requests_total{S,code=~"[45].."}[$__rate_interval])) > 0',
                            "{{code}} {{handler}}",
                        )
                    ],
                    "reqps",
                    text="HTTP answers of 400 and above.",
                ),
                Panel(
                    "Refused by reason",
                    [("sum by (reason) (rate(banyan_admission_rejections_total{S}[$__rate_interval]))", "{{reason}}")],
                    "reqps",
                    text="Requests that were not admitted.",
                ),
                Panel(
                    "HTTP in flight by pod",
                    [("sum by (pod) (banyan_http_requests_in_flight{S})", "{{pod}}")],
                ),
            ],
        ),
        (
            "Latency",
            [
                Panel("Time to first token", percentiles("banyan_time_to_first_token_seconds"), "s"),
                Panel("Inter-token latency", percentiles("banyan_inter_token_latency_seconds"), "s"),
                Panel("Request duration", percentiles("banyan_request_duration_seconds"), "s"),
                Panel("Queue, from receipt by the engine to admission", percentiles("banyan_queue_duration_seconds"), "s"),
                Panel("Prefill, from admission to the first token", percentiles("banyan_prefill_duration_seconds"), "s"),
                Panel(
                    "Time per output token, mean",
                    [
                        (
                            "sum by (inferenceserver) (rate(banyan_time_per_output_token_seconds_sum{S}[$__rate_interval]))"
                            " / sum by (inferenceserver) (rate(banyan_time_per_output_token_seconds_count{S}[$__rate_interval]))",
                            "{{inferenceserver}}",
                        )
                    ],
                    "s",
                    text="Of finished requests, without the first token.",
                ),
                Panel(
                    "Time to first token, by count",
                    [("sum by (le) (increase(banyan_time_to_first_token_seconds_bucket{S}[$__rate_interval]))", "{{le}}")],
                    "s",
                    "heatmap",
                    width=12,
                ),
                Panel("Time to first token p95 by pod", percentiles("banyan_time_to_first_token_seconds", "pod", of=[0.95]), "s", width=12),
            ],
        ),
        (
            "Tokens and prefix cache",
            [
                Panel(
                    "Tokens",
                    [
                        ("sum by (source) (rate(banyan_prompt_tokens_total{S}[$__rate_interval]))", "prompt, {{source}}"),
                        ("sum(rate(banyan_generation_tokens_total{S}[$__rate_interval]))", "generated"),
                    ],
                    "tokens/s",
                ),
                Panel(
                    "Generated by pod",
                    [("sum by (pod) (rate(banyan_generation_tokens_total{S}[$__rate_interval]))", "{{pod}}")],
                    "tokens/s",
                    stacked=True,
                ),
                Panel(
                    "Prefix cache hits by pod",
                    [
                        (
                            'sum by (pod) (rate(banyan_prompt_tokens_total{S,source="cached"}[$__rate_interval]))'
                            " / (sum by (pod) (rate(banyan_prompt_tokens_total{S}[$__rate_interval])) > 0)",
                            "{{pod}}",
                        )
                    ],
                    "percentunit",
                    most=1,
                    text="Share of prompt tokens.",
                ),
                Panel("Prompt length", percentiles("banyan_request_prompt_tokens", of=[0.5, 0.95]), text="Tokens of finished requests."),
                Panel(
                    "Output length", percentiles("banyan_request_generation_tokens", of=[0.5, 0.95]), text="Tokens of finished requests."
                ),
                Panel(
                    "Evicted from the prefix cache",
                    [("sum by (pod) (rate(banyan_prefix_cache_evicted_tokens_total{S}[$__rate_interval]))", "{{pod}}")],
                    "tokens/s",
                ),
            ],
        ),
        (
            "Load and KV cache",
            [
                Panel(
                    "Running by pod",
                    [
                        ("sum by (pod) (banyan_requests_running{S})", "{{pod}}"),
                        ("max(banyan_running_limit_requests{S})", "limit of a pod"),
                    ],
                ),
                Panel("Waiting by pod", [("sum by (pod) (banyan_requests_waiting{S})", "{{pod}}")]),
                Panel(
                    "Background requests",
                    [("sum by (state) (banyan_requests_background{S})", "{{state}}")],
                    text="Of a priority below 0, part of those that run or wait.",
                ),
                Panel(
                    "KV cache use by pod",
                    [("max by (pod) (banyan_kv_cache_usage_ratio{S})", "{{pod}}")],
                    "percentunit",
                    most=1,
                    text="Locked tokens over capacity; evictable ones are free.",
                ),
                Panel("KV cache tokens by state", [("sum by (state) (banyan_kv_cache_tokens{S})", "{{state}}")], stacked=True),
                Panel(
                    "Preemptions by pod",
                    [("sum by (pod) (rate(banyan_preemptions_total{S}[$__rate_interval]))", "{{pod}}")],
                    "ops",
                    text="Requests that went back to the queue because the KV cache was full; what they held is computed again.",
                ),
            ],
        ),
        (
            "Engine",
            [
                Panel(
                    "Where the engine's time goes",
                    [("sum by (stage) (rate(banyan_scheduler_seconds_total{S}[$__rate_interval]))", "{{stage}}")],
                    "percentunit",
                    text="Of each second, summed over pods; wait_device: the device computes and nothing else is done.",
                    stacked=True,
                ),
                Panel("Step duration", percentiles("banyan_step_duration_seconds", "phase", of=[0.5, 0.99]), "s"),
                Panel(
                    "Steps",
                    [("sum by (phase, graph) (rate(banyan_steps_total{S}[$__rate_interval]))", "{{phase}}, graph {{graph}}")],
                    "ops",
                ),
                Panel(
                    "Tokens per step, mean",
                    [
                        (
                            "sum by (phase) (rate(banyan_step_tokens_sum{S}[$__rate_interval]))"
                            " / (sum by (phase) (rate(banyan_step_tokens_count{S}[$__rate_interval])) > 0)",
                            "{{phase}}",
                        )
                    ],
                ),
                Panel(
                    "CPU by process",
                    [("sum by (component) (rate(banyan_process_cpu_seconds_total{S}[$__rate_interval]))", "{{component}}")],
                    text="Cores.",
                ),
                Panel(
                    "Resident memory by process",
                    [("sum by (component) (banyan_process_resident_memory_bytes{S})", "{{component}}")],
                    "bytes",
                ),
                Panel("Device memory", [("sum by (kind) (banyan_device_memory_bytes{S})", "{{kind}}")], "bytes", stacked=True),
                Panel(
                    "Since the last step, by pod",
                    [("time() - max by (pod) (banyan_engine_last_step_timestamp_seconds{S} > 0)", "{{pod}}")],
                    "s",
                    text="Grows while a server is idle; a defect only where requests run.",
                ),
                Panel("Pods by state", [("sum by (state) (banyan_engine_state{S})", "{{state}}")], stacked=True),
                Panel(
                    "Phases of the start, longest",
                    [("max by (phase) (banyan_startup_phase_seconds{S})", "{{phase}}")],
                    "s",
                    "bargauge",
                ),
            ],
        ),
        (
            "Grammars, keys, batches of /v1/batches",
            [
                Panel("Time to compile a grammar", percentiles("banyan_grammar_compile_seconds", of=[0.5, 0.99]), "s"),
                Panel(
                    "Grammars that could not be used",
                    [("sum by (reason) (rate(banyan_grammar_failures_total{S}[$__rate_interval]))", "{{reason}}")],
                    "ops",
                ),
                Panel(
                    "Requests by API key",
                    [("sum by (key) (rate(banyan_api_key_requests_total{S}[$__rate_interval]))", "{{key}}")],
                    "reqps",
                    stacked=True,
                    text="By the name that the key has in the file of keys.",
                ),
                Panel(
                    "Tokens by API key",
                    [("sum by (key, kind) (rate(banyan_api_key_tokens_total{S}[$__rate_interval]))", "{{key}}, {{kind}}")],
                    "tokens/s",
                ),
                Panel(
                    "Lines of batches by outcome",
                    [("sum by (status) (rate(banyan_batch_lines_total{S,inferenceserver!=''}[$__rate_interval]))", "{{status}}")],
                    "ops",
                    text="Of batches that this server runs for its clients.",
                ),
                Panel(
                    "Storage of files and batches",
                    [
                        (
                            "sum by (operation) (rate(banyan_batch_s3_errors_total{S,inferenceserver!=''}[$__rate_interval]))",
                            "failed: {{operation}}",
                        ),
                        ("sum(rate(banyan_batch_line_retries_total{S,inferenceserver!=''}[$__rate_interval]))", "lines tried again"),
                    ],
                    "ops",
                ),
            ],
        ),
    ],
)
