"""A Ray on this machine: its addresses, the token of its user, the folder of its files, and its processes, certainly ended.

Whoever reaches Ray's ports runs code as this user, unless Ray asks for a token, which is kept where only this user can read
it. The folder lies below a short path, since the sockets among its files have short names.

`python -m rlsys.cluster.local_ray PARENT COMMAND ...` becomes a command that the kernel sends SIGTERM when the process
PARENT ends, however that ends. The kernel goes by the thread that started it (prctl(2)), which must be the parent's main
one.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import shutil
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from rlsys.errors import UserError
from rlsys.files import LOCK, working_folder
from rlsys.weights.sockets import INTERFACE_VARIABLES

RANK = "rlsys-node-"  # How the resource of Ray's begins whose name ends with a machine's rank.
RAY_PORT = 6379  # Of the head of a Ray cluster, where nobody says otherwise.
_LOOPBACK = "127."
_OUTSIDE = "192.0.2.1"  # An address that nobody has (RFC 5737): the way to it is the way out.
MODE, _TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
MOST_BYTES = 107  # Of a socket's path: sun_path of unix(7) without its end.
_COMMON = Path("/tmp")
_PREFIX, _RAYS = "rlsys-ray-", "ray"
_LONGEST = f"{_PREFIX}12345678/{_RAYS}/session_2026-01-31_00-00-00_000000_4194304/sockets/plasma_store"
"""That Ray makes in a folder of `ray_folder`, whose process has at most the number 2^22."""
STOP_S = 3.0  # How long processes may take to end by themselves.
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # From linux/prctl.h.
_log = logging.getLogger(__name__)


@contextmanager
def local_ray(stop: Callable[[], None]) -> Iterator[Path]:
    """A `ray_folder` for a Ray that the body starts; then `stop` ends it, and what it leaves of processes is killed."""
    adopt_orphans()
    strangers = {process.pid for process in descendants()}
    with ray_folder() as folder:
        try:
            yield folder
        finally:
            before = descendants()
            stop()
            end(process for process in {*before, *descendants()} if process.pid not in strangers)


def require_token(environment: Mapping[str, str], *, make: bool) -> dict[str, str]:
    """Return the variables with which Ray asks for this user's token.

    There are none where `environment` says RAY_AUTH_MODE=disabled, which is logged as a warning. `make` writes a new
    token to ~/.ray/auth_token where the user has none. Raises UserError where there is none, or it cannot be kept.
    """
    mode = environment.get(MODE, "token").lower()
    if mode == "disabled":
        told = "%s=disabled: whoever reaches Ray's ports on this machine can run code as you. Unset it to have Ray ask for a token."
        _log.warning(told, MODE)
        return {}
    if mode != "token":
        raise UserError(
            f"{MODE}={mode} in the environment: set it to token or disabled, or unset it.", code="unknown", key=MODE
        )
    if not environment.get(_TOKEN):
        given = environment.get("RAY_AUTH_TOKEN_PATH")
        _require_file(Path(given) if given else token_file(), make=make and not given)
    return {MODE: "token"}


def token_file() -> Path:
    """The file in which Ray looks for the user's token."""
    return Path.home() / ".ray" / "auth_token"


def ends_with_parent(command: Sequence[str]) -> list[str]:
    """`command` as this process's main thread starts it to have it end with this process."""
    return [sys.executable, "-m", "rlsys.cluster.local_ray", str(os.getpid()), *command]


def adopt_orphans() -> None:
    """Make orphans of this process's descendants its own children, so that `descendants` finds them.

    A worker that is killed leaves an engine's processes behind, which would otherwise go to init.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants() -> list[psutil.Process]:
    """All that this process has started, and what that has started, but multiprocessing's own helper."""
    return [child for child in psutil.Process().children(recursive=True) if not _is_helper(child)]


def end(processes: Iterable[psutil.Process], timeout_s: float = STOP_S) -> None:
    """Wait until `processes` have ended, and kill those that take longer than `timeout_s`."""
    _, alive = psutil.wait_procs(list(processes), timeout=timeout_s)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=timeout_s)


def _is_helper(process: psutil.Process) -> bool:
    try:
        return "resource_tracker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # Or dead and not yet taken note of, which remains to be done.
        return False


def _require_file(file: Path, *, make: bool) -> None:
    try:
        if make and not file.exists():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Of two processes that do so at once, both end with the token of one.
            with tempfile.NamedTemporaryFile("w", dir=file.parent) as new, suppress(FileExistsError):
                new.write(secrets.token_hex(32))
                new.flush()
                os.link(new.name, file)
        with file.open() as opened:
            status = os.fstat(opened.fileno())
            if status.st_mode & _OTHERS and status.st_uid == os.getuid():
                os.fchmod(opened.fileno(), stat.S_IMODE(status.st_mode) & ~_OTHERS)
            if opened.read(1):
                return
    except OSError as problem:
        raise UserError(
            f"Ray's token {file} cannot be {'made' if make else 'read'} ({problem.strerror}): "
            + ("make the folder writable" if make else "copy the one of the head there, readable by you alone")
            + f", or set {_TOKEN}.",
            code="not_found" if isinstance(problem, FileNotFoundError) else "denied",
            key=str(file),
        ) from None
    raise UserError(f"Ray's token {file} is empty: remove the file, or set {_TOKEN}.", code="empty", key=str(file))


