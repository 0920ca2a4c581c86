"""What goes into the file: data that cannot become markup, and modules that become one script."""

from __future__ import annotations

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.report.report_page import bundle, inline_json, live_page, packed, policy

TEXTS = st.text() | st.sampled_from(["</script><script>", "<!--<script>", "{{ script }}", "\u2028", "\ud800"])


class Scripts(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def handle_starttag(self, *_: object) -> None:
        self.texts.append("")

    def handle_data(self, data: str) -> None:
        self.texts[-1] += data


@given(st.dictionaries(TEXTS, TEXTS | st.floats(allow_nan=False, allow_infinity=False)))
def test_data_in_a_script_element_stay_data(value: dict[str, object]) -> None:
    parser = Scripts()
    parser.feed(f'<script type="application/json">{inline_json(value)}</script>')
    assert len(parser.texts) == 1
    assert json.loads(parser.texts[0]) == value


@given(st.lists(TEXTS))
def test_packed_data_come_back(value: list[str]) -> None:
    text = packed(value)
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=")
    assert json.loads(gzip.decompress(base64.b64decode(text))) == value


def test_a_figure_that_is_no_number_is_null() -> None:
    assert inline_json({"a": [float("nan"), float("inf"), 1.5]}) == '{"a":[null,null,1.5]}'


def test_modules_come_after_what_they_import_each_in_its_own_scope() -> None:
    script = bundle(
        {
            "main.js": 'import { f } from "./a.js";\nimport { g } from "./b.js";\nf(g);\n',
            "a.js": "const own = 1;\nexport function f(x) { return own + x; }\n",
            "b.js": 'import { f } from "./a.js";\nconst own = 2;\nexport const g = f(own);\n',
        },
        "main.js",
    )
    assert script.index('modules["a.js"]') < script.index('modules["b.js"]') < script.index('modules["main.js"]')
    assert "import" not in script
    assert "export" not in script
    assert "return { g };" in script


@pytest.mark.parametrize(
    ("modules", "told"),
    [
        ({"main.js": 'import { f } from "./a.js";'}, "a.js"),
        ({"main.js": 'import { f } from "./a.js";', "a.js": "export const g = 1;"}, "f"),
        (
            {
                "main.js": 'import { f } from "./a.js";',
                "a.js": 'import { h } from "./main.js";\nexport const f = 1;',
            },
            "main.js",
        ),
        ({"main.js": 'import f from "./a.js";', "a.js": ""}, "main.js"),
        ({"main.js": "export { f };"}, "main.js"),
        ({"main.js": 'const a = "</script>";'}, "main.js"),
    ],
)
def test_modules_that_cannot_be_put_together_are_refused(modules: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        bundle(modules, "main.js")


def test_the_policy_allows_the_pages_own_script_and_nothing_from_elsewhere() -> None:
    allowed = policy("a", "b", live=False)
    assert allowed.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in allowed
    assert "connect-src 'none'" in allowed
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
    for file in found:
        text = file.read_text()
        assert len(text.splitlines()) < 500, file.name
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "DOMParser",
        ):
            assert word not in text, (file.name, word)


def test_modules_import_what_they_use_and_export_what_is_used() -> None:
    found = {
        file.name: file.read_text()
        for file in (files("rlsys.report") / "static").iterdir()
        if file.name.endswith(".js")
    }
    used: dict[str, set[str]] = {name: set() for name in found}
    for name, text in found.items():
        for names, other in re.findall(r'import \{ ([\w, ]+) \} from "\./(\w+\.js)";', text):
            for one in names.split(", "):
                used[other].add(one)
                assert len(re.findall(rf"\b{one}\b", text)) > 1, f"{name} does not use {one}"
    for name, text in found.items():
        exported = set(re.findall(r"^export (?:async )?(?:function|const) (\w+)", text, re.MULTILINE))
        assert exported == used[name], name
