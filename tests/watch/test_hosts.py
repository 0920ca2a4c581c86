"""Which Host headers are answered."""

from __future__ import annotations

import socket

import pytest

from rlsys.watch.hosts import is_trusted, own_names


@pytest.mark.parametrize(
    ("header", "trusted"),
    [
        ("127.0.0.1:8800", True),
        ("127.0.0.1", True),
        ("[::1]:8800", True),
        ("[::1]", True),
        ("192.168.1.7:8800", True),
        ("localhost:8800", True),
        ("LOCALHOST", True),
        ("localhost.:8800", True),
        (socket.gethostname(), True),
        ("gpu7.lab:8800", True),
        ("evil.example:8800", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("evil.example:127.0.0.1", False),
        ("[evil.example]", False),
        ("", False),
    ],
)
def test_addresses_and_own_names_alone(header: str, trusted: bool) -> None:
    assert is_trusted(header, own_names("gpu7.lab")) == trusted
