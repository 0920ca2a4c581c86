"""A worker without a model, in place of `rlsys.search.encoders.process`: a vector holds the length of its text.

The text or model "die" kills the worker, and the text "hang" stops it.
"""

import os
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

import numpy as np

from rlsys.search.encoders.spec import FAMILIES, EncoderFacts


def work(pipe: Connection) -> None:
    """Answer until the pipe closes or a text ends this process."""
    spec, _ = pipe.recv()
    if spec.name == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    pipe.send(EncoderFacts(spec.name, "e5", FAMILIES["e5"], spec.max_tokens, 1, "0" * 64))
    while True:
        number, texts, _ = pipe.recv()
        for text, sent in (("die", signal.SIGKILL), ("hang", signal.SIGSTOP)):
            if text in texts:
                os.kill(os.getpid(), sent)
        pipe.send((number, np.array([[len(text)] for text in texts], dtype=np.float32)))


if __name__ == "__main__":
    with suppress(EOFError):  # the owner has ended
        work(Connection(int(sys.argv[1])))
