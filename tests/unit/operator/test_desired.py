"""Child objects: byte for byte as in golden/, valid for Kubernetes, within Pod Security restricted, with commands that the
runtime understands. `BANYAN_UPDATE_GOLDEN=1` writes the golden files anew; read the difference before committing it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from banyan_operator import api
from banyan_operator.api import SpecError
from banyan_operator.desired import batch, server
from banyan_operator.desired.batchjob import Order
from banyan_operator.desired.metadata import SPEC_HASH
from banyan_operator.desired.podtemplate import merged
from banyan_operator.desired.references import references
from banyan_operator.plan import Manifest, Ref, Settings
from banyan_runtime import arguments
from banyan_runtime.batch import options
from banyan_runtime.batch.lines import ENDPOINTS
from tests.unit.operator.conftest import LOCAL, SETTINGS, a_batch, a_server, an_own_server_batch

GOLDEN = Path(__file__).parent / "golden"
URL = "http://tiny--pods.team.svc:8000"
ALL_JOBS = (Order("plan"), Order("work"), Order("merge", partial="cancelled"))

EVERYTHING = a_server(
    "full",
    model={"servedNames": ["llama", "llama-1b"], "chatTemplate": {"name": "templates", "key": "chat.jinja"}},
    runtime={
        "image": "registry.example/custom:2",
        "imagePullPolicy": "Always",
        "imagePullSecrets": [{"name": "pull"}],
        "dtype": "bfloat16",
        "contextLength": 8192,
        "memoryPercent": 85,
        "kvCache": {"pageSize": 16, "maxTokens": 65536, "prefixCache": False},
        "maxRunningRequests": 64,
        "maxQueuedRequests": 512,
        "chunkedPrefillTokens": 0,
        "logLevel": "debug",
        "args": ["--schedule-policy=lpm"],
        "env": [{"name": "OMP_NUM_THREADS", "value": "2"}, {"name": "HOME", "value": "/tmp/home"}],
        "envFrom": [{"prefix": "X_", "configMapRef": {"name": "extra"}}],
    },
    replicas=2,
    accelerator={"count": 1, "products": ["NVIDIA-H100-80GB-HBM3"], "minMemoryMiB": 40000},
    resources={"requests": {"cpu": 8, "memory": "64Gi"}, "limits": {"memory": "96Gi"}},
    scheduling={
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]
                }
            }
        },
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
        "priorityClassName": "serving",
        "runtimeClassName": "nvidia",
    },
    sharedMemory="2Gi",
    cache={"type": "PersistentVolumeClaim", "size": "200Gi", "accessMode": "ReadWriteMany", "storageClassName": "fast", "retain": True},
    auth={"apiKeysSecretRef": {"name": "llama-keys"}},
    networkPolicy={
        "enabled": True,
        "from": [{"namespaceSelector": {"matchLabels": {"team": "search"}}}],
        "metricsFrom": [{"podSelector": {"matchLabels": {"app": "prometheus"}}}],
        "egress": [{"ports": [{"port": 3128, "protocol": "TCP"}]}],
    },
    metrics={
        "podMonitor": {"enabled": True, "additionalLabels": {"release": "p"}},
        "serviceMonitor": {"enabled": True, "interval": "1m"},
    },
    disruption={"minAvailable": "50%"},
    service={"type": "NodePort", "port": 8080, "annotations": {"a": "b"}, "labels": {"team": "search"}},
    ingress={"className": "nginx", "hosts": ["llm.example.com"], "tlsSecretName": "tls"},
    probes={"startupTimeoutSeconds": 61, "livenessPeriodSeconds": 20},
    drain={"terminationGracePeriodSeconds": 60, "preStopSeconds": 0},
    rollout={"maxSurge": 0, "maxUnavailable": "50%"},
    security={"runAsUser": 1000, "fsGroup": 2000},
    podTemplate={
        "metadata": {"labels": {"team": "search", "app.kubernetes.io/name": "not-yours"}, "annotations": {"note": "x"}},
        "spec": {"hostAliases": [{"ip": "10.0.0.1", "hostnames": ["s3"]}], "containers": [{"name": "server", "stdin": True}]},
    },
)

CASES: dict[str, Manifest] = {
    "server-minimal": a_server(resources={"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "4Gi"}}),
    "server-everything": EVERYTHING,
    "server-catalog-no-cache": a_server("fetched", model={"uri": "catalog://smollm2-135m"}, cache={"type": "None"}),
    "batch-serverref-claims": a_batch(apiKeySecretRef={"name": "key"}, modelName="llama"),
    "batch-serverref-s3": a_batch(
        input={"uri": "s3://batches/in/", "onInvalidLine": "Fail"},
        output={"uri": "s3://batches/out/", "overwrite": True},
        s3={
            "endpoint": "https://s3.storage.svc",
            "region": "us-east-1",
            "forcePathStyle": True,
            "credentialsSecretRef": {"name": "batch-store"},
            "caConfigMapRef": {"name": "ca"},
        },
        networkPolicy={"enabled": True},
        metrics={"podMonitor": {"enabled": True}},
        env=[{"name": "HTTPS_PROXY", "value": "http://proxy"}],
    ),
    "batch-own-server": an_own_server_batch(
        server={
            "accelerator": {"count": 1},
            "cache": {"type": "EmptyDir", "size": "20Gi"},
            "scheduling": {"nodeSelector": {"pool": "gpu"}},
            "probes": {"startupTimeoutSeconds": 900},
        },
        input={"uri": "pvc://models/in.jsonl"},
        resources={"requests": {"cpu": "100m"}},
    ),
}


def render(
    manifest: Manifest, settings: Settings = SETTINGS, live: Iterable[Manifest] = (), absent: frozenset[str] = frozenset()
) -> tuple[Manifest, ...]:
    parsed = api.parse(manifest)
    if isinstance(parsed, api.InferenceServer):
        return server.children(parsed, settings, live, absent)
    return batch.children(parsed, settings, ALL_JOBS, server_url=URL, live=live, absent=absent)


def workload(children: Iterable[Manifest], phase: str = "work") -> Manifest:
    """The Deployment, or the Job of this phase."""
    found = [child for child in children if child["kind"] in ("Deployment", "Job")]
    return next(one for one in found if one["kind"] == "Deployment" or one["metadata"]["name"].endswith(f"-{phase}"))


def pod_spec(children: Iterable[Manifest], phase: str = "work") -> dict[str, Any]:
    spec: dict[str, Any] = workload(children, phase)["spec"]["template"]["spec"]
    return spec


def pod_specs(children: Iterable[Manifest]) -> list[dict[str, Any]]:
    return [child["spec"]["template"]["spec"] for child in children if child["kind"] in ("Deployment", "Job")]


def containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [*spec.get("initContainers", []), *spec["containers"]]


def expand(container: dict[str, Any]) -> list[str]:
    """The command line as the kubelet makes it of args and env."""
    env = {variable["name"]: variable.get("value", "") for variable in container["env"]}

    def value(match: re.Match[str]) -> str:
        return "$" if match[1] == "$" else env[match[2]]

    return [re.sub(r"\$(\$|\(([^)]+)\))", value, arg) for arg in container["args"]]


@pytest.mark.parametrize("name", CASES)
def test_children_are_as_in_the_golden_file(name):
    text = yaml.safe_dump_all(render(CASES[name]), sort_keys=False, width=150)
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("BANYAN_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("way", ["w8a16", "w4a16"])
def test_quantization_is_asked_of_the_server(way):
    manifest = a_server(runtime={"quantization": way})
    assert not api.unsupported(api.parse(manifest), "cluster")
    assert f"--quantization={way}" in pod_spec(render(manifest))["containers"][0]["args"]


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_a_type_of_keys_and_values_is_asked_of_the_server(dtype):
    container = pod_spec(render(a_server(runtime={"kvCache": {"dtype": dtype}})))["containers"][0]
    assert arguments.parse(expand(container)).kv_cache_dtype == dtype


@pytest.mark.parametrize("name", CASES)
def test_equal_specs_give_byte_equal_children(name):
    again = json.loads(json.dumps(CASES[name]))
    again["spec"] = dict(reversed(again["spec"].items()))
    assert json.dumps(render(CASES[name])) == json.dumps(render(again))


@pytest.mark.parametrize("name", CASES)
def test_kubernetes_takes_every_child(name):
    for child in render(CASES[name]):
        if not child["apiVersion"].startswith("monitoring.coreos.com/"):  # no API of Kubernetes itself
            kubernetes_validate.validate(child, "1.36", strict=True)


@pytest.mark.parametrize("name", CASES)
def test_pods_pass_pod_security_restricted(name):
    for spec in pod_specs(render(CASES[name])):
        _is_restricted(spec)


def _is_restricted(spec: dict[str, Any]) -> None:
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["securityContext"].get("runAsUser") != 0
    assert [spec[key] for key in ("hostNetwork", "hostPID", "hostIPC")] == [False] * 3, "said: what is not, anybody may set"
    allowed = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
    assert all(set(volume) - {"name"} <= allowed for volume in spec["volumes"])
    for container in containers(spec):
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["privileged"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["readOnlyRootFilesystem"] is True
        assert not any("hostPort" in port for port in container["ports"])


@pytest.mark.parametrize("name", CASES)
def test_no_pod_gets_a_token_or_lists_a_claim_twice(name):
    for spec in pod_specs(render(CASES[name])):
        assert spec["automountServiceAccountToken"] is False
        claims = [volume["persistentVolumeClaim"]["claimName"] for volume in spec["volumes"] if "persistentVolumeClaim" in volume]
        assert len(claims) == len(set(claims))
        volumes = {volume["name"] for volume in spec["volumes"]}
        for container in containers(spec):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


@pytest.mark.parametrize("name", CASES)
def test_the_runtime_understands_every_command(name):
    for container in (one for spec in pod_specs(render(CASES[name])) for one in containers(spec)):
        argv = expand(container)
        assert not any("$(" in word for word in argv)
        if container["command"] == ["banyan-runtime", "serve"]:
            parsed = arguments.parse(argv)
            assert (parsed.host, parsed.port) == ("0.0.0.0", 8000)
        else:
            assert container["command"] == ["banyan-runtime", "batch"]
            run = options.parse(argv)
            assert (run.progress_host, run.progress_port) == ("0.0.0.0", 9100)


@pytest.mark.parametrize("name", ["server-everything", "batch-serverref-s3", "batch-own-server"])
def test_where_pods_are_reached_by_ipv6_they_listen_there_and_nothing_else_differs(name):
    usual, ipv6 = render(CASES[name]), render(CASES[name], replace(SETTINGS, listen="::"))
    for container in (one for spec in pod_specs(ipv6) for one in containers(spec)):
        hosts = [word.partition("=")[2] for word in expand(container) if re.match("--(progress-)?host=", word)]
        assert hosts == ["::"]
    texts = [json.dumps(one).replace('"value": "::"', '"value": "0.0.0.0"') for one in (usual, ipv6)]
    named_by_content = {found for text in texts for found in re.findall(r"\b[0-9a-f]{10}\b", text)}
    assert len({re.sub("|".join(named_by_content), "", text) for text in texts}) == 1


def test_what_the_spec_says_reaches_the_server():
    (container,) = pod_spec(render(EVERYTHING))["containers"]
    parsed = arguments.parse(expand(container))
    assert parsed.model_path == "/model/tiny-llama"
    assert parsed.names == ("llama", "llama-1b")
    assert (parsed.dtype, parsed.context_length, parsed.mem_fraction_static) == ("bfloat16", 8192, 0.85)
    assert (parsed.page_size, parsed.max_total_tokens, parsed.disable_radix_cache) == (16, 65536, True)
    assert (parsed.max_running_requests, parsed.max_queued_requests) == (64, 512)
    assert (parsed.chunked_prefill_size, parsed.log_level) == (-1, "debug")
    assert (parsed.schedule_policy, parsed.device) == ("lpm", "cuda")
    assert parsed.api_keys_file == "/secrets/api-keys/keys"
    assert parsed.chat_template == "/config/chat-template/chat.jinja"
    env = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert env["BANYAN_DRAIN_SECONDS"] == "55"  # grace 60, no preStop, 5 to end in
    assert env["HOME"] == "/tmp/home"


def test_what_the_spec_says_reaches_the_worker():
    (container,) = pod_spec(render(CASES["batch-serverref-s3"]))["containers"]
    run = options.parse(expand(container))
    assert (run.input, run.output, run.server) == ("s3://batches/in/", "s3://batches/out/", URL)
    assert (run.overwrite, run.on_invalid_line, run.endpoint) == (True, "fail", "/v1/chat/completions")
    assert (run.max_concurrency, run.request_timeout, run.max_attempts, run.max_backoff) == (64, 1800, 5, 60)
    env = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert env["AWS_ENDPOINT_URL_S3"] == "https://s3.storage.svc"
    assert env["BANYAN_S3_CREDENTIALS_DIR"] == "/secrets/s3"
    assert env["BANYAN_S3_FORCE_PATH_STYLE"] == "true"
    assert env["AWS_CA_BUNDLE"] == "/config/s3-ca/ca.crt"


@pytest.mark.parametrize("resume", [None, "0f3a-run.7"])
def test_every_phase_names_the_run_that_is_gone_on_with(resume):
    manifest = a_batch(output={"uri": "s3://batches/out/", **({"resume": resume} if resume else {})})
    for phase in ("plan", "work", "merge"):
        env = {one["name"]: one.get("value") for one in pod_spec(render(manifest), phase)["containers"][0]["env"]}
        assert env["BANYAN_RUN_ID"] == (resume or manifest["metadata"]["uid"].replace("-", "")[:12])


def test_what_the_spec_says_of_the_work_as_a_whole_reaches_each_phase():
    manifest = a_batch(
        input={"uri": None, "failedOf": "s3://batches/before/"},
        output={"uri": "s3://batches/out/", "allowUnfenced": True},
        sharding={"targetRequests": 7, "targetBytes": 65536},
        maxErrorPercent=5,
        priority=-3,
    )
    words = {phase: pod_spec(render(manifest), phase)["containers"][0]["args"] for phase in ("plan", "work", "merge")}
    for phase, args in words.items():
        assert {f"--phase={phase}", "--retry-failed=s3://batches/before/", "--output=s3://batches/out/"} <= set(args)
        assert {"--allow-unfenced", "--priority=-3"} <= set(args)
        assert not any(one.startswith("--input") for one in args)
    assert {"--workers=1", "--shard-requests=7", "--shard-bytes=65536", "--max-error-percent=5"} <= set(words["plan"])
    assert "--server=$(BANYAN_SERVER_URL)" in words["work"]
    assert "--partial=cancelled" in words["merge"]
    for phase in ("plan", "merge"):
        assert not any(one.startswith("--server") for one in words[phase])


def test_a_plan_and_a_merge_are_one_pod_each_and_have_no_server_beside_them():
    children = render(an_own_server_batch(output={"uri": "s3://out/x/"}, workers=4, podTemplate=SIDE))
    for phase, count in (("plan", 1), ("work", 4), ("merge", 1)):
        job = workload(children, phase)
        assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (count, count)
        names = [one["name"] for one in containers(job["spec"]["template"]["spec"])]
        assert names == (["server", "worker"] if phase == "work" else ["worker"])
        labels = job["spec"]["template"]["metadata"]["labels"]
        assert labels["app.kubernetes.io/component"] == job["metadata"]["labels"]["app.kubernetes.io/component"] == phase


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"requests": {"cpu": "100m", "memory": "256Mi"}}),
        ({"resources": {"requests": {"cpu": "2"}}}, {"requests": {"memory": "256Mi", "cpu": "2"}}),
        ({"resources": {"limits": {"memory": "128Mi"}}}, {"requests": {"cpu": "100m"}, "limits": {"memory": "128Mi"}}),
        (
            {"podTemplate": {"spec": {"containers": [{"name": "worker", "resources": {"limits": {"memory": "64Mi"}}}]}}},
            {"requests": {"cpu": "100m"}, "limits": {"memory": "64Mi"}},
        ),
    ],
)
def test_every_phase_of_a_batch_requests_a_little_unless_the_spec_says_more_or_less(given, expected):
    children = render(a_batch(**given))
    for phase in ("plan", "work", "merge"):
        (worker,) = pod_spec(children, phase)["containers"]
        assert worker["resources"] == expected


@pytest.mark.parametrize(
    ("containers", "field"),
    [
        ([{"name": "other", "image": "x"}, {"name": "worker", "args": ["--max-concurrency=4"]}], "containers[1].args"),
        ([{"name": "worker", "command": ["/bin/sh", "-ec", "exec banyan-runtime batch"]}], "containers[0].command"),
        ([{"name": "worker", "command": ["sh", "-c", 'exec banyan-runtime batch "$@"']}], "containers[0].command"),
    ],
)
def test_a_pod_template_cannot_take_from_the_worker_which_phase_it_is(containers, field):
    with pytest.raises(api.SpecError, match=re.escape(f"spec.podTemplate.spec.{field}: ")):
        render(a_batch(podTemplate={"spec": {"containers": containers}}))


@pytest.mark.parametrize(
    "command", [["tini", "--", "banyan-runtime", "batch"], ["sh", "-c", '. /etc/keys && exec banyan-runtime batch "$@"', "batch"]]
)
def test_a_pod_template_may_add_to_the_worker(command):
    worker = {"name": "worker", "command": command, "env": [{"name": "A", "value": "b"}]}
    children = render(a_batch(podTemplate={"spec": {"containers": [worker]}}))
    (worker,) = pod_spec(children, "plan")["containers"]
    assert {"name": "A", "value": "b"} in worker["env"]
    assert worker["command"] == command
    assert "--phase=plan" in worker["args"]


SIDE = {"spec": {"initContainers": [{"name": "server", "stdin": True}]}}


def test_a_worker_with_its_own_server_asks_it_and_waits_as_long_as_it_may_start():
    sidecar, worker = containers(pod_spec(render(CASES["batch-own-server"])))
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["startupProbe"]["failureThreshold"] * sidecar["startupProbe"]["periodSeconds"] == 900
    run = options.parse(expand(worker))
    assert run.server == "http://127.0.0.1:8000"
    assert run.server_timeout == 900
    assert (run.input, run.output) == ("/input/in.jsonl", "/output/out/")
    mounts = {mount["mountPath"]: mount for mount in worker["volumeMounts"]}
    assert mounts["/input"]["readOnly"] is True
    assert "readOnly" not in mounts["/output"]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_server_of_ones_own_serves_what_the_lines_ask_for(endpoint):
    resource = an_own_server_batch(endpoint=endpoint)
    assert not api.unsupported(api.parse(resource), "cluster")
    sidecar, worker = containers(pod_spec(render(resource)))
    assert options.parse(expand(worker)).endpoint == endpoint
    assert arguments.parse(expand(sidecar)).serves_vectors is (endpoint == "/v1/embeddings")


def test_no_argument_holds_a_literal_address_or_path_but_the_users_own():
    """Local mode rewrites env values; what stands in args it could not."""
    for manifest in CASES.values():
        for container in (one for spec in pod_specs(render(manifest)) for one in containers(spec)):
            own = [arg for arg in container["args"] if "$(" not in arg and not arg.startswith(("--endpoint", "--input=s3", "--output=s3"))]
            assert not any(re.search(r"=/|\d+\.\d+\.\d+\.\d+|:\d{4}", arg) for arg in own)


def test_a_dollar_in_a_users_path_is_not_taken_for_a_variable():
    children = render(a_batch(output={"uri": "pvc://batches/$(HOME)/"}))
    assert options.parse(expand(pod_spec(children)["containers"][0])).output == "/output/$(HOME)/"


def test_files_of_this_machine_reach_the_command_in_local_mode():
    children = render(a_server(model={"uri": "file:///models/tiny"}), LOCAL)
    assert arguments.parse(expand(pod_spec(children)["containers"][0])).model_path == "/models/tiny"
    children = render(a_batch(input={"uri": "file:///in.jsonl"}, output={"uri": "file:///out/"}), LOCAL)
    run = options.parse(expand(pod_spec(children)["containers"][0]))
    assert (run.input, run.output) == ("/in.jsonl", "/out/")


def test_an_accelerator_is_required_in_every_alternative_of_the_users_affinity():
    affinity = pod_spec(render(EVERYTHING))["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [expression["key"] for expression in term["matchExpressions"]] == ["zone", "nvidia.com/gpu.product", "nvidia.com/gpu.memory"]
    assert term["matchExpressions"][-1]["values"] == ["39999"]


@pytest.mark.parametrize(
    ("nodes", "path"),
    [
        ("x", "nodeAffinity"),
        ({"requiredDuringSchedulingIgnoredDuringExecution": [1]}, "nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"),
        (
            {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": {"a": 1}}},
            "nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms",
        ),
        (
            {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": ["a"]}},
            "nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0]",
        ),
        (
            {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": "a"}]}},
            "nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions",
        ),
    ],
)
def test_an_affinity_to_which_the_accelerator_cannot_be_added_is_refused_by_its_path(nodes, path):
    server = a_server(accelerator={"count": 1, "minMemoryMiB": 1}, scheduling={"affinity": {"nodeAffinity": nodes}})
    with pytest.raises(SpecError, match=re.escape(f"spec.scheduling.affinity.{path}: ")):
        render(server)


def test_a_pod_with_an_accelerator_tolerates_the_taint_of_that_name():
    def tolerated(**spec):
        return pod_spec(render(a_server(**spec))).get("tolerations")

    nodes = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    own = {"key": "team", "operator": "Equal", "value": "vision"}
    assert tolerated() is None
    assert tolerated(accelerator={"count": 1}) == [nodes]
    assert tolerated(accelerator={"count": 1, "resourceName": "amd.com/gpu"}) == [nodes | {"key": "amd.com/gpu"}]
    assert tolerated(accelerator={"count": 1}, scheduling={"tolerations": [own]}) == [own, nodes]
    for users in ({"key": "nvidia.com/gpu", "operator": "Exists"}, {"operator": "Exists"}):
        assert tolerated(accelerator={"count": 1}, scheduling={"tolerations": [users]}) == [users]


def test_the_spec_hash_moves_with_what_pods_see_and_with_nothing_else():
    def revision(manifest: Manifest) -> str:
        found: str = workload(render(manifest))["spec"]["template"]["metadata"]["annotations"][SPEC_HASH]
        return found

    plain = revision(a_server())
    assert revision(a_server(replicas=3, service={"port": 81}, rollout={"maxSurge": 2})) == plain
    assert revision(a_server(runtime={"contextLength": 4096})) != plain
    assert revision(a_server(podTemplate={"metadata": {"annotations": {"a": "b"}}})) != plain


def test_a_pod_template_is_merged_by_name_and_cannot_take_the_operators_labels():
    template = workload(render(EVERYTHING))["spec"]["template"]
    assert template["metadata"]["labels"]["app.kubernetes.io/name"] == "banyan-server"
    assert template["metadata"]["labels"]["team"] == "search"
    (container,) = template["spec"]["containers"]
    assert container["stdin"] is True
    assert container["command"] == ["banyan-runtime", "serve"]


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"containers": {"name": "server"}}, "spec.podTemplate.spec.containers"),
        ({"containers": [{"image": "x"}]}, "spec.podTemplate.spec.containers[0]"),
        ({"securityContext": []}, "spec.podTemplate.spec.securityContext"),
        ({"$patch": "replace"}, "spec.podTemplate.spec.$patch"),
    ],
)
def test_a_pod_template_that_cannot_be_merged_is_refused_with_its_field(spec, field):
    with pytest.raises(api.SpecError) as caught:
        render(a_server(podTemplate={"spec": spec}))
    assert caught.value.problems[0].field == field


def test_merging_replaces_plain_lists_and_removes_what_is_null():
    base = {"metadata": {}, "spec": {"tolerations": [{"key": "a"}], "restartPolicy": "Always", "containers": [{"name": "x", "env": []}]}}
    user = api.inferenceserver.PodTemplate(
        spec={"tolerations": [{"key": "b"}], "restartPolicy": None, "containers": [{"name": "y"}, {"name": "x", "env": [{"name": "A"}]}]}
    )
    spec = merged(base, user)["spec"]
    assert spec == {"tolerations": [{"key": "b"}], "containers": [{"name": "x", "env": [{"name": "A"}]}, {"name": "y"}]}
    assert base["spec"]["containers"] == [{"name": "x", "env": []}]


def test_what_must_exist_first_is_known_with_its_field():
    found = references(api.parse(EVERYTHING))
    assert found[Ref("v1", "Secret", "llama-keys")] == "spec.auth.apiKeysSecretRef"
    assert found[Ref("v1", "ConfigMap", "templates")] == "spec.model.chatTemplate"
    assert found[Ref("v1", "ConfigMap", "extra")] == "spec.runtime.envFrom[0].configMapRef"
    assert found[Ref("v1", "PersistentVolumeClaim", "models")] == "spec.model.uri"
    optional = a_server(runtime={"envFrom": [{"secretRef": {"name": "s", "optional": True}}]})
    assert Ref("v1", "Secret", "s") not in references(api.parse(optional))
