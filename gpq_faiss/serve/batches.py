"""Tasks of several requests, done together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Task = TypeVar("Task")
Answer = TypeVar("Answer")

MOST = 64
"""Maximum tasks per batch."""


class Batcher(Generic[Task, Answer]):
    """One thread that runs all waiting tasks as a batch, while the next ones gather.

    Args:
        run: processes a batch; returns an answer per task, or the error to raise for it.
    """

    def __init__(self, run: Callable[[Sequence[Task]], Sequence[Answer | Exception]]) -> None:
        self.run = run
        self._waiting: deque[tuple[Task, Future[Answer]]] = deque()
        self._thread = ThreadPoolExecutor(1, "gpq-batch")

    async def submit(self, task: Task) -> Answer:
        """The answer to ``task``. Raises what ``run`` returned for it, or raised."""
        future: Future[Answer] = Future()
        self._waiting.append((task, future))
        self._thread.submit(self._work)  # often finds that a batch before has taken the task along
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        taken = [self._waiting.popleft() for _ in range(min(MOST, len(self._waiting)))]
        # Cancelled callers need no answer.
        batch = [one for one in taken if one[1].set_running_or_notify_cancel()]
        answers: Sequence[Answer | Exception] = []
        try:
            answers = self.run([task for task, _ in batch]) if batch else []
        except Exception as error:
            answers = [error] * len(batch)
        for (_, future), answer in zip(batch, answers, strict=True):
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def close(self) -> None:
        """Do what still waits, and stop."""
        self._thread.shutdown()
