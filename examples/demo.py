"""What `make demo` shows once everything is installed: fetch a real model, apply two manifests on this machine, ask the server a
question through the `openai` SDK, and wait for the batch.

On a terminal the server then goes on until Ctrl-C; otherwise the demo stops by itself with exit code 0.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import openai

ROOT = Path(__file__).resolve().parent.parent
MANIFESTS = Path("examples") / "01-minimal"
BIN = Path(sys.executable).parent
QUESTION = "What is Python?"
BOLD, PLAIN = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")


def say(text: str) -> None:
    print(f"\n{BOLD}{text}{PLAIN}", flush=True)


def run(*words: str) -> int:
    return subprocess.run([str(BIN / words[0]), *words[1:]], cwd=ROOT).returncode


def resources() -> dict[str, dict[str, Any]]:
    """What `banyan-operator status` knows, by kind."""
    out = subprocess.run([BIN / "banyan-operator", "status", "-o", "json"], capture_output=True, text=True, check=True).stdout
    return {item["kind"]: item for item in json.loads(out)["items"]}


def ask(url: str, model: str) -> None:
    """Stream one answer through the OpenAI SDK."""
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
    log = tempfile.NamedTemporaryFile(mode="w+", prefix="banyan-demo-", suffix=".log", delete=False)  # noqa: SIM115 - outlives us
    operator = subprocess.Popen(
        [BIN / "banyan-operator", "local", "-f", MANIFESTS, "--fresh", "--plain"], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
    )
    try:
        if code := run("banyan-operator", "status", "--wait", "ready", "--timeout", "240"):
            print(Path(log.name).read_text()[-3000:], file=sys.stderr)
            return code
        server = resources()["InferenceServer"]
        url, model = server["status"]["url"], server["spec"]["model"]["servedNames"][0]

        say(f"3. A question, through the openai SDK, to {url}/v1")
        ask(url, model)

        say("4. The batch: examples/01-minimal/batches/requests.jsonl")
        if code := run("banyan-operator", "status", "--wait", "done", "--timeout", "240"):
            print(Path(log.name).read_text()[-3000:], file=sys.stderr)
            return code
        show_batch(resources()["BatchJob"])

        say(f"Done in {time.monotonic() - began:.0f} s.")
        if sys.stdout.isatty() and sys.stdin.isatty():
            print(f"""The server goes on at {url}/v1 (model "{model}"). In another terminal:
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Tell me a joke."}}]}}'
  {BIN.relative_to(ROOT) if BIN.is_relative_to(ROOT) else BIN}/banyan-operator status
Ctrl-C stops it, and everything it started.""")
            operator.wait()
        else:
            print("This is no terminal, so everything stops now. On a terminal the server goes on until Ctrl-C.")
        return 0
    except KeyboardInterrupt:
        print("\nstopping ...")
        return 0
    finally:
        if operator.poll() is None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            operator.send_signal(signal.SIGTERM)
            operator.wait(60)
        log.close()
        Path(log.name).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
