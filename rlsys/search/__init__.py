"""The search tool: a corpus and its index, the server that answers queries, and the client of the episodes.

Nothing of rlsys is needed but errors and files, so that it could be shipped alone; a server process loads no torch unless its
encoder does.

Process: the search server, and its clients in rollout processes. May import: errors, files.
"""
