"""Ray on this machine: addresses, the user's token, the folder of Ray's files, and reliable cleanup of its processes.

Without a token, anyone who reaches Ray's ports can run code as this user; only this user can read the token file. Ray's
folder has a short path because Unix socket paths are limited to 107 bytes.

`python -m rlsys.cluster.local_ray PARENT COMMAND ...` execs COMMAND so that the kernel sends it SIGTERM when the process
PARENT ends, even by SIGKILL. Start it from PARENT's main thread: the kernel signals when the starting thread ends
(prctl(2), PR_SET_PDEATHSIG).
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
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from rlsys.errors import UserError
from rlsys.files import LOCK, remove_shared_memory, working_folder
from rlsys.weights.sockets import INTERFACE_VARIABLES, environment_variables

RANK = "rlsys-node-"  # Prefix of the Ray resource that carries a machine's rank: `rlsys-node-0`.
RAY_PORT = 6379  # Default port of a Ray head.
_LOOPBACK = "127."
_OUTSIDE = "192.0.2.1"  # Unassigned address (RFC 5737); the route to it is the default route.
MODE, _TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
MAX_BYTES = 107  # Maximum length of a socket path: sun_path of unix(7) without its terminator.
_COMMON = Path("/tmp")
_PREFIX, _RAYS, _SCRATCH = "rlsys-ray-", "ray", "tmp"
_LONGEST = f"{_PREFIX}12345678/{_RAYS}/session_2026-01-31_00-00-00_000000_4194304/sockets/plasma_store"
"""Longest socket path that Ray creates below `ray_parent()`; process ids go up to 2^22."""
_HELPERS = ("resource_tracker", "/wandb/bin/")
"""Parts of the command lines of multiprocessing's resource tracker and of the service of Weights & Biases, which other runs
of this process may use, and which reports a connection that is lost."""
_OF_RAY = ("gcs_server", "raylet")
HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 5000,
    "health_check_period_ms": 2000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 4,
}
"""Ray's health checks, set to give up a silent machine after half a minute; Ray's default is over a minute."""
HEAD_GONE_S = 10
"""Time without a connection to a head on this machine after which a process of Ray ends. Ray's default, a minute, is for heads
on other machines: it would block a driver whose head has been killed (`RayWatch`)."""
STOP_S = 3.0  # Timeout for processes to exit on their own.
PATIENCE_S = 15.0
"""Time-out of Ray's own shutdown."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # From linux/prctl.h.
_log = logging.getLogger(__name__)


@contextmanager
def local_ray(stop: Callable[[], None], patience_s: float = PATIENCE_S) -> Iterator[Path]:
    """Yield a `ray_folder` for a Ray that the body starts; on exit call `stop`, then kill the processes that remain.

    Processes that were there before, such as a search server, and their descendants are spared. `stop` would wait for ever
    for a process that hangs; Ray's processes are killed after `patience_s`.
    """
    adopt_orphans()
    strangers = descendants()
    with ray_folder() as folder:
        try:
            yield folder
        finally:
            before = descendants()
            late = threading.Timer(patience_s, end, (ray_processes().values(), 0.0))
            late.daemon = True
            late.start()
            stop()
            late.cancel()
            end({*before, *descendants()}.difference(*map(family, strangers)))


def require_token(environment: Mapping[str, str], *, make: bool) -> dict[str, str]:
    """Return the variables that make Ray require this user's token.

    With RAY_AUTH_MODE=disabled in `environment`, warn and return no variables. `make` creates ~/.ray/auth_token if the
    user has no token. Raises UserError if the token is missing, empty, or cannot be created or read.
    """
    mode = environment.get(MODE, "token").lower()
    if mode == "disabled":
        told = "%s=disabled: anyone who reaches Ray's ports on this machine can run code as you. Unset it to require a token."
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
    """Return Ray's default path of the user's token."""
    return Path.home() / ".ray" / "auth_token"


def ends_with_parent(command: Sequence[str]) -> list[str]:
    """Wrap `command` so that it gets SIGTERM when this process ends. Start it from the main thread."""
    return [sys.executable, "-m", "rlsys.cluster.local_ray", str(os.getpid()), *command]


