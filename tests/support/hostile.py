"""Serves hostile HTTP answers, and runs clients in child processes with limited memory."""

import json
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

MEBIBYTE = bytes(1 << 20)
CHILD = """
import asyncio, json, pathlib, re, resource
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))

def peak_mib():
    return int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) / 1024
"""
"""First lines of every program for `answer_of_child`."""


def _bomb() -> Iterator[bytes]:
    """Yield 300 MiB as 300 KB of gzip."""
    packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    yield b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n\r\n"
    yield packer.compress(MEBIBYTE) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(MEBIBYTE) + packer.flush(zlib.Z_FULL_FLUSH)
    yield block * 299


def _large(head: bytes) -> Callable[[], Iterator[bytes]]:
    """Function that yields `head` and 100 MB."""

    def blocks() -> Iterator[bytes]:
        yield head
        for _ in range(1000):
            yield b"a " * 50_000

    return blocks


def _drip() -> Iterator[bytes]:
    """Yield one byte at a time, for a minute."""
    yield b"HTTP/1.1 200 OK\r\n\r\n"
    for _ in range(1200):
        time.sleep(0.05)
        yield b" "


def _deep() -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000


ANSWERS: dict[str, Callable[[], Iterator[bytes]]] = {
    "bomb": _bomb,
    "body": _large(b"HTTP/1.1 200 OK\r\n\r\n"),
    "failure": _large(b"HTTP/1.1 500 Oops\r\n\r\n"),
    "line": _large(b"HTTP/1.1 200 OK\r\nX-Long: "),
    "drip": _drip,
    "deep": _deep,
}


@dataclass
class Hostile:
    """A server at `url`; the first part of a request's path selects the answer from `ANSWERS`."""

    url: str

    def serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError), connection.makefile("rb") as received:
            kind = received.readline().split()[1].decode().split("/")[1]
            length = 0
            while (line := received.readline()).strip():
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            received.read(length)
            for block in ANSWERS[kind]():
                connection.sendall(block)


@contextmanager
def hostile_server() -> Iterator[Hostile]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hostile = Hostile(f"http://127.0.0.1:{listener.getsockname()[1]}")

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=hostile.serve, args=[listener.accept()[0]], daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield hostile


def answer_of_child(program: str, *arguments: str) -> Any:
    """Run the Python `program` in a child process. Returns the JSON on its last output line."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD + program, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
