"""Serves an ASGI application or a function of JSON on a real socket, from a thread of the test's process."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlsys.search.address import bind
from rlsys.search.connections import LimitedConfig, LimitedServer
from tests.support.waiting import wait_until

Body = dict[str, Any]
Answer = Callable[[Body], Any]


@contextmanager
def serving(app: Any, port: int = 0) -> Iterator[str]:
    """Serve `app`; yields its URL once it has started. Port 0 takes a free one."""
    with bind("127.0.0.1", port) as sock:
        server = LimitedServer(LimitedConfig(app, 512, log_level="error", timeout_graceful_shutdown=1))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive())
            assert server.started
            yield url
        finally:
            server.should_exit = True
            thread.join()


@dataclass
class Server:
    """Answers by `answer`; an int of `statuses` is sent instead, each once."""

    answer: Answer
    statuses: list[int] = field(default_factory=list)
    seen: list[tuple[str, Body, Message]] = field(default_factory=list)
    """Path, body and headers of each request."""
    url: str = ""

    @property
    def bodies(self) -> list[Body]:
        return [body for _, body, _ in self.seen]


@contextmanager
def served(answer: Answer) -> Iterator[Server]:
    """Answer every JSON POST at a free port by `answer`."""
    server = Server(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.seen.append((self.path, body, self.headers))
            code = server.statuses.pop() if server.statuses else 200
            content = json.dumps(server.answer(body) if code == 200 else "busy").encode()
            with suppress(ConnectionError):  # The client may have left.
                self.send_response(code)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_port}"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
