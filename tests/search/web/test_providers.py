"""Each provider's public format, by hand-written answers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.search.web.providers import PROVIDERS, Answer, MalformedAnswer, Result

GOOGLE = {
    "queries": {"request": [{"startIndex": 1}], "nextPage": [{"startIndex": 11}]},
    "items": [
        {"title": "Paris", "htmlTitle": "<b>Paris</b>", "link": "https://a/", "snippet": "Capital\nof\u00a0France."}
    ],
}
SERPAPI = {
    "search_metadata": {"id": "1", "status": "Success"},
    "answer_box": {"title": "Coffee", "answer": "1554", "snippet": "It opened in 1554.", "link": "https://a/"},
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
SERPER = {
    "answerBox": {"title": "Founders", "answer": "Steve Jobs", "snippet": "Jobs", "link": "https://a/"},
    "knowledgeGraph": {
        "title": "Apple",
        "website": "http://www.apple.com/",
        "description": "An American company.",
        "descriptionLink": "https://en.wikipedia.org/wiki/Apple_Inc.",
    },
    "organic": [{"title": "Apple", "link": "https://b/", "snippet": "Discover.", "position": 1}],
    "peopleAlsoAsk": [{"question": "What?", "snippet": "Fruit.", "title": "T", "link": "https://c/"}],
}
BRAVE = {
    "query": {"original": "q", "more_results_available": False},
    "web": {"results": [{"title": "T", "url": "https://a/", "description": "It&#x27;s &amp; is."}]},
}
BING = {"webPages": {"value": [{"id": "#0", "name": "N", "url": "https://b/", "snippet": "S"}]}}
NOTHING_FOUND = {
    "search_metadata": {"status": "Success"},
    "error": "Google hasn't returned any results for this query.",
}


@pytest.mark.parametrize(
    ("name", "body", "answer"),
    [
        ("google", GOOGLE, Answer((Result("Paris", "https://a/", "Capital of France."),), more=True)),
        (
            "serpapi",
            SERPAPI,
            Answer(
                organic=(Result("Coffee", "https://b/", "A drink."), Result("Only a title", "https://c/", "")),
                direct=(Result("Coffee", "https://a/", "1554 It opened in 1554."),),
                related=(Result("Who?", "https://d/", "Hakam."),),
                more=True,
            ),
        ),
        ("serpapi", NOTHING_FOUND, Answer(())),
        (
            "serper",
            SERPER,
            Answer(
                organic=(Result("Apple", "https://b/", "Discover."),),
                direct=(
                    Result("Founders", "https://a/", "Steve Jobs Jobs"),
                    Result("Apple", "https://en.wikipedia.org/wiki/Apple_Inc.", "An American company."),
                ),
                related=(Result("What?", "https://c/", "Fruit."),),
                more=True,
            ),
        ),
        ("brave", BRAVE, Answer((Result("T", "https://a/", "It's & is."),))),
        ("bing", BING, Answer((Result("N", "https://b/", "S"),), more=True)),
    ],
)
def test_an_answer_is_read_as_its_reference_describes_it(name: str, body: Any, answer: Answer) -> None:
    assert PROVIDERS[name].parse(body) == answer


@pytest.mark.parametrize("name", PROVIDERS)
def test_what_is_no_answer_is_not_an_empty_one(name: str) -> None:
    failed = {"search_metadata": {"status": "Error"}, "error": "We couldn't get valid results."}
    for body in (None, [], "results", 3, {}, {"message": "Bad gateway"}, failed):
        with pytest.raises(MalformedAnswer):
            PROVIDERS[name].parse(body)


_KEYS = "items organic organic_results web results webPages value title link url snippet answer_box error queries"
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS.split()), inner, max_size=4),
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
