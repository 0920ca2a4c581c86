"""The search server: an HTTP API over a retriever."""
