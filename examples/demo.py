"""What `make demo` shows once everything is installed: fetch a real model, apply two manifests on this machine, ask the server a
question through the `openai` SDK, and wait for the batch.

On a terminal the server then goes on until Ctrl-C; otherwise the demo stops by itself with exit code 0.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
MANIFESTS = Path("examples") / "01-minimal"
BIN = Path(sys.executable).parent
STATE = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "banyan" / "demo"
WAIT_S = 240.0
STOP_S = 2.0  # then the operator is told again, and kills what still waits for clients that might come
LOG_END = 3000  # characters of the operator's log that are shown when it fails
QUESTION = "What is Python?"
BOLD, PLAIN = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")


def say(text: str) -> None:
    print(f"\n{BOLD}{text}{PLAIN}", flush=True)


def run(*words: str) -> int:
    return subprocess.run([str(BIN / words[0]), *words[1:]], cwd=ROOT).returncode


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


class Operator:
    """`banyan-operator local` beside us, with a state folder of its own: others may run on this machine."""

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile(mode="w+", prefix="banyan-demo-")  # noqa: SIM115 - close() closes it
        command = [BIN / "banyan-operator", "local", "-f", MANIFESTS, "--state-dir", STATE, "--fresh", "--plain"]
        # A session of its own: Ctrl-C reaches us alone, and we tell it once.
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True)

    def wait_for(self, what: str) -> int:
        """Show progress until all is `what`; else the exit code, after the end of the log. Over as soon as the operator is."""
        words = ["status", "--state-dir", STATE, "--wait", what, "--timeout", str(WAIT_S)]
        with subprocess.Popen([BIN / "banyan-operator", *words], cwd=ROOT) as waiting:
            while waiting.poll() is None and self._process.poll() is None:
                time.sleep(0.1)
            if waiting.poll() is None:
                waiting.terminate()
        if waiting.returncode == 0 and self._process.poll() is None:
            return 0
        ended = self._process.poll()
        self._log.seek(0)
        print(f"The operator {'works on' if ended is None else f'has ended (exit code {ended})'}. Its last lines:", file=sys.stderr)
        print(self._log.read()[-LOG_END:].rstrip(), file=sys.stderr)
        print(f"Logs of what it started: {STATE / 'logs'}", file=sys.stderr)
        return waiting.returncode if ended is None else ended or 1

    def wait(self) -> int:
        return self._process.wait()

    def close(self) -> None:
        """Stop it, and with it everything that it started."""
        for patience in (STOP_S, 60.0):
            if self._process.poll() is None:
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(patience)
        self._log.close()


def resources() -> dict[str, dict[str, Any]]:
    """What `banyan-operator status` knows, by kind."""
    command = [BIN / "banyan-operator", "status", "--state-dir", STATE, "-o", "json"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {item["kind"]: item for item in json.loads(out)["items"]}


def ask(url: str, model: str) -> None:
    """Stream one answer through the OpenAI SDK."""
    import openai  # takes a second, in which Ctrl-C must be heard

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    print(f"> {QUESTION}")
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=80, stream=True
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


def show_batch(job: dict[str, Any]) -> None:
    status = job["status"]
    counts = status["requestCounts"]
    print(f"{job['metadata']['name']}: {counts['completed']} of {counts['total']} requests answered, {counts['failed']} failed")
    out = ROOT / MANIFESTS / "batches" / "out"
    for file in ("output.jsonl", "errors.jsonl", "manifest.json"):
        print(f"  {(out / file).relative_to(ROOT)}  {(out / file).stat().st_size:,} bytes")
    first = json.loads((out / "output.jsonl").open().readline())
    print(f"  the first line: {first['custom_id']} -> {first['response']['body']['choices'][0]['message']['content']!r}")


def main() -> int:
    began = time.monotonic()
    say("1. The model: SmolLM2-135M-Instruct (93 MB, fetched once, checked by hash)")
    if code := run("banyan-runtime", "models", "fetch", "smollm2-135m"):
        return code

    say(f"2. banyan-operator local -f {MANIFESTS}/")
    operator = Operator()
    try:
        if code := operator.wait_for("ready"):
            return code
        server = resources()["InferenceServer"]
        url, model = server["status"]["url"], server["spec"]["model"]["servedNames"][0]

        say(f"3. A question, through the openai SDK, to {url}/v1")
        ask(url, model)

        say("4. The batch: examples/01-minimal/batches/requests.jsonl")
        if code := operator.wait_for("done"):
            return code
        show_batch(resources()["BatchJob"])

        say(f"Done in {time.monotonic() - began:.0f} s.")
        if sys.stdout.isatty() and sys.stdin.isatty():
            print(f"""The server goes on at {url}/v1 (model "{model}"). In another terminal:
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Tell me a joke."}}]}}'
  {shown(BIN)}/banyan-operator status
Ctrl-C stops it, and everything it started. State and logs: {STATE}""")
            return talk(operator)
        print("This is no terminal, so everything stops now. On a terminal the server goes on until Ctrl-C.")
        return 0
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # nothing may come between us and the end of what we started
        operator.close()


def talk(operator: Operator) -> int:
    """Leave the server to the user until Ctrl-C."""
    try:
        return operator.wait()
    except KeyboardInterrupt:
        print("\nstopping ...", flush=True)
        return 0


def end(number: int, _: object) -> NoReturn:
    """A closed terminal, or kill: as Ctrl-C, everything stops."""
    sys.exit(128 + number)


if __name__ == "__main__":
    for caught in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(caught, end)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nstopped", flush=True)
        sys.exit(130)
