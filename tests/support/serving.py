"""Serves an ASGI application on a real socket, from a thread of the test's process."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlsys.search.address import bind
from rlsys.search.connections import LimitedConfig, LimitedServer


@contextmanager
def serving(app: Any, port: int = 0) -> Iterator[str]:
    """Serve `app`; yields its URL once it has started. Port 0 takes a free one."""
    with bind("127.0.0.1", port) as sock:
        server = LimitedServer(LimitedConfig(app, 512, log_level="error", timeout_graceful_shutdown=1))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.01)
            assert server.started
            yield url
        finally:
            server.should_exit = True
            thread.join()
