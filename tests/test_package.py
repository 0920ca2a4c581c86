"""Tests of the package from outside: public and deprecated names, its errors, and RLSYS_LOG."""

import errno
import inspect
import os
import pickle
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import rlsys
import rlsys.apps.api
from rlsys.apps.cli import doctor
from rlsys.errors import Code, RunError, UserError, code_of, first_line, root_cause
from tests.support.paths import PROJECT

CODE = """
import sys, warnings
import rlsys
assert not {"torch", "ray", "transformers"} & sys.modules.keys(), "an import of the package is cheap"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import rlsys.tools.interface
    from rlsys.tools.calculator import Calculator
    from rlsys.tools.interface import ToolError
own = [one for one in caught if "rlsys" in str(one.message)]
assert [(one.category, str(one.message)) for one in own] == [(DeprecationWarning, "rlsys.tools is now rlsys.rollout.tools")]
assert own[0].filename == "<string>", own[0].filename
import rlsys.rollout.tools.interface as interface
import rlsys.rollout.tools.calculator as calculator
assert rlsys.tools.interface is interface and ToolError is interface.ToolError and Calculator is calculator.Calculator
assert interface.__spec__.name == interface.__name__ == "rlsys.rollout.tools.interface"
assert interface.named_tools(["rlsys.tools.calculator.Calculator"])[0].component is Calculator, "as a config may name it"
for never in ("rlsys.tools.nothing", "rlsys.nothing"):
    try:
        __import__(never)
    except ModuleNotFoundError as error:
        assert error.name == never, error.name
    else:
        raise AssertionError(never)
"""


