"""Models of the search stack: dense encoders and rerankers."""
