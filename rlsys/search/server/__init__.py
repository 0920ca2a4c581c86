"""The search server: HTTP in front of a retriever."""
