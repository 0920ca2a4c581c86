"""A small real world, its oracle and a tiny warm-started policy: Search-R1 on a laptop."""