def run(*words: str, program: str = sys.executable, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | variables
    return subprocess.run([program, *words], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("older", [0, 1])
def test_set_up_and_doctor_take_the_oldest_python_of_the_package_and_refuse_the_one_before(
    older: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oldest = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    major, minor, micro = map(int, oldest.split("."))
    version = (major, minor, micro - older)
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        'case "$*" in -V) echo a Python; exit ;; *ensurepip*) exit 1 ;; esac\n'
        f'exec "{sys.executable}" -c "import sys; sys.version_info = {version}; exec(sys.argv[1])" "$2"\n'
    )
    python.chmod(0o755)
    (tmp_path / "scripts").mkdir()
    shutil.copy(PROJECT / "scripts" / "setup.sh", tmp_path / "scripts")  # It sets up the folder above its own.
    done = run(program=f"{tmp_path}/scripts/setup.sh", PYTHON=str(python))
    assert done.returncode == 1
    assert ("has no venv module" in done.stderr) == (not older), "the next check"
    assert (oldest in done.stderr) == bool(older)
    monkeypatch.setattr(doctor, "sys", SimpleNamespace(version_info=version))
    (part,) = [one for one in doctor._machine() if one.what == "Python"]
    assert (oldest in part.problem) == bool(older)


def test_every_public_name_is_exported_and_documented() -> None:
    assert rlsys.__all__ == rlsys.apps.api.__all__
    for name in rlsys.__all__:
        public = getattr(rlsys, name)
        methods = [member for member, value in vars(public).items() if inspect.isfunction(value) and member[0] != "_"]
        assert all(map(inspect.getdoc, [public, *(getattr(public, member) for member in methods)])), name
    with pytest.raises(AttributeError, match="SearchR2Trainer"):
        _ = rlsys.SearchR2Trainer


def test_a_deprecated_name_is_the_same_module_and_warns_once() -> None:
    done = run("-c", CODE)
    assert done.returncode == 0, done.stderr


def test_cudnn_home_names_the_wheel_that_torch_uses(tmp_path: Path) -> None:
    """Checks an environment with the wheel, in which CUDNN_HOME names another cuDNN, and one without the wheel."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "env"], cwd=tmp_path, check=True)

    def cudnn_home() -> Path:
        command = [tmp_path / "env" / "bin" / "python", "-c", "import os, rlsys; print(os.environ['CUDNN_HOME'])"]
        environment = os.environ | {"PYTHONPATH": str(PROJECT), "CUDNN_HOME": "/opt/cudnn"}
        return Path(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip())

    assert cudnn_home() == Path("/opt/cudnn")
    (packages,) = (tmp_path / "env").glob("lib/python3.*/site-packages")
    (packages / "nvidia" / "cudnn" / "lib").mkdir(parents=True)
    assert cudnn_home() == packages / "nvidia" / "cudnn"


WANTED, OTHER, FIRST = RunError("actor rank 1 is gone"), UserError("second", code="missing", key="a"), KeyError("x")


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        pytest.param(
            BaseExceptionGroup("stages", [FIRST, ExceptionGroup("inner", [OSError(), WANTED])]), WANTED, id="for users"
        ),
        pytest.param(
            ExceptionGroup("both", [ExceptionGroup("inner", [WANTED]), OTHER]), WANTED, id="the first of several"
        ),
        pytest.param(ExceptionGroup("all", [ExceptionGroup("inner", [FIRST]), OSError()]), FIRST, id="none for users"),
    ],
)
def test_the_root_cause_is_the_first_error_with_a_message_for_users(error: BaseException, shown: BaseException) -> None:
    assert root_cause(error) is shown


def test_a_pickled_error_keeps_its_code_and_key() -> None:
    arrived = pickle.loads(pickle.dumps(OTHER))
    assert (type(arrived), str(arrived), arrived.code, arrived.key) == (UserError, "second", "missing", "a")
    arrived = pickle.loads(pickle.dumps(RunError("The disk is full.", code="no_room")))
    assert (type(arrived), str(arrived), arrived.code) == (RunError, "The disk is full.", "no_room")


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "no_room"),
        (errno.EDQUOT, "no_room"),
        (errno.EFBIG, "no_room"),
        (errno.EROFS, "denied"),
        (errno.EACCES, "denied"),
        (errno.EPERM, "denied"),
        (errno.EIO, None),
    ],
)
def test_an_error_of_a_disk_is_shown_as_one_sentence_with_its_file_and_code(number: int, code: Code | None) -> None:
    problem = OSError(number, os.strerror(number), "/a/file")
    for error in (problem, ExceptionGroup("all", [ExceptionGroup("inner", [FIRST, problem])])):
        shown = root_cause(error)
        assert (type(shown), code_of(shown)) == (RunError, code)
        assert str(shown).startswith("/a/file")
        assert "Errno" not in str(shown)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPERM])
def test_only_an_error_that_no_other_call_raises_needs_no_file_to_be_one_of_a_disk(number: int) -> None:
    """A signal to the process of another user raises EPERM."""
    error = OSError(number, os.strerror(number))
    assert (root_cause(error) is error) == (number == errno.EPERM)


@pytest.mark.parametrize(
    ("said", "expected"), [("a.\nb.", "a"), ("\n a b\n", "a b"), ("", "ValueError"), (" \n", "ValueError")]
)
def test_the_first_line_of_an_error_is_never_empty(said: str, expected: str) -> None:
    assert first_line(ValueError(said)) == expected


LOG = """
import logging
import rlsys
for level in (logging.DEBUG, logging.INFO, logging.WARNING):
    logging.getLogger("rlsys.observe.status").log(level, "one of %s", level)
    logging.getLogger("elsewhere").log(level, "of another library")
"""
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (\w+) rlsys\.observe\.status: one of \d+")


@pytest.mark.parametrize(
    ("level", "shown"), [("debug", ["DEBUG", "INFO", "WARNING"]), ("INFO", ["INFO", "WARNING"]), ("loud", [])]
)
def test_rlsys_log_shows_messages_from_its_level_with_time_level_and_name(level: str, shown: list[str]) -> None:
    done = run("-c", LOG, RLSYS_LOG=level)
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    assert [match[1] for text in lines if (match := LINE.fullmatch(text))] == shown
    assert lines.count("of another library") == 1, "its warning, as by default"
