"""`rlsys watch`: the page of a run while it goes on, and its figures for Prometheus. Reads the run's folder alone."""
