"""The life of a pod, by a fake clock."""

from __future__ import annotations

from typing import Any

import pytest

from banyan_operator.local.containers import LONGEST_BACKOFF_S

READY = {"httpGet": {"path": "/readyz", "port": 8000}}


def one(**more: Any) -> dict[str, Any]:
    return {"containers": [{"name": "server", "command": ["x"], **more}], "terminationGracePeriodSeconds": 30}


def state(driver: Any, name: str = "server") -> dict[str, Any]:
    status = driver.pod.status(driver.now)
    entries = [*status["containerStatuses"], *status.get("initContainerStatuses", [])]
    found: dict[str, Any] = next(entry for entry in entries if entry["name"] == name)
    return found


def ready_condition(driver: Any) -> str:
    return str(next(c["status"] for c in driver.pod.status(driver.now)["conditions"] if c["type"] == "Ready"))


def test_a_crashing_container_restarts_at_once_then_after_10_20_40_seconds_and_never_more_than_300(lead_pod: Any) -> None:
    driver = lead_pod(one())
    waits = []
    for _ in range(9):
        driver.exits("server", 1)
        crashed = driver.now
        driver.pass_time(LONGEST_BACKOFF_S + 1 if driver.pod.due() else 0)
        waits.append(driver.starts("server")[-1] + 1_000_000.0 - crashed)
    assert waits == [0, 10, 20, 40, 80, 160, 300, 300, 300]


def test_the_back_off_is_forgotten_after_ten_good_minutes(lead_pod: Any) -> None:
    driver = lead_pod(one())
    for _ in range(3):
        driver.exits("server", 1)
        driver.pass_time(60)
    driver.pass_time(601)
    driver.exits("server", 1)
    assert driver.pod["server"].running, "it restarts at once, as after a first crash"


