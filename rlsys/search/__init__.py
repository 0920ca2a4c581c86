"""The search tool: a corpus and its index, the server that answers queries, and the client of the episodes.

`client` and `launch` are light; `encoders`, `index` and `server` import torch, FAISS and FastAPI, and no
other package of rlsys does. A way to retrieve is anything that fits `retriever.Retriever`.
"""
