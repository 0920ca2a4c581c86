"""Markdown to sections, worked out by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlsys.search.ingest import Section, sections


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "intro\n# Guide\na\n## Install\nb\n### Linux\nc\n## Use\nd\n# Other\ne",
            ["name", "Guide", "Guide > Install", "Guide > Install > Linux", "Guide > Use", "Other"],
        ),
        ("# Guide\n\n## Install\n\ntext\n\n## Nothing\n", ["Guide > Install"]),
        (
            "---\ntitle: My Guide\ntags: [a]\n---\nhello\n# My Guide\nmore\n## Sub\nrest",
            ["My Guide", "My Guide", "My Guide > Sub"],
        ),
    ],
    ids=["path", "no text below", "front matter"],
)
def test_headings_become_the_path_of_titles(source: str, expected: list[str]) -> None:
    assert [section.title for section in sections(source, "name")] == expected


@pytest.mark.parametrize(
    ("front_matter", "title"),
    [
        ("title: 2024-13-45", "2024-13-45"),
        ("a: 1\ntitle: >\n  two\n  lines\nb: {title: not this}", "two lines"),
        ("title: " + "1" * 5000, "1" * 200),
        ("title: null", "name"),
        ("a: " + "[" * 300 + "]" * 300 + "\ntitle: deep", "deep"),
    ],
)
def test_a_title_is_taken_as_it_is_written(front_matter: str, title: str) -> None:
    (section,) = sections(f"---\n{front_matter}\n---\ntext", "name")
    assert section == Section(title, "text")


@pytest.mark.parametrize(
    "front_matter",
    [
        "- a list",
        'title: "\\UFFFFFFFF"',
        'title: "\\ud800"',
        f"%YAML {'1' * 5000}.1\n--- \ntitle: x",
        "title: x\n" + "a: b\n" * 10_000,
    ],
    ids=["a list", "no character", "a surrogate", "a version", "long"],
)
def test_what_is_no_sound_front_matter_is_text(front_matter: str) -> None:
    found = list(sections(f"---\n{front_matter}\n---\n\nlast", "name"))
    assert found[-1].text.endswith("last")
    assert front_matter.split()[0] in "".join(section.title + section.text for section in found)


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<p title='a > b' class=\"c > d\">x</p>", "x"),
        ("<!-- a <b> -->x<!---->y<!--->z<?php a ?>1<!DOCTYPE html>2<![CDATA[ > ]]>3", "xyz123"),
        ("<p>1 < 2 <3 &lt; &amp; &#65;</p>", "1 < 2 <3 < & A"),
        ("<p>a <!-- never closed <b>c</b>", "a <!-- never closed c"),
        ("<p>a <b never closed <i>c</i>", "a <b never closed c"),
        ("<p>a <b x='never closed> c</b> d", "a  c d"),
        ("<p>&#" + "1" * 5000, "&#" + "1" * 5000),
    ],
    ids=["quotes", "hidden", "entities", "open comment", "open tag", "open quote", "digits"],
)
def test_html_loses_what_is_not_shown(html: str, text: str) -> None:
    (section,) = sections(f"<div>\n{html}\n</div>", "name")
    assert section.text == text


READS_EACH = """
import resource, sys
from rlsys.search.ingest import sections
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
for source in sys.stdin.read().split(chr(0)):
    print(sum(1 for _ in sections(source, "name")))
"""
"""60 s of CPU are 20 times what all of them take."""


def test_time_and_memory_grow_with_the_length_of_a_document() -> None:
    size = 200_000
    repeated = ("<!--", "<!-- a\n", "<?", "<script ", "</p", '<p a="', "<p a='<p b=\"", '<p a="="', "<!A", "<")
    attacks = [f"<div>{part * (size // len(part))}" for part in repeated]
    aliases = "\n".join(f"b{at}: &b{at} [{', '.join([f'*b{at - 1}'] * 9)}]" for at in range(1, 9))
    attacks += [
        f"---\nb0: &b0 [x]\n{aliases}\ntitle: *b8\n---\nx",
        f"---\ntitle: {'[' * size}\n---\nx",
        f"---\ntitle: {'[' * 15_000}{']' * 15_000}\n---\nx",
        f"# {'a' * size}\n" + "## b\nx\n" * (size // 8),
    ]
    command = [sys.executable, "-c", READS_EACH]
    child = subprocess.run(command, input="\0".join(attacks), capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert len(child.stdout.split()) == len(attacks)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "See [the *docs*](http://a.b), ![a map](m.png), `x = 1` and <b>bold</b> &amp; more.\n\n<p>raw</p>",
            "See the docs, a map, x = 1 and bold & more.\n\nraw",
        ),
        ("Do:\n\n- one\n- two\n  1. deep\n\n3. three\n4. four", "Do:\n\n- one\n- two\n1. deep\n\n3. three\n4. four"),
        ("before\n\n| a | b |\n|---|---|\n| 1 | **2** |\n\nafter", "before\n\na | b\n1 | 2\n\nafter"),
        (f"# {'word ' * 50}\n\ntext", f"{'word ' * 49}word\n\ntext"),
    ],
    ids=["words", "lists", "tables", "a heading too long to be repeated"],
)
def test_marks_are_left_out_and_list_items_and_rows_keep_a_line_each(source: str, text: str) -> None:
    assert list(sections(source, "name")) == [Section("name", text)]


def test_code_is_kept_and_marked() -> None:
    (section,) = sections("Run:\n\n```sh\n# no heading\n\n  pip\n```\n\nthen\n\n    indented\n", "name")
    assert section.text == "Run:\n\n# no heading\n\n  pip\n\nthen\n\nindented"
    assert [section.text[begin:end] for begin, end in section.code] == ["# no heading\n\n  pip", "indented"]
