"""The search tool: a corpus and its index, the server that answers queries, and the client of the episodes.

What asks is light: client and server load no library of models, `encoders` does, in processes of its own where it
serves. A way to retrieve is anything that fits `retriever.Retriever`. docs/architecture.md has a map.
"""
