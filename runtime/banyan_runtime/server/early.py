"""The beginning of `banyan-runtime serve`: what a server needs of other processes is started before its own libraries are
imported, so that all of them import side by side. On two cores that is half of a start."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence

from banyan_runtime import arguments, hub
from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError
from banyan_runtime.front.prepare import fork_server
from banyan_runtime.front.text.isolation import isolate
from banyan_runtime.process import without_collection
from banyan_runtime.server.api_processes import count
from banyan_runtime.server.api_processes import early as api_processes
from banyan_runtime.server.engine_child import EngineChild


class Early:
    """Processes that wait to be told what to do. They end with this one."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises UnavailableError."""
        self.engine = EngineChild()
        self.api_processes: list[api_processes.Early] = []  # beside this one
        assert config.tokenizer_worker_num is not None, "it is settled before"
        try:
            self.zygote = fork_server.Early(tokenizes=not config.skip_tokenizer_init)
            try:
                for _ in range(config.tokenizer_worker_num - 1):
                    self.api_processes.append(api_processes.Early())
            except BaseException:
                self.zygote.process.kill()
                raise
        except BaseException:
            self._kill_others()
            raise

    def kill(self) -> None:
        self._kill_others()
        self.zygote.process.kill()

    def _kill_others(self) -> None:
        self.engine.kill()
        for other in self.api_processes:
            other.process.kill()


def with_environment(config: ServerConfig, argv: Sequence[str]) -> ServerConfig:
    """$BANYAN_DRAIN_SECONDS, which the operator derives from the pod's grace period, unless the flag is given."""
    text = os.environ.get("BANYAN_DRAIN_SECONDS")
    if text is None or any(word.partition("=")[0] == "--drain-seconds" for word in argv):
        return config
    try:
        return dataclasses.replace(config, drain_seconds=float(text))
    except ValueError:
        raise ConfigError("must be a number of seconds", field="BANYAN_DRAIN_SECONDS", value=text) from None


def prepare(argv: Sequence[str]) -> Callable[[], int]:
    """What runs a server and returns its exit code, once everything is imported. Raises ConfigError for a command line that asks
    for nothing sensible."""
    if {"--help", "-h"} & set(argv):
        return _help
    config = with_environment(arguments.parse(argv), argv)
    config = dataclasses.replace(config, tokenizer_worker_num=count.wanted(config))
    hub.check(config.model_path, config.revision)  # a mistyped name gets one line, not the log of a start
    isolate()
    early = Early(config)
    try:
        with without_collection():
            from banyan_runtime.server.serve import run
    except BaseException:
        early.kill()
        raise
    return functools.partial(run, config, early)


def _help() -> int:
    parser = argparse.ArgumentParser(prog="banyan-runtime serve", description="Serve a model over the OpenAI HTTP API.")
    arguments.add_options(parser)
    parser.print_help()
    return 0
