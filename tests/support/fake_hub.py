"""Serves data sets with the protocol of the Hugging Face Hub, and injects faults.

A download starts at /datasets/NAME/resolve/REVISION/FILE, which redirects to a storage path, as the Hub does for large
files. `faults` has the faults of the next requests for contents, in order.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

COMMIT = "c" * 40
TOKEN = "hf_right"


@dataclass
class FakeHub:
    """Stored files, planned faults and received requests."""

    files: dict[str, bytes]
    """"owner/dataset/path" -> content."""
    small: set[str] = field(default_factory=set)
    """Files stored in git itself; their checksum is the SHA-1 of the git blob."""
    faults: list[Any] = field(default_factory=list)
    """Faults: None (no fault), an int n (the connection drops after n bytes), "corrupt", "no ranges", "no ranges n",
    "shifted", or a status code such as "503"."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """(path, Range header) of each request for contents."""
    authorised: list[bool] = field(default_factory=list)
    """True for each download request that has the token."""
    url: str = ""

    def checksum(self, key: str) -> str:
        content = self.files[key]
        if key in self.small:
            return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return hashlib.sha256(content).hexdigest()


@contextmanager
def running(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve `hub` on a free local port, and set `hub.url`."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[FakeHub]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if match := re.match(r"/api/datasets/([^/]+/[^/]+)/tree/", self.path):
            self._list(match[1])
        elif match := re.match(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/([^?]+)", self.path):
            self._resolve(f"{match[1]}/{match[3]}", match[2])
        elif match := re.match(r"/storage/(.+)", self.path):
            self._content(match[1])
        else:
            self._answer(404)

    def _list(self, dataset: str) -> None:
        names = [key.removeprefix(f"{dataset}/") for key in self.hub.files if key.startswith(f"{dataset}/")]
        entries = [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in names]
        self._answer(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})

    def _resolve(self, key: str, revision: str) -> None:
        if not any(name.rsplit("/", 1)[0] == key.rsplit("/", 1)[0] for name in self.hub.files):
            self._answer(404, headers={"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", COMMIT):
            self._answer(404, headers={"X-Error-Code": "RevisionNotFound"})
        elif key not in self.hub.files:
            self._answer(404, headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        else:
            headers = {
                "X-Repo-Commit": COMMIT,
                "X-Linked-Size": str(len(self.hub.files[key])),
                "Location": f"{self.hub.url.replace('127.0.0.1', 'localhost')}/storage/{key}",
                "X-Linked-Etag": f'"{self.hub.checksum(key)}"',
            }
            if self.command == "GET":
                self.hub.authorised.append(self.headers.get("Authorization") == f"Bearer {TOKEN}")
            self._answer(302, headers=headers)

    def _content(self, key: str) -> None:
        asked = self.headers.get("Range", "")
        self.hub.asked.append((key, asked))
        assert "Authorization" not in self.headers, "the token must not be sent to the storage"
        fault = self.hub.faults.pop(0) if self.hub.faults else None
        whole = self.hub.files[key]
        first = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        if isinstance(fault, str) and fault.isdigit():
            self._answer(int(fault))
            return
        if isinstance(fault, str) and fault.startswith("no ranges"):
            first, asked = 0, ""
            fault = int(fault.removeprefix("no ranges") or len(whole))
        if first >= len(whole):
            self._answer(416)
            return
        body = whole[first:]
        if fault == "corrupt":
            body = bytes([body[0] ^ 1]) + body[1:]
        headers = {"Content-Length": str(len(body))}
        if asked:
            start = first + 1 if fault == "shifted" else first
            headers["Content-Range"] = f"bytes {start}-{len(whole) - 1}/{len(whole)}"
        self.send_response(206 if asked else 200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if isinstance(fault, int):
            self.wfile.write(body[:fault])
            self.close_connection = True
        else:
            self.wfile.write(body)

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
