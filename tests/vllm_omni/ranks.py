"""Processes that form one group of the engine and run the same functions."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

SECONDS = 240.0  # for one call; the first one includes the processes' imports


class Ranks:
    """``world_size`` processes, started by the first call and again after one that failed or hung."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[tuple[BaseProcess, Connection]] = []

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = SECONDS) -> list[Any]:
        """What ``function(*args)`` returns in each process, in rank order.

        ``function`` is one that a module names; it and its results travel by pickle, so return no
        tensors. An exception in any process, or no answer in ``seconds``, ends all and is raised as
        AssertionError.
        """
        if not self._processes:
            self._processes = self._started()
        for _, connection in self._processes:
            connection.send((function, args))
        try:
            return self._answers(time.monotonic() + seconds)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for process, connection in self._processes:
            process.kill()
            process.join()
            connection.close()
        self._processes = []

    def _started(self) -> list[tuple[BaseProcess, Connection]]:
        context = multiprocessing.get_context("spawn")
        meeting = Path(tempfile.mkdtemp()) / "meeting"
        started: list[tuple[BaseProcess, Connection]] = []
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world_size, meeting, theirs), daemon=True
            )
            process.start()
            theirs.close()
            started.append((process, ours))
        return started

    def _answers(self, deadline: float) -> list[Any]:
        open_ = {connection: rank for rank, (_, connection) in enumerate(self._processes)}
        answers: dict[int, Any] = {}
        while open_:
            ready = wait(list(open_), timeout=max(0.0, deadline - time.monotonic()))
            assert ready, f"no answer in time from rank {sorted(open_.values())}"
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = open_.pop(connection)
                answers[rank] = _answer(rank, connection)
        return [answers[rank] for rank in range(self.world_size)]


def _answer(rank: int, connection: Connection) -> Any:
    try:
        good, value = connection.recv()
    except EOFError:
        raise AssertionError(f"rank {rank} ended without an answer") from None
    assert good, f"rank {rank}:\n{value}"
    return value


def _serve(rank: int, world_size: int, meeting: Path, connection: Connection) -> None:
    from tests.vllm_omni.engine import running

    torch.set_num_threads(1)
    with running(rank, world_size, meeting):
        while True:
            function, args = connection.recv()
            try:
                connection.send((True, function(*args)))
            except Exception:
                connection.send((False, traceback.format_exc()))
