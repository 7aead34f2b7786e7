"""The application and its routes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from importlib import resources
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, FastAPI, Path, Query, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from numpy.typing import NDArray
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp

from .. import __version__
from ..codes.checks import Ids
from ..errors import DataError, GpqError
from ..store import Item
from .guard import Guard, Metrics, Settings, is_loopback
from .live import EVERYTHING, Where
from .requests import (
    AddRequest,
    Changed,
    Info,
    Label,
    Listed,
    Problem,
    Result,
    SearchRequest,
    SearchResponse,
    Status,
    read_request,
    schema,
)
from .requests import Item as Described
from .service import Input, Service

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_WHY = {
    400: "The request cannot be read.",
    401: "The token is missing or wrong.",
    403: "The service is read-only.",
    404: "No item has this id.",
    409: "An item has this id already.",
    413: "The body is too large.",
    415: "The body is of another type.",
    422: "A value cannot be right.",
    429: "Too many requests.",
    503: "The service is busy.",
    507: "The disk refuses.",
}
_BEARER = HTTPBearer(auto_error=False, description="The token that the service was started with.")
_IN_PATH = 50  # labels: a request's head has at most 64 KiB

Bearer = Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)]
Number = Annotated[int, Path(alias="id", ge=-(2**63), le=2**63 - 1, description="Id of an item.")]
Wanted = Annotated[int, Query(ge=1, description="Number of items.")]
Wished = Annotated[
    Sequence[Label], Query(max_length=_IN_PATH, description="Only items with one of these labels.")
]


def create_app(service: Service, settings: Settings) -> ASGIApp:
    """The complete application, behind :class:`.guard.Guard`.

    Args:
        service: started and closed with the application.
        settings: limits.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.close()

    def may_manage(credentials: Bearer) -> None:
        if not settings.is_token(None if credentials is None else credentials.credentials):
            raise HTTPException(401, "the token is missing or wrong", {"www-authenticate": "Bearer"})

    def may_write(credentials: Bearer) -> None:
        if not service.live.writable:
            raise HTTPException(403, "the service is read-only (--writable)")
        may_manage(credentials)

    metrics = Metrics(service)
    errors = (HTTPException, GpqError, RequestValidationError, ClientDisconnect, Exception)
    app = FastAPI(
        title="gpq serve",
        version=__version__,
        description="Search an index of codes by image, vector or item; add and remove items.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses={status: {"model": Problem, "description": why} for status, why in _WHY.items()},
        exception_handlers=dict.fromkeys(errors, _problem),
    )
    # Routes that need no token say so in /openapi.json, too.
    manage = [Depends(may_manage)]
    reading, changing = _reading(service, settings, metrics), _changing(service, settings)
    app.include_router(reading, dependencies=[] if is_loopback(settings.host) else manage)
    app.include_router(changing, dependencies=[Depends(may_write)])
    app.state.routes = [*reading.routes, *changing.routes]

    @app.post("/reload", dependencies=manage)
    async def reload() -> Status:
        """Reopen the index file. If that fails, the old index stays in use."""
        await service.reload()
        return Status(ntotal=service.live.snapshot.ntotal)

    @app.get("/healthz")
    async def health() -> Status:
        """Whether the service answers."""
        return Status(ntotal=service.live.snapshot.ntotal)

    for file in (resources.files(__package__) / "page").iterdir():
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        kind = _TYPES[file.name.rsplit(".", 1)[1]]
        content = Response(file.read_bytes(), media_type=kind, headers={"cache-control": "no-cache"})
        app.add_api_route(path, _always(content), include_in_schema=False)
    return Guard(app, settings, metrics)


def _reading(service: Service, settings: Settings, metrics: Metrics) -> APIRouter:
    """Routes that find and show items, and tell about the service."""
    routes = APIRouter()

    @routes.post("/search", response_model_exclude_none=True, openapi_extra=schema(SearchRequest))
    async def search(request: Request) -> SearchResponse:
        """Find the k best items for an image, a vector, features, or an item's id. Items with equal scores come by ascending id."""
        asked, image = await read_request(request, SearchRequest, settings.max_upload)
        _check_k(asked.k, settings)
        where = _where(service, asked)
        began = time.perf_counter()
        scores, ids, best = await service.search(
            await _input(service, asked, image, settings), asked.k, where
        )
        took = time.perf_counter() - began
        results = [
            Result(score=score, **known)
            for known, score in zip(await service.known(ids), scores.tolist(), strict=True)
        ]
        return SearchResponse(
            results=results, best=best, took_ms=round(1000 * took, 3), ntotal=service.live.snapshot.ntotal
        )

    @routes.get("/items", response_model_exclude_none=True)
    async def items(k: Wanted = 24, label: Wished = ()) -> Listed:
        """Some items to begin with, a few of every label first. They are always the same, and those of a smaller k come first."""
        _check_k(k, settings)
        known = await service.known(await service.some_items(k, label))
        return Listed(items=[Described(**one) for one in known], ntotal=service.live.snapshot.ntotal)

    @routes.get("/items/{id}", response_model_exclude_none=True)
    async def item(number: Number) -> Described:
        """An item, with its name and labels if known."""
        service.live.snapshot.code(number)  # an error where there is none
        return Described(**(await service.known(np.array([number])))[0])

    @routes.get(
        "/items/{id}/thumbnail", response_class=Response, responses=_content("image/png", "image/jpeg")
    )
    async def thumbnail(number: Number) -> Response:
        """A small picture of an item, from the data that the service was started with."""
        service.live.snapshot.code(number)  # an error where there is none
        made = await service.thumbnail(number)
        if made is None:
            raise HTTPException(404, f"there is no picture of the item {number}")
        return Response(made[0], media_type=made[1], headers={"cache-control": "private, max-age=3600"})

    @routes.get("/info")
    async def about() -> Info:
        """What is served, and its limits."""
        model, catalogue = service.encoder, service.catalogue
        M, K, d = model.shape
        return Info(
            version=__version__,
            ntotal=service.live.snapshot.ntotal,
            bits=M * (K.bit_length() - 1),
            dimensions=M * d,
            input=model.input_kind,
            input_size=model.image_size if model.input_kind == "images" else model.input_width,
            labels=list(catalogue.classes),
            label_counts=catalogue.counts,
            thumbnails=catalogue.kind == "images",
            writable=service.live.writable,
            max_k=settings.max_k,
            max_upload=settings.max_upload,
        )

    @routes.get("/metrics", response_class=Response, responses=_content("text/plain"))
    async def prometheus() -> Response:
        """Metrics for Prometheus."""
        text = generate_latest(metrics.registry)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return routes


