"""Runs the search server; `server_process.SearchServer` starts it as `python -m rlsys.search.server`."""

import sys

from rlsys.search.server.command import run_alone, serve_index

if __name__ == "__main__":
    sys.exit(run_alone(serve_index))