def adopt_orphans() -> None:
    """Reparent orphaned descendants to this process, so that `descendants` finds them.

    Otherwise a killed worker leaves its engine's processes to init.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants() -> list[psutil.Process]:
    """Return all child processes, recursively, except helpers that end with this process by themselves."""
    return [child for child in psutil.Process().children(recursive=True) if not _is_helper(child)]


def family(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and its descendants."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return [process]


def ray_processes() -> dict[str, psutil.Process]:
    """Return the processes of the Ray that this process has started, by name; none for a Ray of others."""
    found = {}
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.name() in _OF_RAY:
                found[child.name()] = child
    return found


def end(processes: Iterable[psutil.Process], timeout_s: float = STOP_S) -> None:
    """Wait up to `timeout_s` for `processes` to exit, then kill the rest."""
    _, alive = psutil.wait_procs(list(processes), timeout=timeout_s)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=timeout_s)


def _is_helper(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
        return any(name in command for name in _HELPERS)
    except psutil.NoSuchProcess:  # Gone, or a zombie, which the caller must still reap.
        return False


def _require_file(file: Path, *, make: bool) -> None:
    try:
        if make and not file.exists():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # If two processes create the token at the same time, both use the one that was linked first.
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
            f"Ray's token {file} cannot be {'created' if make else 'read'} ({problem.strerror}): "
            + ("make the folder writable" if make else "copy the head's token there, readable only by you")
            + f", or set {_TOKEN}.",
            code="not_found" if isinstance(problem, FileNotFoundError) else "denied",
            key=str(file),
        ) from None
    raise UserError(f"Ray's token {file} is empty: remove the file, or set {_TOKEN}.", code="empty", key=str(file))


def ray_parent() -> Path:
    """Return the parent of Ray's folder: TMPDIR, or /tmp if TMPDIR is too long for Ray's sockets or not writable.

    Raises UserError if neither fits.
    """
    wanted = Path(tempfile.gettempdir())
    for folder in (wanted, _COMMON):
        if len(os.fsencode(folder / _LONGEST)) <= MAX_BYTES and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise UserError(
        f"TMPDIR={wanted} is too long for Ray's sockets or not writable, and {_COMMON} is not writable: set TMPDIR to a "
        f"writable folder whose path has at most {MAX_BYTES - len(_LONGEST) - 1} bytes.",
        code="out_of_range",
        key="TMPDIR",
    )


@contextmanager
def ray_folder() -> Iterator[Path]:
    """Yield a new private folder for Ray (`rays_own`) and its processes (`scratch`), and remove it on exit.

    Also removes folders left behind by killed processes of this user.
    """
    parent = ray_parent()
    for other in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            # A process that is just making its folder puts nothing else there before it holds the lock.
            begun = (other / LOCK).is_file() and any(path.name != LOCK for path in other.iterdir())
            if begun and other.lstat().st_uid == os.getuid():
                with working_folder(other):
                    _empty(other)
    folder = parent / f"{_PREFIX}{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    with working_folder(folder):
        scratch(folder).mkdir()
        try:
            yield folder
        finally:
            _empty(folder)


def rays_own(folder: Path) -> Path:
    """Return the subfolder of a `ray_folder` that Ray uses. Ray makes it accessible to every user."""
    return folder / _RAYS


def scratch(folder: Path) -> Path:
    """Return the subfolder of a `ray_folder` for temporary files of Ray's processes, as their TMPDIR.

    A killed process leaves its temporary files; these go with the folder. So does shared memory that is tied to it.
    """
    return folder / _SCRATCH


@contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Let processes that the body starts use `scratch(folder)` as their TMPDIR."""
    with environment_variables({"TMPDIR": str(scratch(folder))}):
        yield


def _empty(folder: Path) -> None:
    """Remove everything in `folder` except its lock file, and the shared memory to which `scratch` has links."""
    remove_shared_memory(scratch(folder))
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != LOCK:
            path.unlink(missing_ok=True)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def own_addresses() -> dict[str, str]:
    """Return this machine's IPv4 and IPv6 addresses, each with its interface: `{"10.0.0.1": "eth0"}`."""
    entries = [(name, entry) for name, entries in psutil.net_if_addrs().items() for entry in entries]
    families = (socket.AF_INET, socket.AF_INET6)
    return {entry.address.partition("%")[0]: name for name, entry in entries if entry.family in families}


def address_towards(host: str) -> str:
    """Return this machine's source IPv4 address for traffic to `host`, without sending any.

    Raises OSError if `host` does not resolve or has no route.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(host, 9, socket.AF_INET, socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def address_here(host: str) -> str:
    """Return the IPv4 address at which other machines reach this machine, which `host` names (a name or an address).

    This machine's own name and loopback addresses always mean this machine, whatever they resolve to here; Debian's
    /etc/hosts maps the name to 127.0.1.1. Raises UserError if `host` is another machine, or if this one has no
    address reachable from others.
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
            f"--head {host} is {', '.join(meant)}, but this machine of rank 0 has {', '.join(own)}: give one of its "
            f"addresses as --head on every machine, or start rank 0 on {host}.",
            code="mismatch",
            key="--head",
        )
    with suppress(OSError):  # The network has no default route.
        return address_towards(_OUTSIDE)
    if outer:
        return outer[0]
    raise UserError(
        f"--head {host} is this machine, which has no IPv4 address that other machines can reach: connect it to a "
        "network, or run on one machine.",
        code="unreachable",
        key="--head",
    )


def interface_settings(address: str, addresses: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make gloo and NCCL use the interface of `address`; none if `addresses` lacks it.

    Omits variables that are already set in the environment.
    """
    interface = addresses.get(address)
    if interface is None:
        return {}
    # NCCL matches a bare name as a prefix: eth1 would also match eth10.
    settings = zip(INTERFACE_VARIABLES, (interface, f"={interface}"), strict=True)
    return {name: value for name, value in settings if not os.environ.get(name)}


def promised_port() -> socket.socket:
    """Return a socket that reserves a free port on all IPv4 addresses while it is open.

    The system does not hand out the port to anyone who binds port 0. A server that is given the port can still bind it:
    this socket sets SO_REUSEADDR and never listens, and Linux then admits another socket that sets SO_REUSEADDR, as
    servers do.
    """
    promise = socket.socket()
    promise.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    promise.bind(("", 0))
    return promise


def answers(host: str, port: int, timeout_s: float) -> bool:
    """True if a server listens at `port` of `host`."""
    with suppress(OSError):
        require_listener(f"{host}:{port}", timeout_s)
        return True
    return False


def require_listener(address: str, timeout_s: float) -> None:
    """Raise OSError if nothing listens at HOST:PORT of a Ray cluster; Ray itself takes minutes to report that.

    A no-op for special addresses of Ray, such as `auto`.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()


if __name__ == "__main__":
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if sys.platform == "linux" and os.getppid() != int(sys.argv[1]):  # The parent ended before prctl took effect.
        sys.exit(128 + signal.SIGTERM)
    os.execvp(sys.argv[2], sys.argv[2:])
