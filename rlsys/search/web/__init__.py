"""Web search: provider APIs, guarded fetching of pages, and a `Retriever` over both.

`web_search.open_web` searches and `web_search.WebPages` serves /access. Pages are untrusted: `web_search` restricts
their addresses and size, and `extract` parses them in a subprocess that can be killed at any time.
"""
