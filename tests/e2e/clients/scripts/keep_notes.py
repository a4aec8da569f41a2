"""A server of the Model Context Protocol on its standard input and output. Its one tool puts a text into the file that is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ADD = {"name": "add", "description": "Adds a note.", "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}}}


def answer(method: str, given: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        told = {"name": "notes", "version": "1"}
        return {"protocolVersion": given["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": told}
    if method == "tools/list":
        return {"tools": [ADD]}
    if method == "tools/call":
        Path(sys.argv[1]).write_text(given["arguments"]["text"])
        return {"content": [{"type": "text", "text": "It is noted."}]}
    return {}


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message and "method" in message:
        result = answer(message["method"], message.get("params") or {})
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
