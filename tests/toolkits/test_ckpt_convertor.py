"""Test of calling toolkits/ckpt_convertor through links; tests/live/test_scripts.py runs one script to its end."""

import os
from pathlib import Path

from tests.support.paths import PROJECT
from tests.support.scripts import run_script

SCRIPTS = PROJECT / "toolkits" / "ckpt_convertor" / "megatron_convertor"


def test_a_script_runs_through_a_chain_of_links(tmp_path: Path) -> None:
    (tmp_path / "first").symlink_to(os.path.relpath(SCRIPTS / "hf2mg_3b.sh", tmp_path))
    (tmp_path / "second link").symlink_to("first")
    done = run_script(tmp_path / "second link", "no where", "out", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("no where")
    assert not (tmp_path / "out").exists()
