"""Peers' metric names beside ours (--metrics-compat), for dashboards, autoscalers and endpoint pickers that know only those.

Names, labels and bucket bounds are the peers' own, since recording rules may name any of them. A picker reads the first series
of a load gauge and ignores further ones, so each has exactly one.
"""

from __future__ import annotations

from banyan_runtime.front.compat.sglang import SglangNames
from banyan_runtime.front.compat.vllm import VllmNames
from banyan_runtime.front.peers import NoPeer, Peer


def peer_names(compat: str | None, model_name: str) -> Peer:
    """What --metrics-compat asks for; `model_name` is the label of that name."""
    if compat == "sglang":
        return SglangNames(model_name)
    if compat == "vllm":
        return VllmNames(model_name)
    assert compat is None, compat
    return NoPeer()
