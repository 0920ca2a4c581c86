"""Tests of the file of `rlsys report`: complete data, data that cannot become markup, script, content policy."""

import base64
import gzip
import json
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.apps.cli.runs import report as command
from rlsys.observe.run_folder import open_run
from rlsys.report.report_page import inline_json, live_page, packed, policy
from rlsys.report.run_model import build
from tests.support.made_run import Maker, Size, made_run

TEXTS = st.text() | st.sampled_from(["</script><script>", "<!--<script>", "{{ script }}", "\u2028", "\ud800"])


class Scripts(HTMLParser):
    """Collects the texts of script elements in `texts`; `of` maps ids to the texts of elements that have one."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.of: dict[str, str] = {}
        self._id: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._id = dict(attrs).get("id") if tag == "script" else None
        if tag == "script":
            self.texts.append("")

    def handle_data(self, data: str) -> None:
        if self.texts and self.lasttag == "script":
            self.texts[-1] += data
        if self._id:
            self.of[self._id] = self.of.get(self._id, "") + data

    def handle_endtag(self, _: str) -> None:
        self._id = None


@given(st.dictionaries(TEXTS, TEXTS | st.floats(allow_nan=False, allow_infinity=False)))
@settings(max_examples=50)
def test_data_in_a_script_element_stay_data(value: dict[str, object]) -> None:
    parser = Scripts()
    parser.feed(f'<script type="application/json">{inline_json(value)}</script>')
    assert [json.loads(text) for text in parser.texts] == [value]
    assert json.loads(gzip.decompress(base64.b64decode(packed(value)))) == value


def test_number_that_json_lacks_is_null() -> None:
    assert json.loads(inline_json({"a": [float("nan"), float("inf"), 1.5]})) == {"a": [None, None, 1.5]}


def test_report_file_holds_the_model_and_all_chunks(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / name, Maker(Size(steps=2), seed=seed)) for seed, name in enumerate(("one", "two"))]
    command(runs)
    texts, chunks = Scripts(), dict[int, list[object]]()
    texts.feed((runs[0] / "report.html").read_text())
    assert not (runs[1] / "report.html").exists(), "only the first run's folder gets the report"
    model = build([open_run(run) for run in runs], chunks.__setitem__)
    found = json.loads(texts.of["model"])
    assert found | {"made": 0} == json.loads(json.dumps(model)) | {"made": 0}
    held = {name: json.loads(gzip.decompress(base64.b64decode(texts.of[name]))) for name in texts.of if name != "model"}
    assert held == {f"chunk-{number}": rows for number, rows in chunks.items()}


def test_names_of_folders_and_runs_stay_text_on_page_and_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made_run(tmp_path / "\x1b[2J<b>run\u202e", Maker(Size(steps=1)), name="</script><b>")
    (run / "timeline.jsonl").unlink()
    monkeypatch.chdir(run)
    command([Path(".")])
    printed = capsys.readouterr()
    assert "\\x1b[2J<b>run\\u202e: timeline.jsonl" in printed.out
    assert not set(printed.out + printed.err) & {"\x1b", "\u202e"}
    page = (run / "report.html").read_text()
    assert "<title>\\x1b[2J&lt;b&gt;run\\u202e</title>" in page
    assert not set(page) & {"\x1b", "\u202e"}
    assert "<b>" not in page


def test_content_policy_allows_only_the_pages_own_script() -> None:
    allowed = policy("a", "b", live=False)
    assert allowed.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in allowed
    assert policy("a", "b", live=True) == allowed.replace("connect-src 'none'", "connect-src 'self'")
    assert policy("x", "b", live=False) != allowed


def test_run_name_cannot_inject_markup_into_the_live_page() -> None:
    name = "</title><script>alert(1)</script>{{ script }}\u202e"
    page = live_page(name)
    assert "<script>alert" not in page
    assert "&lt;/title&gt;" in page
    assert "\u202e" not in page
    assert "{{ script }}" in page, "an inserted placeholder must not be filled in"


@pytest.mark.parametrize("package", ["rlsys.report", "rlsys.apps.chat"])
def test_no_script_parses_markup_or_evaluates_text(package: str) -> None:
    scripts = [file for file in (files(package) / "static").iterdir() if file.name.endswith(".js")]
    assert scripts
    words = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "DOMParser")
    assert [(file.name, word) for file in scripts for word in words if word in file.read_text()] == []
