"""Ray's token: made for its user alone, asked for unless the user says otherwise."""

from __future__ import annotations

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlsys.cluster.local_ray import MODE, require_token, token_file
from tests.support.refusals import refused

TOKEN = {MODE: "token"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


def test_a_token_is_made_once_for_the_user_alone() -> None:
    before = os.umask(0)
    try:
        assert require_token({}, make=True) == TOKEN
    finally:
        os.umask(before)
    token = token_file().read_text()
    assert len(token) == 64
    assert int(token, 16) >> 192, "random to the first byte, but for one in 2^64"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (token_file(), token_file().parent)] == [0o600, 0o700]
    token_file().chmod(0o644)
    assert require_token({}, make=True) == require_token({}, make=False) == TOKEN
    assert token_file().read_text() == token
    assert stat.S_IMODE(token_file().stat().st_mode) == 0o600, "closed again to others"
    assert [*token_file().parent.iterdir()] == [token_file()]


def test_those_who_make_a_token_at_once_end_with_one() -> None:
    together = threading.Barrier(8, timeout=60)

    def make(_number: int) -> str:
        together.wait()
        require_token({}, make=True)
        return token_file().read_text()

    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(make, range(8)))
    assert made == {token_file().read_text()}


def test_a_token_in_the_environment_needs_no_file(tmp_path: Path) -> None:
    assert require_token({"RAY_AUTH_TOKEN": "t"}, make=False) == TOKEN
    elsewhere = tmp_path / "elsewhere"
    with refused("not_found", elsewhere):
        require_token({"RAY_AUTH_TOKEN_PATH": str(elsewhere)}, make=True)
    assert not elsewhere.exists(), "a file that the user names is the user's"
    elsewhere.write_text("t")
    assert require_token({"RAY_AUTH_TOKEN_PATH": str(elsewhere)}, make=False) == TOKEN
    assert not token_file().exists()


def test_a_machine_without_a_token_may_not_join() -> None:
    with refused("not_found", token_file()):
        require_token(TOKEN, make=False)
    token_file().parent.write_text("in the way")
    with refused("denied", token_file()):
        require_token({}, make=True)
    token_file().parent.unlink()
    token_file().parent.mkdir()
    token_file().touch()
    with refused("empty", token_file()):
        require_token({}, make=True)


def test_no_token_is_asked_for_only_where_the_user_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert require_token({MODE: "disabled"}, make=True) == {}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert not token_file().exists()
    with refused("unknown", MODE):
        require_token({MODE: "none"}, make=True)
