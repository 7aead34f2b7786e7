"""Batches tasks of several requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from ..errors import GpqError

Task = TypeVar("Task")
Answer = TypeVar("Answer")

MOST = 64
"""Maximum tasks per batch."""


class BusyError(GpqError):
    """The queue is full."""

    status = 503


class Batcher(Generic[Task, Answer]):
    """Collects tasks and runs them in batches, one at a time, in a separate thread.

    Args:
        run: processes a batch; returns an answer per task, or an error, which is raised at the task's submission.
        wait: seconds that the first task waits for others. The next batch fills while one runs.
        pending: maximum waiting tasks.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Task]], Sequence[Answer | Exception]],
        *,
        wait: float = 0.0,
        pending: int = 1024,
    ) -> None:
        self.run, self.wait, self.pending = run, wait, pending
        self._queue: asyncio.Queue[tuple[Task, asyncio.Future[Answer], float]] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, "gpq-batch")
        self._worker: asyncio.Task[None] | None = None

    async def submit(self, task: Task) -> Answer:
        """The answer to ``task``.

        Raises:
            BusyError: too many tasks wait.
            Exception: returned or raised by ``run``.
        """
        if self._queue.qsize() >= self.pending:
            raise BusyError(f"{self.pending} requests are already waiting: try again later")
        loop = asyncio.get_running_loop()
        if self._worker is None:
            self._worker = loop.create_task(self._work())
        future: asyncio.Future[Answer] = loop.create_future()
        self._queue.put_nowait((task, future, loop.time()))
        return await future

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            taken = [await self._queue.get()]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(taken[0][2] + self.wait):
                    while len(taken) < MOST:
                        taken.append(await self._queue.get())
            # Cancelled callers need no answer.
            batch = [(task, future) for task, future, _ in taken if not future.done()]
            answers: Sequence[Answer | Exception]
            try:
                answers = await loop.run_in_executor(self._thread, self.run, [task for task, _ in batch])
            except Exception as error:
                answers = [error] * len(batch)
            for (_, future), answer in zip(batch, answers, strict=True):
                if future.done():
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    async def close(self) -> None:
        """Stop after the current batch; waiting tasks get no answer."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        while not self._queue.empty():
            self._queue.get_nowait()[1].cancel()
        await asyncio.to_thread(self._thread.shutdown)
