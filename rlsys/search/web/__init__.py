"""Search of the web: providers and their keys, pages fetched with care, and a `Retriever` over both.

`retriever.open_web` searches and `retriever.open_pages` serves /access. Every byte that comes from a page is
a stranger's: `guard` says where it may come from, `fetch` how much of it, and `worker` reads it in a process
that may be ended at any moment.
"""
