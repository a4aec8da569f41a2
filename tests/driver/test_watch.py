"""Kopf is used to watch and for nothing else: it must not write, and it must not give up."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from banyan_operator.cluster import watch
from banyan_operator.kube import kinds


def test_handlers_pass_the_sighting_on_and_return_nothing() -> None:
    seen: list[Any] = []
    handle = watch.handler(kinds.POD, lambda *sighting: seen.append(sighting))
    answer = asyncio.run(handle(event={"type": "ADDED", "object": {"metadata": {"name": "p"}}}, logger=None))
    assert answer is None
    assert seen == [(kinds.POD, "ADDED", {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}})]


def test_no_handler_makes_kopf_write_annotations_or_finalizers() -> None:
    registry = watch.registry(lambda *_: None)
    assert len(registry._watching.get_all_handlers()) == len(kinds.RESOURCES) + len(kinds.CHILDREN)
    assert not list(registry._changing.get_all_handlers())
    assert not list(registry._spawning.get_all_handlers())


def test_children_are_filtered_on_the_server_and_resources_are_not() -> None:
    selectors = watch.settings().watching.label_selectors
    assert {selector.plural or selector.any_name for selector in selectors} == {kind.plural for kind in kinds.CHILDREN}


def test_retries_never_end() -> None:
    delays = list(itertools.islice(iter(watch.EndlessBackoffs()), 1000))
    assert delays[0] < 1.3
    assert max(delays) <= 36
    assert list(itertools.islice(iter(watch.EndlessBackoffs()), 3))  # a fresh start for each call
