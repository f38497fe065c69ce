"""Ports for the stores of runs with several ranks."""

import itertools
import os
import socket

FIRST, COUNT = 10_000, 20_000
"""Below the kernel's own range (from 32,768): it gives those ports to sockets that name none, gloo's among them."""
_tries = itertools.count(os.getpid() * 101)


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody uses, and that the kernel gives to nobody before rank 0 takes it.

    With a port of the kernel's range, another run of the same machine may take it in between; rank 1 then tries for
    half an hour to reach its store at a stranger's socket.
    """
    while True:
        port = FIRST + next(_tries) % COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
