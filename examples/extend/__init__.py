"""Components to copy and change: one file each, chosen by config alone. docs/extending.md explains them."""
