"""Search of the web: providers and their keys, pages fetched with care, and a `Retriever` over both.

`web_search.open_web` searches and `web_search.open_pages` serves /access. Every byte that comes from a page is a
stranger's: `web_search` bounds where it may come from and how much of it, and `extract` reads it in a process that may
be ended at any moment.
"""