def ray_parent() -> Path:
    """The folder in which Ray's own is made: TMPDIR, or /tmp where Ray's sockets would not fit into that.

    Raises UserError if neither will do.
    """
    wanted = Path(tempfile.gettempdir())
    for folder in (wanted, _COMMON):
        if len(os.fsencode(folder / _LONGEST)) <= MOST_BYTES and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise UserError(
        f"TMPDIR={wanted} is too long for Ray's sockets, and {_COMMON} cannot be written: set TMPDIR to a folder "
        f"whose path has at most {MOST_BYTES - len(_LONGEST) - 1} bytes.",
        code="out_of_range",
        key="TMPDIR",
    )


@contextmanager
def ray_folder() -> Iterator[Path]:
    """A new folder that only this user can enter, with `rays_own` in it; removed afterwards.

    Also removes the folders of this user's processes that were killed before they could.
    """
    parent = ray_parent()
    for other in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if other.lstat().st_uid == os.getuid() and (other / LOCK).is_file():
                with working_folder(other):
                    _empty(other)
    folder = parent / f"{_PREFIX}{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    with working_folder(folder):
        try:
            yield folder
        finally:
            _empty(folder)


def rays_own(folder: Path) -> Path:
    """The folder within a `ray_folder` that Ray is given. Ray lets every user into it."""
    return folder / _RAYS


def _empty(folder: Path) -> None:
    """Remove all but the lock by which `folder` is held."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != LOCK:
            path.unlink(missing_ok=True)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def own_addresses() -> dict[str, str]:
    """Address -> interface, of IPv4 and IPv6."""
    entries = [(name, entry) for name, entries in psutil.net_if_addrs().items() for entry in entries]
    families = (socket.AF_INET, socket.AF_INET6)
    return {entry.address.partition("%")[0]: name for name, entry in entries if entry.family in families}


def address_towards(host: str) -> str:
    """This machine's IPv4 address on its way to `host`. Sends nothing. Raises OSError if there is no way, or no `host`."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, 9, socket.AF_INET, socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def address_here(host: str) -> str:
    """The IPv4 address by which others reach this machine, which they know as `host`, a name or an address of it.

    The machine's own name is this machine whatever stands for it here (Debian's /etc/hosts has 127.0.1.1), and so is
    127.0.0.1. Raises UserError if `host` is another machine, or this one has no address for others.
    """
    own = [address for address in own_addresses() if ":" not in address]
    name = socket.gethostname()
    named = host in (name, name.partition(".")[0])
    try:
        meant = [str(entry[4][0]) for entry in socket.getaddrinfo(host, 0, socket.AF_INET, socket.SOCK_STREAM)]
    except OSError as problem:
        if not named:
            raise UserError(
                f"--head {host} has no IPv4 address ({problem}): give one of {', '.join(own)}.",
                code="unknown",
                key="--head",
            ) from None
        meant = []
    outer = [address for address in own if not address.startswith(_LOOPBACK)]
    if here := [address for address in meant if address in outer]:
        return here[0]
    if not named and not all(address.startswith(_LOOPBACK) for address in meant):
        raise UserError(
            f"--head {host} is {', '.join(meant)}, and this machine of rank 0 has {', '.join(own)}: give one of "
            "these on every machine, or start rank 0 on that one.",
            code="mismatch",
            key="--head",
        )
    with suppress(OSError):  # Of a network without a way out.
        return address_towards(_OUTSIDE)
    if outer:
        return outer[0]
    raise UserError(
        f"--head {host} is this machine, which has no IPv4 address that others could reach it by: connect it, or "
        "run on one machine.",
        code="unreachable",
        key="--head",
    )


def interface_settings(address: str, addresses: Mapping[str, str]) -> dict[str, str]:
    """Variables that make gloo and NCCL use the interface of `address`; none if `addresses` does not have it.

    Those that are set already stay as they are.
    """
    interface = addresses.get(address)
    if interface is None:
        return {}
    # NCCL takes a bare name for the beginning of one: eth1 would be eth10 too.
    settings = zip(INTERFACE_VARIABLES, (interface, f"={interface}"), strict=True)
    return {name: value for name, value in settings if not os.environ.get(name)}


def promised_port() -> socket.socket:
    """A socket whose port, of all IPv4 addresses, the system gives to nobody who asks for any while it is open.

    Whoever is told the port may listen at it all the same: it is bound with SO_REUSEADDR and never listened at, and Linux
    then lets another socket with that option, which servers set, have it as well.
    """
    promise = socket.socket()
    promise.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    promise.bind(("", 0))
    return promise


def answers(host: str, port: int, timeout_s: float) -> bool:
    """Whether something listens at `port` of `host`."""
    with suppress(OSError):
        require_listener(f"{host}:{port}", timeout_s)
        return True
    return False


def require_listener(address: str, timeout_s: float) -> None:
    """Raise OSError where nobody listens at HOST:PORT of a Ray cluster, which Ray itself takes minutes to say.

    Words of Ray's own, such as auto, are left to Ray.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()


if __name__ == "__main__":
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if sys.platform == "linux" and os.getppid() != int(sys.argv[1]):  # It ended before the kernel knew.
        sys.exit(128 + signal.SIGTERM)
    os.execvp(sys.argv[2], sys.argv[2:])
