"""Runs the search server; `server_process.SearchServer` starts it as `python -m rlsys.search.server`.

On SIGUSR1, the server writes the stacks of its threads to stderr.
"""

import faulthandler
import signal
import sys

from rlsys.search.server.command import run_alone, serve_index

if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, file=2)
    sys.exit(run_alone(serve_index))
