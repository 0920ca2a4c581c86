"""MCP servers that misbehave, in plain Python, so that they start quickly.

python hostile_mcp_server.py HOW
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

HOW = sys.argv[1]
TOOLS = [{"name": name, "inputSchema": {"type": "object"}} for name in ("act", "other")]
BEGUN = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "h", "version": "1"}}


def say(answer: dict[str, Any]) -> None:
    if HOW == "garbage":
        sys.stdout.write("Welcome!\n{]\n\n\x1b[2J\ufffd\n" + '{"jsonrpc": "1.0"}\n[1]\nnull\n')
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **answer}) + "\n")
    sys.stdout.flush()


def requests() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" in asked:
            yield asked


def listed(asked: dict[str, Any]) -> dict[str, Any]:
    if HOW == "endless list":
        return {"tools": [], "nextCursor": asked.get("params", {}).get("cursor", "") + "x"}
    return {"tools": TOOLS}


def act(asked: dict[str, Any]) -> dict[str, Any]:
    text = "done"
    if HOW == "huge":
        # The whole line has 64 MiB; a reader that keeps it would take several times as much.
        sys.stdout.write(f'{{"jsonrpc": "2.0", "id": {asked["id"]}, "result": "')
        for _ in range(1024):
            sys.stdout.write("x" * 65_536)
        sys.stdout.write('"}\n')
    elif HOW == "malformed":
        return {"content": [{"type": "smell"}]}
    elif HOW == "other id":
        say({"id": asked["id"] + 1000, "result": {}})
    return {"content": [{"type": "text", "text": text}]}


def main() -> None:
    if HOW == "exit":
        sys.exit("no license\nfound")
    if HOW == "silent":
        time.sleep(3600)
    if HOW == "stubborn":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        TOOLS[0]["description"] = f"{os.getpid()} {child.pid}"
    for asked in requests():
        answers = {"initialize": lambda _: BEGUN, "tools/list": listed, "tools/call": act}
        if asked["method"] in answers:
            say({"id": asked["id"], "result": answers[asked["method"]](asked)})
        else:
            say({"id": asked["id"], "error": {"code": -32601, "message": "unknown"}})
    while HOW == "stubborn":
        time.sleep(1)


if __name__ == "__main__":
    main()
