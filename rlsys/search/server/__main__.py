"""`python -m rlsys.search.server`: the process that `launch.SearchServer` starts."""

import sys

from rlsys.search.server.serve import main

if __name__ == "__main__":
    sys.exit(main())
