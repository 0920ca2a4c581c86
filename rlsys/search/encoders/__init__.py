"""Text to vectors and to scores: the models of the search stack."""
