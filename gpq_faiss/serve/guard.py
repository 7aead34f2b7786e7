"""Limits of the service, and the middleware that holds every request to them."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import time
from collections import OrderedDict
from typing import Annotated, Any, Self

from prometheus_client import CollectorRegistry, Counter, Histogram
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import UsageError, unknown
from ..inputs import parse_bytes
from .live import COMPACT_AFTER

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
_CLIENTS = 10_000  # clients with a tracked rate
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[0-9a-z._-]+)(:[0-9]{0,5})?")
_UPLOADS = 16  # concurrent uploads of the maximum size


def is_loopback(host: str) -> bool:
    """Whether an address is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def client_of(address: str) -> str:
    """One client per IPv4 address; per /64 network of IPv6, all of whose addresses one machine can take."""
    with contextlib.suppress(ValueError):
        known = ipaddress.IPv6Address(address.partition("%")[0])
        if not known.ipv4_mapped:
            return str(ipaddress.IPv6Network((int(known) >> 64 << 64, 64)))
    return address


Positive = Annotated[int, Field(ge=1)]


class Settings(BaseModel):
    """Address and limits of a service; docs/serve.md says what each is for.

    Raises:
        UsageError: an unknown name, a value of another type or out of range, or a missing token.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, lt=1 << 16)
    token: str | None = None
    allowed_hosts: tuple[str, ...] = Field(default=(), strict=False)
    max_upload: Annotated[Positive, BeforeValidator(lambda size: parse_bytes(size, "max_upload"))] = 16 << 20
    max_pixels: Positive = 25_000_000
    max_k: Positive = 1000
    rate: float = Field(default=200.0, ge=0)
    timeout: float = Field(default=30.0, gt=0)
    max_connections: Positive = 128
    threads: Positive | None = None
    compact_after: Positive = COMPACT_AFTER

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = str(first["loc"][0])
            if first["type"] == "extra_forbidden":
                raise UsageError(unknown(f"'{name}'", name, list(Settings.model_fields))) from None
            raise UsageError(f"{name} = {first['input']!r}: {first['msg']}") from None

    @model_validator(mode="after")
    def _check_token(self) -> Self:
        if self.token is not None and (len(self.token) < 16 or not self.token.isascii() or " " in self.token):
            raise UsageError(
                "the token must have at least 16 ASCII characters and no spaces (openssl rand -hex 32)"
            )
        if self.token is None and not is_loopback(self.host):
            raise UsageError(f"{self.host} can be reached from other machines: a token is needed (--token)")
        return self


class Guard:
    """ASGI middleware around the application: host, rate, size, time, security headers, and metrics of requests."""

    def __init__(self, app: ASGIApp, settings: Settings, registry: CollectorRegistry) -> None:
        self.app, self.settings = app, settings
        self._requests = Counter("gpq_requests", "Requests.", ["route", "status"], registry=registry)
        self._seconds = Histogram("gpq_request_seconds", "Time of a request.", ["route"], registry=registry)
        self._clients: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        received = status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        async def take() -> Message:
            nonlocal received
            message = await receive()
            size = len(message.get("body", b""))
            received += size
            self._held += size
            if received > self.settings.max_upload:
                raise HTTPException(413, f"more than {self.settings.max_upload:,} bytes")
            if self._held > _UPLOADS * self.settings.max_upload:
                raise HTTPException(503, "too many uploads at a time: try again later", {"retry-after": "1"})
            return message

        try:
            refused = self._refusal(scope)
            if refused is not None:
                await refused(scope, receive, answer)
                return
            async with asyncio.timeout(self.settings.timeout):
                await self.app(scope, take, answer)
        except TimeoutError:
            if status == 0:
                late = _refuse(503, f"it took longer than {self.settings.timeout:g} seconds")
                await late(scope, receive, answer)
        finally:
            self._held -= received
            route = getattr(scope.get("route"), "path", "other")
            self._requests.labels(route, str(status or 500)).inc()
            self._seconds.labels(route).observe(time.perf_counter() - began)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        """The answer to a request that is rejected before reading its body."""
        settings = self.settings
        if is_loopback(settings.host):
            # Against DNS rebinding: a foreign host name may point to this machine.
            host = _HOST.fullmatch(Headers(scope=scope).get("host", "").lower())
            name = "" if host is None else host[1].strip("[]")
            if not is_loopback(name) and name not in map(str.lower, settings.allowed_hosts):
                return _refuse(400, "this host name is not served here (allowed_hosts)")
        if settings.rate and not self._within_rate(client_of((scope.get("client") or ("", 0))[0])):
            return _refuse(429, f"more than {settings.rate:g} requests per second")
        return None

    def _within_rate(self, client: str) -> bool:
        """Token bucket per client: refills at the rate, up to twice the rate."""
        now, most = time.monotonic(), max(1.0, 2 * self.settings.rate)
        left, before = self._clients.pop(client, (most, now))
        left = min(most, left + (now - before) * self.settings.rate)
        self._clients[client] = (left - 1 if left >= 1 else left, now)
        while len(self._clients) > _CLIENTS:
            self._clients.popitem(last=False)
        return left >= 1


def _refuse(status: int, message: str) -> JSONResponse:
    headers = {"retry-after": "1"} if status in (429, 503) else None
    return JSONResponse({"error": message}, status, headers)
