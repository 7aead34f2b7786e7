"""Limits of connections, before any request: their number per client, and their time."""

from __future__ import annotations

import asyncio
from collections import Counter

from uvicorn.protocols.http.h11_impl import H11Protocol

from .guard import Settings, client_of

_TOO_MANY = b'{"error": "too many connections from this address"}'
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\nretry-after: 1\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_TOO_MANY), _TOO_MANY)
)


def limited(settings: Settings) -> type[H11Protocol]:
    """Uvicorn's HTTP protocol with the limits of ``settings``, for ``uvicorn.Config(http=...)``.

    Uvicorn waits for the rest of a request's head without end. Here a connection has ``timeout`` seconds for each head. It is cut off when
    a request takes twice the timeout, after which :class:`.guard.Guard` should have answered: the client does not read, then.
    """
    numbers: Counter[str] = Counter()

    class Limited(H11Protocol):
        _end: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._from = client_of("" if self.client is None else self.client[0])
            numbers[self._from] += 1
            if numbers[self._from] > settings.max_connections:
                transport.write(_REFUSAL)
                transport.close()
            self._end_after(settings.timeout)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self._end is not None:
                self._end.cancel()
            numbers[self._from] -= 1
            if not numbers[self._from]:
                del numbers[self._from]

        def handle_events(self) -> None:
            before = self.cycle
            super().handle_events()
            if self.cycle is not before:  # the head is complete
                self._end_after(2 * settings.timeout)

        def on_response_complete(self) -> None:
            self._end_after(settings.timeout)
            super().on_response_complete()  # which may begin the next request

        def _end_after(self, seconds: float) -> None:
            if self._end is not None:
                self._end.cancel()
            self._end = self.loop.call_later(seconds, self.transport.abort)

    return Limited