def _changing(service: Service, settings: Settings) -> APIRouter:
    """Routes that change what is searched."""
    routes = APIRouter()

    @routes.post("/items", status_code=201, openapi_extra=schema(AddRequest))
    async def add(request: Request) -> Changed:
        """Add an item, with optional name and labels. The response means that it is on disk and found by every search."""
        asked, image = await read_request(request, AddRequest, settings.max_upload)
        if asked.id == -1:
            raise DataError("id: -1 marks a missing result: choose another")
        given = await _input(service, asked, image, settings)
        texts = {"name": asked.name} if asked.name else {}
        about = Item(texts, tuple(dict.fromkeys(asked.labels)) or None) if texts or asked.labels else None
        return Changed(id=await service.add(given, asked.id, about))

    @routes.delete("/items/{id}")
    async def remove(number: Number) -> Changed:
        """Remove an item. The response means that the removal is on disk and no search finds the item."""
        await service.remove(number)
        return Changed(id=number)

    return routes


def _content(*kinds: str) -> dict[int | str, dict[str, Any]]:
    """The description of a response that is not JSON."""
    return {200: {"content": {kind: {"schema": {"type": "string"}} for kind in kinds}}}


def _always(content: Response) -> Callable[[], Coroutine[Any, Any, Response]]:
    async def page() -> Response:
        return content

    return page


def _check_k(k: int, settings: Settings) -> None:
    if k > settings.max_k:
        raise DataError(f"k: {k} is more than {settings.max_k}")


async def _input(service: Service, asked: Any, image: bytes | None, settings: Settings) -> Input:
    """The input of a request to search by or to add."""
    if image is not None:
        return await service.image(image, settings.max_pixels)
    if asked.vector is not None:
        return service.vector(asked.vector)
    if asked.features is not None:
        return service.features(asked.features)
    return await service.item(asked.id)


def _where(service: Service, asked: SearchRequest) -> Where:
    """The filter of a request. Raises DataError: a label that no item has."""
    ids, labels = (asked.allow_ids, asked.deny_ids), (asked.allow_labels, asked.deny_labels)
    if (*ids, *labels) == (None,) * 4:
        return EVERYTHING
    allow, deny = labels
    catalogue = service.catalogue
    catalogue.check_labels([*(allow or ()), *(deny or ())], "labels")

    def passes(ids: Ids) -> NDArray[np.bool_]:
        mask = ~catalogue.have_label(ids, deny or ())
        return mask if allow is None else mask & catalogue.have_label(ids, allow)

    allowed, denied = (None if one is None else np.array(one, np.int64) for one in ids)
    return Where(allowed, denied, None if labels == (None, None) else passes, repr((ids, labels)))


async def _problem(request: Request, error: Exception) -> Response:
    """Every error is one line of JSON."""
    status, message, headers = 500, "internal error", {}
    if isinstance(error, HTTPException):
        status, message, headers = error.status_code, str(error.detail), dict(error.headers or {})
        routes = [one for one in request.app.state.routes if one.matches(request.scope)[0] != Match.NONE]
        if status == 405 and routes:  # a path may have several routes, but Starlette names only one
            headers["allow"] = ", ".join(sorted({name for one in routes for name in one.methods}))
    elif isinstance(error, GpqError):
        status, message = getattr(error, "status", 422), str(error)
        headers = {"retry-after": "1"} if status == 503 else {}
    elif isinstance(error, RequestValidationError):
        first = error.errors()[0]
        status, message = 422, f"{first['loc'][-1]}: {first['msg']}"
    elif isinstance(error, ClientDisconnect):
        status, message = 400, "the request ended early"
    return JSONResponse({"error": message}, status, headers)
