"""Search-R1 experiments: data, index, training and evaluation."""
