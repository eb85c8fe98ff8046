"""The inside of a local worker process."""

from __future__ import annotations

import pickle
import signal
from multiprocessing.connection import Connection

import torch

from saltflat.studies.executors.parcels import TaskRunner


def serve_tasks(connection: Connection, threads: int) -> None:
    """Answer one task after another until the other side is gone."""
    # Ctrl-C reaches every process of the terminal. The parent decides what it means, and stops the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(min(threads, torch.get_num_threads()))  # fewer where OMP_NUM_THREADS says so
    inbox = TaskRunner()
    try:
        connection.send_bytes(b"ready")
        while True:
            number, content, task = pickle.loads(connection.recv_bytes())
            connection.send_bytes(inbox.run_task(number, content, task))
    except (EOFError, OSError):
        return
