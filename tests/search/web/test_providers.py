"""Each provider's public format, by hand-written answers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.search.web.providers import PROVIDERS, Answer, MalformedAnswer, Result


def test_google_reads_items_and_whether_there_are_more() -> None:
    body = {
        "kind": "customsearch#search",
        "queries": {"request": [{"startIndex": 1}], "nextPage": [{"startIndex": 11}]},
        "searchInformation": {"totalResults": "12300"},
        "items": [
            {
                "kind": "customsearch#result",
                "title": "Paris - Wikipedia",
                "htmlTitle": "<b>Paris</b> - Wikipedia",
                "link": "https://en.wikipedia.org/wiki/Paris",
                "displayLink": "en.wikipedia.org",
                "snippet": "Paris is the capital and\nlargest city of\u00a0France.",
                "htmlSnippet": "<b>Paris</b> is ...",
            }
        ],
    }
    found = Result(
        "Paris - Wikipedia",
        "https://en.wikipedia.org/wiki/Paris",
        "Paris is the capital and largest city of France.",
    )
    assert PROVIDERS["google"].parse(body) == Answer(organic=(found,), more=True)
    del body["items"], body["queries"]
    assert PROVIDERS["google"].parse(body) == Answer(organic=())


def test_serpapi_reads_answer_box_organic_results_and_related_questions() -> None:
    body = {
        "search_metadata": {"id": "1", "status": "Success"},
        "answer_box": {
            "type": "organic_result",
            "title": "Coffee",
            "answer": "1554",
            "snippet": "The first coffeehouse opened in 1554.",
            "link": "https://a/",
        },
        "organic_results": [
            {"position": 1, "title": "Coffee", "link": "https://b/", "snippet": "A drink."},
            {"position": 2, "title": "Only a title", "link": "https://c/"},
        ],
        "related_questions": [
            {"question": "Who?", "snippet": "Hakam.", "title": "Page", "link": "https://d/"},
            {"question": "Not loaded yet?", "next_page_token": "x"},
        ],
        "serpapi_pagination": {"current": 1, "next": "https://serpapi.com/search.json?start=10"},
    }
    assert PROVIDERS["serpapi"].parse(body) == Answer(
        organic=(Result("Coffee", "https://b/", "A drink."), Result("Only a title", "https://c/", "")),
        direct=(Result("Coffee", "https://a/", "1554 The first coffeehouse opened in 1554."),),
        related=(Result("Who?", "https://d/", "Hakam."),),
        more=True,
    )


def test_serpapi_tells_nothing_found_from_a_search_that_failed() -> None:
    nothing = {
        "search_metadata": {"status": "Success"},
        "search_information": {"organic_results_state": "Fully empty"},
        "error": "Google hasn't returned any results for this query.",
    }
    assert PROVIDERS["serpapi"].parse(nothing) == Answer(organic=())
    failed = {"search_metadata": {"status": "Error"}, "error": "We couldn't get valid results."}
    with pytest.raises(MalformedAnswer, match="valid results"):
        PROVIDERS["serpapi"].parse(failed)


def test_serper_reads_boxes_organic_and_questions() -> None:
    body = {
        "searchParameters": {"q": "apple", "type": "search"},
        "answerBox": {"title": "Founders", "answer": "Steve Jobs", "snippet": "Jobs", "link": "https://a/"},
        "knowledgeGraph": {
            "title": "Apple",
            "type": "Technology company",
            "website": "http://www.apple.com/",
            "description": "An American company.",
            "descriptionSource": "Wikipedia",
            "descriptionLink": "https://en.wikipedia.org/wiki/Apple_Inc.",
        },
        "organic": [{"title": "Apple", "link": "https://b/", "snippet": "Discover.", "position": 1}],
        "peopleAlsoAsk": [{"question": "What?", "snippet": "Fruit.", "title": "T", "link": "https://c/"}],
        "relatedSearches": [{"query": "apple store"}],
    }
    assert PROVIDERS["serper"].parse(body) == Answer(
        organic=(Result("Apple", "https://b/", "Discover."),),
        direct=(
            Result("Founders", "https://a/", "Steve Jobs Jobs"),
            Result("Apple", "https://en.wikipedia.org/wiki/Apple_Inc.", "An American company."),
        ),
        related=(Result("What?", "https://c/", "Fruit."),),
        more=True,
    )


def test_brave_and_bing_have_names_of_their_own() -> None:
    brave = {
        "type": "search",
        "query": {"original": "q", "more_results_available": False},
        "web": {"results": [{"title": "T", "url": "https://a/", "description": "It&#x27;s &amp; is."}]},
    }
    assert PROVIDERS["brave"].parse(brave) == Answer(organic=(Result("T", "https://a/", "It's & is."),))
    bing = {
        "_type": "SearchResponse",
        "webPages": {"value": [{"id": "#0", "name": "N", "url": "https://b/", "snippet": "S"}]},
    }
    assert PROVIDERS["bing"].parse(bing) == Answer(organic=(Result("N", "https://b/", "S"),), more=True)


@pytest.mark.parametrize("name", PROVIDERS)
def test_what_is_no_answer_is_not_an_empty_one(name: str) -> None:
    for body in (None, [], "results", 3, {}, {"message": "Bad gateway"}):
        with pytest.raises(MalformedAnswer):
            PROVIDERS[name].parse(body)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["items", "organic", "organic_results", "web", "results", "webPages", "value", "title"])
            | st.sampled_from(["link", "url", "snippet", "answer_box", "error", "search_metadata", "queries"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=50)
@given(_json, st.sampled_from(sorted(PROVIDERS)))
def test_any_json_is_an_answer_or_malformed(body: Any, name: str) -> None:
    try:
        answer = PROVIDERS[name].parse(body)
    except MalformedAnswer:
        return
    for result in answer.organic + answer.direct + answer.related:
        assert all(isinstance(part, str) for part in result)
        assert result.snippet or (result.title and result.url)
