"""The search tool: a corpus and its index, the server that answers queries, and the client that episodes call.

The package imports only `rlsys.errors` and `rlsys.files` from the rest of rlsys, so it could be published separately.
A server process loads torch only if its encoder needs it.

Process: the search server, and its clients in rollout processes. May import: errors, files.
"""
