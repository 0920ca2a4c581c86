"""The search tool: a corpus and its index, the server that answers queries, and the client that episodes call.

It imports only errors and files from rlsys, so it could ship alone. A server process loads torch only if its encoder
needs it.

Process: the search server, and its clients in rollout processes. May import: errors, files.
"""
