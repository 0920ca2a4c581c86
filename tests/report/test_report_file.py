"""The file of `rlsys report`: its data cannot become markup, its modules become one script, and it holds all that is shown."""

from __future__ import annotations

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
from rlsys.report.report_page import bundle, inline_json, live_page, packed, policy
from rlsys.report.run_model import build
from tests.support.made_run import Maker, Size, made_run
from tests.support.refusals import refused

TEXTS = st.text() | st.sampled_from(["</script><script>", "<!--<script>", "{{ script }}", "\u2028", "\ud800"])


class Scripts(HTMLParser):
    """The texts of script elements; `of` has those that have an id."""

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


def test_the_file_holds_the_model_and_every_part_of_it(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / name, Maker(Size(steps=2), seed=seed)) for seed, name in enumerate(("one", "two"))]
    command(runs)
    texts, chunks = Scripts(), dict[int, list[object]]()
    texts.feed((runs[0] / "report.html").read_text())
    assert not (runs[1] / "report.html").exists(), "it lies in the first run's folder"
    model = build([open_run(run) for run in runs], chunks.__setitem__)
    found = json.loads(texts.of["model"])
    assert found | {"made": 0} == json.loads(json.dumps(model)) | {"made": 0}
    held = {name: json.loads(gzip.decompress(base64.b64decode(texts.of[name]))) for name in texts.of if name != "model"}
    assert held == {f"chunk-{number}": rows for number, rows in chunks.items()}


def test_names_of_folders_and_runs_are_text_on_the_page_and_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made_run(tmp_path / "\x1b[2J<b>run\u202e", Maker(Size(steps=1)), name="</script><b>")
    (run / "timeline.jsonl").unlink()
    monkeypatch.chdir(run)
    command([Path(".")])
    said = capsys.readouterr()
    assert "\\x1b[2J<b>run\\u202e: timeline.jsonl is missing" in said.out
    assert not set(said.out + said.err) & {"\x1b", "\u202e"}
    page = (run / "report.html").read_text()
    assert "<title>\\x1b[2J&lt;b&gt;run\\u202e</title>" in page
    assert not set(page) & {"\x1b", "\u202e"}
    assert "<b>" not in page


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", Maker(Size(steps=1)))
    out = run / "config.yaml" / "report.html"
    with refused("denied", out):
        command([run], out)


def test_modules_come_after_what_they_import_each_in_its_own_scope() -> None:
    modules = {
        "main.js": 'import { f } from "./a.js";\nimport { g } from "./b.js";\nf(g);\n',
        "a.js": "const own = 1;\nexport function f(x) { return own + x; }\n",
        "b.js": 'import { f } from "./a.js";\nconst own = 2;\nexport const g = f(own);\n',
    }
    script = bundle(modules, "main.js")
    places = [script.index(f'modules["{name}"]') for name in ("a.js", "b.js", "main.js")]
    assert places == sorted(places)
    assert not {"import", "export"} & {*script.split()}
    assert "return { g };" in script


def test_the_policy_allows_the_pages_own_script_and_nothing_from_elsewhere() -> None:
    allowed = policy("a", "b", live=False)
    assert allowed.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in allowed
    assert policy("a", "b", live=True) == allowed.replace("connect-src 'none'", "connect-src 'self'")
    assert policy("x", "b", live=False) != allowed


def test_a_name_of_a_run_cannot_reach_into_the_page() -> None:
    name = "</title><script>alert(1)</script>{{ script }}\u202e"
    page = live_page(name)
    assert "<script>alert" not in page
    assert "&lt;/title&gt;" in page
    assert "\u202e" not in page
    assert "{{ script }}" in page, "what is filled in is not filled in again"


def test_no_module_parses_markup_or_writes_style_attributes() -> None:
    """The page's rule that text of others is text; its policy would refuse the second."""
    found = [file for file in (files("rlsys.report") / "static").iterdir() if file.name.endswith(".js")]
    assert len(found) > 10
    words = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "DOMParser")
    assert [(file.name, word) for file in found for word in words if word in file.read_text()] == []
