"""A server that speaks the part of Elasticsearch's and OpenSearch's REST API that the clients use here.

It listens on a real socket; ranks by BM25 computed from the formula; and fails on demand.
"""

from __future__ import annotations

import json
import math
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class FakeElastic:
    """The state of the server, and the faults that it is to show."""

    distribution: str = "elasticsearch"
    version: str = "9.1.0"
    authorization: str | None = None
    """Header that requests must have."""
    drop: int = 0
    """Requests to end without an answer."""
    unavailable: int = 0
    """Requests to answer with 503."""
    reject_items: int = 0
    """Documents of bulk requests to answer with 429."""
    poison: str | None = None
    """A word that makes a document unfit for the mapping."""
    die_after: int | None = None
    """Documents after which every bulk request is answered with 500."""
    indices: dict[str, dict[str, Any]] = field(default_factory=dict)
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    """The `_id` of every document that was stored, in order."""
    url: str = ""

    def answer(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, Any]:
        """Status and JSON of the answer to a request."""
        if self.authorization is not None and headers.get("Authorization") != self.authorization:
            return 401, error("security_exception", "unable to authenticate")
        wanted = re.search(r"vnd.elasticsearch.*compatible-with=(\d+)", headers.get("Accept", ""))
        if wanted and self.distribution == "opensearch" and body:
            return 406, error("status_exception", "Content-Type header is not supported")
        if wanted and self.distribution == "elasticsearch" and int(wanted[1]) > int(self.version.split(".")[0]):
            return 400, error("media_type_header_exception", "Invalid media-type value on headers [Accept]")
        if self.unavailable:
            self.unavailable -= 1
            return 503, error("unavailable", "come back later")
        parts = path.split("?")[0].strip("/").split("/")
        if parts == [""]:
            number = {"number": self.version}
            if self.distribution == "opensearch":
                number["distribution"] = "opensearch"
            return 200, {"name": "node", "cluster_name": "fake", "version": number, "tagline": "You Know"}
        if parts[-1] == "_bulk":
            return self.bulk(body)
        return self.on_index(method, parts[0], parts[1:], body)

    def on_index(self, method: str, name: str, action: list[str], body: bytes) -> tuple[int, Any]:
        if method == "PUT" and not action:
            self.indices[name] = json.loads(body)
            self.documents[name] = {}
            return 200, {"acknowledged": True, "shards_acknowledged": True, "index": name}
        if name not in self.indices:
            return 404, error("index_not_found_exception", f"no such index [{name}]")
        if action == ["_mapping"]:
            return 200, {name: {"mappings": self.indices[name]["mappings"]}}
        if action == ["_count"]:
            return 200, {"count": len(self.documents[name]), "_shards": {}}
        if action == ["_msearch"]:
            bodies = [json.loads(line) for line in body.splitlines()][1::2]
            return 200, {"took": 1, "responses": [self.search(name, asked) for asked in bodies]}
        return 200, {"_shards": {"total": 1, "successful": 1, "failed": 0}}

    def bulk(self, body: bytes) -> tuple[int, Any]:
        lines = [json.loads(line) for line in body.splitlines()]
        items = []
        for action, source in zip(lines[::2], lines[1::2], strict=True):
            if self.die_after is not None and len(self.written) >= self.die_after:
                return 500, error("disaster", "the disk is on fire")
            target = {"_index": action["index"]["_index"], "_id": action["index"]["_id"]}
            if self.reject_items:
                self.reject_items -= 1
                items.append({"index": {**target, "status": 429, **error("es_rejected_execution_exception", "busy")}})
            elif self.poison and self.poison in source["contents"]:
                items.append({"index": {**target, "status": 400, **error("document_parsing_exception", "unfit")}})
            else:
                self.documents[target["_index"]][target["_id"]] = source
                self.written.append(target["_id"])
                items.append({"index": {**target, "status": 201, "result": "created"}})
        failed = any(item["index"]["status"] >= 400 for item in items)
        return 200, {"took": 1, "errors": failed, "items": items}

    def search(self, name: str, asked: dict[str, Any]) -> dict[str, Any]:
        query = asked["query"]["match"]["contents"]
        if "boom" in query:
            return {"status": 400, **error("too_many_clauses", "boom")}
        assert asked["sort"] == [{"_score": "desc"}, {"rlsys_row": "asc"}]
        hidden = set(asked["_source"]["excludes"])
        similarity = self.indices[name]["settings"]["similarity"]["default"]
        scores = bm25(
            {key: document["contents"] for key, document in self.documents[name].items()},
            query,
            similarity["k1"],
            similarity["b"],
        )
        best = sorted(scores, key=lambda key: (-scores[key], self.documents[name][key]["rlsys_row"]))[: asked["size"]]
        hits = [
            {
                "_index": name,
                "_id": key,
                "_score": scores[key],
                "_source": {k: v for k, v in self.documents[name][key].items() if k not in hidden},
            }
            for key in best
        ]
        return {"status": 200, "took": 1, "hits": {"max_score": None, "hits": hits}}


def error(kind: str, reason: str) -> dict[str, Any]:
    cause = {"type": kind, "reason": reason}
    return {"error": {"root_cause": [cause], **cause}}


def bm25(texts: dict[str, str], query: str, k1: float, b: float) -> dict[str, float]:
    """Scores above 0 of the texts, by Lucene's formula over lower-cased words."""
    words = {key: re.findall(r"\w+", text.lower()) for key, text in texts.items()}
    mean = sum(map(len, words.values())) / max(len(words), 1)
    scores: dict[str, float] = {}
    for word in re.findall(r"\w+", query.lower()):
        df = sum(word in line for line in words.values())
        idf = math.log(1 + (len(words) - df + 0.5) / (df + 0.5))
        for key, line in words.items():
            if tf := line.count(word):
                weight = idf * tf / (tf + k1 * (1 - b + b * len(line) / mean))
                scores[key] = scores.get(key, 0.0) + weight
    return scores


@contextmanager
def running(fake: FakeElastic) -> Iterator[FakeElastic]:
    """Serve it from threads of this process."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with lock:
                fake.requests.append(f"{self.command} {self.path}")
                if fake.drop:
                    fake.drop -= 1
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                status, answer = fake.answer(self.command, self.path, self.headers, body)
            text = b"" if self.command == "HEAD" else json.dumps(answer).encode()
            self.send_response(status)
            if fake.distribution == "elasticsearch":
                self.send_header("X-Elastic-Product", "Elasticsearch")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_HEAD = do_PUT = do_POST = handle_any

        def log_message(self, *_: Any) -> None:
            """Silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        fake.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()