def test_a_waiting_container_says_crashloopbackoff_and_keeps_its_last_end(lead_pod: Any) -> None:
    driver = lead_pod(one())
    driver.exits("server", 3)
    driver.exits("server", 3)
    seen = state(driver)
    assert seen["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    assert seen["lastState"]["terminated"]["exitCode"] == 3
    assert seen["restartCount"] == 1


def test_a_pod_is_ready_only_after_its_startup_and_readiness_probes_passed(lead_pod: Any) -> None:
    probes = {"startupProbe": {**READY, "periodSeconds": 5, "failureThreshold": 100}, "readinessProbe": {**READY, "periodSeconds": 5}}
    driver = lead_pod(one(**probes), answers={("server", "startup"): False})
    driver.pass_time(60)
    assert not state(driver)["started"]
    assert ready_condition(driver) == "False"
    driver.answers["server", "startup"] = True
    driver.pass_time(1)
    assert state(driver)["started"]
    assert ready_condition(driver) == "True", "readiness is asked the moment the start-up probe has passed"


def test_a_startup_probe_that_never_passes_ends_the_container_after_its_threshold_of_periods(lead_pod: Any) -> None:
    driver = lead_pod(one(startupProbe={**READY, "periodSeconds": 5, "failureThreshold": 6}), answers={("server", "startup"): False})
    driver.pass_time(29)
    assert driver.starts("server") == [0.0]
    driver.pass_time(3)
    assert (30.0, "term server") in driver.log
    assert len(driver.starts("server")) == 2


def test_a_failed_liveness_probe_restarts_the_container_and_says_so(lead_pod: Any) -> None:
    driver = lead_pod(one(livenessProbe={**READY, "periodSeconds": 10, "failureThreshold": 3}))
    driver.pass_time(60)
    assert len(driver.starts("server")) == 1
    driver.answers = {("server", "liveness"): False}
    driver.pass_time(31)
    driver.answers = {}
    driver.pass_time(5)
    assert len(driver.starts("server")) == 2
    assert "failed its liveness probe" in driver.pod.notes[0]


def test_one_readiness_failure_below_the_threshold_changes_nothing_and_the_threshold_takes_the_pod_out(lead_pod: Any) -> None:
    driver = lead_pod(one(readinessProbe={**READY, "periodSeconds": 5, "failureThreshold": 2}))
    assert ready_condition(driver) == "True"
    driver.answers = {("server", "readiness"): False}
    driver.pass_time(5)
    assert ready_condition(driver) == "True"
    driver.pass_time(5)
    assert ready_condition(driver) == "False"
    assert driver.pod["server"].running


def test_deletion_waits_for_prestop_then_terminates_and_kills_when_the_grace_is_over(lead_pod: Any) -> None:
    driver = lead_pod(one(lifecycle={"preStop": {"sleep": {"seconds": 5}}}), dies_after=1000)
    driver.pass_time(10)
    driver.pod.delete(driver.now, 30)
    driver.pass_time(60)
    assert [entry for entry in driver.log if entry[0] >= 10] == [(15.0, "term server"), (40.0, "kill server"), (40.0, "server ends 137")]
    assert driver.pod.gone


def test_a_container_that_ends_in_its_grace_is_not_started_again(lead_pod: Any) -> None:
    driver = lead_pod(one(), dies_after=3)
    driver.pod.delete(driver.now, 30)
    driver.pass_time(100)
    assert [what for _, what in driver.log] == ["start server", "term server", "server ends 143"]
    assert driver.pod.gone


SIDECAR = {
    "restartPolicy": "Never",
    "terminationGracePeriodSeconds": 30,
    "initContainers": [
        {"name": "prepare", "command": ["x"]},
        {"name": "server", "command": ["x"], "restartPolicy": "Always", "startupProbe": {**READY, "failureThreshold": 1000}},
    ],
    "containers": [{"name": "worker", "command": ["x"]}],
}


def test_init_containers_run_in_order_and_the_worker_waits_for_the_sidecars_startup_probe(lead_pod: Any) -> None:
    driver = lead_pod(SIDECAR)
    driver.answers = {("server", "startup"): False}
    driver.pass_time(5)
    assert [what for _, what in driver.log] == ["start prepare"]
    driver.exits("prepare", 0)
    driver.pass_time(20)
    assert [what for _, what in driver.log][-1] == "start server"
    driver.answers = {}
    driver.pass_time(1)
    assert [what for _, what in driver.log][-1] == "start worker"
    assert driver.pod.phase == "Running"


@pytest.mark.parametrize(("code", "phase"), [(0, "Succeeded"), (75, "Failed")])
def test_when_the_worker_ends_the_sidecar_is_stopped_and_its_exit_code_does_not_count(lead_pod: Any, code: int, phase: str) -> None:
    driver = lead_pod(SIDECAR, dies_after=2)
    driver.exits("prepare", 0)
    driver.pass_time(1)
    driver.exits("worker", code)
    assert driver.pod.phase == "Running", "the sidecar still runs"
    driver.pass_time(5)
    assert driver.pod.phase == phase
    assert state(driver, "worker")["state"]["terminated"]["exitCode"] == code


def test_a_crashed_sidecar_comes_back_while_the_worker_goes_on(lead_pod: Any) -> None:
    driver = lead_pod(SIDECAR)
    driver.exits("prepare", 0)
    driver.pass_time(1)
    driver.exits("server", 137)
    driver.pass_time(1)
    assert driver.pod["server"].running
    assert driver.pod["worker"].running
    assert state(driver, "server")["restartCount"] == 1


def test_a_failed_init_container_fails_a_pod_that_never_restarts(lead_pod: Any) -> None:
    driver = lead_pod(SIDECAR)
    driver.exits("prepare", 1)
    driver.pass_time(100)
    assert driver.pod.phase == "Failed"
    assert not driver.starts("worker")


def test_on_deletion_sidecars_outlive_the_containers_that_need_them(lead_pod: Any) -> None:
    driver = lead_pod(SIDECAR, dies_after=4)
    driver.exits("prepare", 0)
    driver.pass_time(1)
    driver.pod.delete(driver.now, 30)
    driver.pass_time(60)
    stops = [entry for entry in driver.log if "term" in entry[1] or "kill" in entry[1]]
    assert stops == [(1.0, "term worker"), (5.0, "term server")]


def test_a_pod_without_free_accelerators_says_why_it_is_not_scheduled(lead_pod: Any) -> None:
    driver = lead_pod(one())
    driver.pod.unschedulable = "1 Insufficient nvidia.com/gpu"
    scheduled = next(c for c in driver.pod.status(driver.now)["conditions"] if c["type"] == "PodScheduled")
    assert (scheduled["status"], scheduled["reason"], scheduled["message"]) == ("False", "Unschedulable", "1 Insufficient nvidia.com/gpu")


def test_a_container_that_lacks_a_secret_waits_and_is_tried_again(lead_pod: Any) -> None:
    driver = lead_pod(one())
    driver.exits("server", 1)
    driver.pod["server"].told_to_start()
    driver.pod.cannot_start("server", "CreateContainerConfigError", 'secret "keys" not found', driver.now)
    assert state(driver)["state"]["waiting"] == {"reason": "CreateContainerConfigError", "message": 'secret "keys" not found'}
    driver.pass_time(2)
    assert driver.pod["server"].running


def test_conditions_keep_their_time_while_their_status_stays(lead_pod: Any) -> None:
    driver = lead_pod(one(readinessProbe={**READY, "periodSeconds": 5, "failureThreshold": 1}))
    driver.pass_time(1)
    first = {c["type"]: c["lastTransitionTime"] for c in driver.pod.status(driver.now)["conditions"]}
    driver.pass_time(300)
    assert {c["type"]: c["lastTransitionTime"] for c in driver.pod.status(driver.now)["conditions"]} == first
    driver.answers = {("server", "readiness"): False}
    driver.pass_time(5)
    later = {c["type"]: c["lastTransitionTime"] for c in driver.pod.status(driver.now)["conditions"]}
    assert later["Ready"] != first["Ready"]
    assert later["PodScheduled"] == first["PodScheduled"]
