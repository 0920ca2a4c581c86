"""Search-R1 on a laptop: a small real world, its scripted oracle and a tiny warm-started policy."""
