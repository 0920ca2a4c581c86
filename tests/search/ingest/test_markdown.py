"""Markdown to sections, worked out by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlsys.search.ingest import Section, sections


def titles(source: str) -> list[str]:
    return [section.title for section in sections(source, "name")]


def test_headings_become_the_path_of_titles() -> None:
    source = "intro\n# Guide\na\n## Install\nb\n### Linux\nc\n## Use\nd\n# Other\ne"
    assert titles(source) == [
        "name",
        "Guide",
        "Guide > Install",
        "Guide > Install > Linux",
        "Guide > Use",
        "Other",
    ]


def test_a_heading_without_text_is_only_a_title() -> None:
    assert titles("# Guide\n\n## Install\n\ntext\n\n## Nothing\n") == ["Guide > Install"]


def test_front_matter_gives_the_title_once() -> None:
    assert titles("---\ntitle: My Guide\ntags: [a]\n---\nhello\n# My Guide\nmore\n## Sub\nrest") == [
        "My Guide",
        "My Guide",
        "My Guide > Sub",
    ]


def test_what_is_not_front_matter_is_text() -> None:
    (section,) = sections("---\n- a list\n---\ntext", "name")
    assert section == Section("name", "- a list\n\ntext")
    assert titles("---\n[unclosed: {\n\n...\ntext") == ["name"]


@pytest.mark.parametrize(
    ("front_matter", "title"),
    [
        ("title: 2024-13-45", "2024-13-45"),
        ("title: '~'", "~"),
        ("a: 1\ntitle: >\n  two\n  lines\nb: {title: not this}", "two lines"),
        ("title: " + "1" * 5000, "1" * 200),
        ("title: null", "name"),
        ("a: &a x\ntitle: *a", "name"),
        ("a: " + "[" * 300 + "]" * 300 + "\ntitle: deep", "deep"),
    ],
)
def test_a_title_is_taken_as_it_is_written(front_matter: str, title: str) -> None:
    (section,) = sections(f"---\n{front_matter}\n---\ntext", "name")
    assert section == Section(title, "text")


@pytest.mark.parametrize(
    "front_matter",
    [
        'title: "\\UFFFFFFFF"',
        'title: "\\ud800"',
        f"%YAML {'1' * 5000}.1\n--- \ntitle: x",
        "title: x\n--- y",
        "title: x\n" + "a: b\n" * 10_000,
    ],
)
def test_what_is_no_sound_front_matter_is_text(front_matter: str) -> None:
    found = list(sections(f"---\n{front_matter}\n---\n\nlast", "name"))
    assert found[-1].text.endswith("last")
    assert front_matter.split()[0] in "".join(section.title + section.text for section in found)


def test_a_heading_that_is_too_long_to_be_repeated_is_text() -> None:
    long = "word " * 50
    assert list(sections(f"# Guide\n\n## {long}\n\ntext", "name")) == [Section("Guide", f"{long.strip()}\n\ntext")]


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
    ],
    ids=["words", "lists", "tables"],
)
def test_marks_are_left_out_and_list_items_and_rows_keep_a_line_each(source: str, text: str) -> None:
    assert list(sections(source, "name")) == [Section("name", text)]


def test_code_is_kept_and_marked() -> None:
    (section,) = sections("Run:\n\n```sh\n# no heading\n\n  pip\n```\n\nthen\n\n    indented\n", "name")
    assert section.text == "Run:\n\n# no heading\n\n  pip\n\nthen\n\nindented"
    assert [section.text[begin:end] for begin, end in section.code] == ["# no heading\n\n  pip", "indented"]
