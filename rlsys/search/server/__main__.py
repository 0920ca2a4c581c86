"""`python -m rlsys.search.server`: the process that `server_process.SearchServer` starts."""

import sys

from rlsys.search.server.command import run_alone, serve_index

if __name__ == "__main__":
    sys.exit(run_alone(serve_index))
