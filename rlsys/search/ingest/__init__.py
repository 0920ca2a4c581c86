"""Own documents to passages."""
