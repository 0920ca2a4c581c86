"""The documents build as a site: every page is in the navigation, every link and anchor leads somewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.paths import PROJECT


def test_it_builds_without_a_warning_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # A banner of its theme.
    built = subprocess.run(command, cwd=PROJECT, env=quiet, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    pages = [page.relative_to(PROJECT / "docs").with_suffix("") for page in (PROJECT / "docs").rglob("*.md")]
    written = [tmp_path / ("" if page.name == "index" else page) / "index.html" for page in pages]
    assert [page for page in written if not page.is_file()] == []
    first = (tmp_path / "index.html").read_text()
    assert 'src="http' not in first
    assert 'rel="stylesheet" href="http' not in first
