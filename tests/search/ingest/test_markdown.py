"""Markdown to sections, worked out by hand."""

from __future__ import annotations

from rlsys.search.ingest.markdown import Section, sections


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


def test_links_images_and_html_become_words() -> None:
    source = (
        "See [the *docs*](http://a.b), ![a map](m.png), `x = 1` and <b>bold</b> &amp; more.\n\n<p>raw</p>"
    )
    (section,) = sections(source, "name")
    assert section == Section("name", "See the docs, a map, x = 1 and bold & more.\n\nraw")


def test_headings_lose_their_marks() -> None:
    assert titles("# `code` and [link](x) #\ntext\n\nSetext *title*\n====\ntext") == [
        "code and link",
        "Setext title",
    ]


def test_lists_keep_a_line_for_each_item() -> None:
    (section,) = sections("Do:\n\n- one\n- two\n  1. deep\n\n3. three\n4. four\n\nDone.", "name")
    assert section.text == "Do:\n\n- one\n- two\n1. deep\n\n3. three\n4. four\n\nDone."


def test_tables_keep_a_line_for_each_row() -> None:
    (section,) = sections("before\n\n| a | b |\n|---|---|\n| 1 | **2** |\n\nafter", "name")
    assert section.text == "before\n\na | b\n1 | 2\n\nafter"


def test_code_is_kept_and_marked() -> None:
    (section,) = sections("Run:\n\n```sh\n# no heading\n\n  pip\n```\n\nthen\n\n    indented\n", "name")
    assert section.text == "Run:\n\n# no heading\n\n  pip\n\nthen\n\nindented"
    assert [section.text[begin:end] for begin, end in section.code] == ["# no heading\n\n  pip", "indented"]
