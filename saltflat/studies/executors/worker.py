"""The inside of a local worker process."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from multiprocessing.connection import Connection, wait

import torch

from saltflat.studies.executors.parcels import Inbox


def serve(connection: Connection, threads: int) -> None:
    """Answer one task after another until the other side is gone."""
    # Ctrl-C reaches every process of the terminal. The parent decides what it means, and stops the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(min(threads, torch.get_num_threads()))  # fewer where OMP_NUM_THREADS says so
    inbox = Inbox()
    try:
        connection.send_bytes(b"ready")
        while True:
            number, content, task = pickle.loads(connection.recv_bytes())
            connection.send_bytes(inbox.answer(number, content, task))
    except (EOFError, OSError):
        return


def _end_with_parent() -> None:
    """A parent that was killed says nothing: its end of a pipe closes, and the worker gets another parent."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while not wait([parent.sentinel], timeout=1.0) and os.getppid() == parent.pid:
        pass
    os._exit(1)
