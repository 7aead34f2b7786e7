"""The application and its routes."""

from __future__ import annotations

import contextlib
import hmac
import pathlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, FastAPI, Path, Query, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, ProcessCollector, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp

from .. import __version__
from ..errors import DataError, GpqError
from ..store.items import Item
from . import requests
from . import service as inner
from .guard import Guard, Settings, is_loopback
from .service import Service

_PAGE = pathlib.Path(__file__).with_name("page")
_REFUSALS = (400, 401, 403, 404, 409, 413, 415, 422, 429, 503, 507)
_BEARER = HTTPBearer(auto_error=False, description="The token that the service was started with.")
_IN_PATH = 50  # labels: a request's head has at most 64 KiB

Bearer = Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)]
Number = Annotated[int, Path(alias="id", ge=-(2**63), le=2**63 - 1, description="Id of an item.")]
Wanted = Annotated[int, Query(ge=1, description="Number of items.")]
Wished = Annotated[
    Sequence[requests.Label], Query(max_length=_IN_PATH, description="Only items with one of these labels.")
]


def create_app(service: Service, settings: Settings) -> ASGIApp:
    """The complete application, behind :class:`.guard.Guard`; it starts and closes ``service``."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.close()

    def may_read(credentials: Bearer) -> None:
        given, token = "" if credentials is None else credentials.credentials, settings.token or ""
        if not (token and hmac.compare_digest(given.encode(), token.encode())):  # in constant time
            raise HTTPException(401, "the token is missing or wrong", {"www-authenticate": "Bearer"})

    def may_write(credentials: Bearer) -> None:
        if not service.live.writable:
            raise HTTPException(403, "the service is read-only (--writable)")
        may_read(credentials)

    registry, live = CollectorRegistry(), service.live
    ProcessCollector(registry=registry)
    changes = Gauge("gpq_changes", "Changes that the index file does not have.", registry=registry)
    changes.set_function(lambda: len(live.snapshot.changes))
    Gauge("gpq_items", "Items in the index.", registry=registry).set_function(lambda: live.snapshot.ntotal)
    errors = (HTTPException, GpqError, RequestValidationError, ClientDisconnect, Exception)
    app = FastAPI(
        title="gpq serve",
        version=__version__,
        description="Search an index of codes by image, vector or item; add and remove items.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses={status: {"model": requests.Problem} for status in _REFUSALS},
        exception_handlers=dict.fromkeys(errors, _problem),
    )
    # Routes that need no token say so in /openapi.json, too.
    reading = APIRouter(dependencies=[] if is_loopback(settings.host) else [Depends(may_read)])
    changing = APIRouter(dependencies=[Depends(may_write)])
    _add_reading(reading, service, settings, registry)
    _add_changing(changing, service, settings)
    for router in (reading, changing):
        app.include_router(router)
    app.state.routes = [*reading.routes, *changing.routes]

    @app.get("/healthz")
    async def health() -> dict[str, str | int]:
        """Whether the service answers, and the number of items."""
        return {"status": "ok", "ntotal": live.snapshot.ntotal}

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(_PAGE / "index.html")

    app.mount("/page", StaticFiles(directory=_PAGE))
    return Guard(app, settings, registry)


def _add_reading(
    routes: APIRouter, service: Service, settings: Settings, registry: CollectorRegistry
) -> None:
    """Routes that find and show items, or tell about the service."""
    live, catalogue, model = service.live, service.catalogue, service.encoder

    def check_k(k: int) -> None:
        if k > settings.max_k:
            raise DataError(f"k: {k} is more than {settings.max_k}")

    @routes.post(
        "/search", response_model_exclude_none=True, openapi_extra=requests.schema(requests.SearchRequest)
    )
    async def search(request: Request) -> requests.SearchResponse:
        """Find the k best items for an image, a vector, features, or an item's id. Items with equal scores come by ascending id."""
        asked, image = await requests.read_request(request, requests.SearchRequest, settings.max_upload)
        check_k(asked.k)
        where = catalogue.filter(asked)
        began = time.perf_counter()
        given = await service.input(asked, image, settings.max_pixels)
        scores, ids, best = await service.search(inner.Query(given, asked.k, where))
        took = round(1000 * (time.perf_counter() - began), 3)
        known = zip(await service.in_pool(service.known, ids), scores.tolist(), strict=True)
        results = [requests.Result(score=score, **vars(one)) for one, score in known]
        return requests.SearchResponse(results=results, best=best, took_ms=took, ntotal=live.snapshot.ntotal)

    @routes.get("/items", response_model_exclude_none=True)
    async def items(k: Wanted = 24, label: Wished = ()) -> requests.Listed:
        """Some items to begin with, a few of every label first. They are always the same, and those of a smaller k come first."""
        check_k(k)
        known = await service.in_pool(service.known, await service.some_items(k, label))
        return requests.Listed(items=known, ntotal=live.snapshot.ntotal)

    @routes.get("/items/{id}", response_model_exclude_none=True)
    async def item(number: Number) -> requests.Item:
        """An item, with its name and labels if known."""
        live.snapshot.code(number)  # an error where there is none
        return (await service.in_pool(service.known, np.array([number])))[0]

    @routes.get(
        "/items/{id}/thumbnail", response_class=Response, responses=_content("image/png", "image/jpeg")
    )
    async def thumbnail(number: Number) -> Response:
        """A small picture of an item, from the data that the service was started with."""
        live.snapshot.code(number)  # an error where there is none
        made = await service.in_pool(catalogue.thumbnail, catalogue.row(number))
        if made is None:
            raise HTTPException(404, f"there is no picture of the item {number}")
        return Response(made[0], media_type=made[1], headers={"cache-control": "private, max-age=3600"})

    @routes.get("/info")
    async def about() -> dict[str, Any]:
        """What is served: numbers in a vector, the model's input and its size, names that filters may use, limits."""
        return {
            "version": __version__,
            "ntotal": live.snapshot.ntotal,
            "bits": model.bits,
            "dimensions": model.shape[0] * model.shape[2],
            "input": model.input_kind,
            "input_size": model.image_size or model.input_width,
            "labels": catalogue.classes,
            "label_counts": catalogue.counts,
            "thumbnails": catalogue.dataset is not None and catalogue.dataset.kind == "images",
            "writable": live.writable,
            "max_k": settings.max_k,
            "max_upload": settings.max_upload,
        }

    @routes.get("/metrics", response_class=Response, responses=_content("text/plain"))
    async def prometheus() -> Response:
        """Metrics for Prometheus."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _add_changing(routes: APIRouter, service: Service, settings: Settings) -> None:
    """Routes that change what is searched."""

    @routes.post("/items", status_code=201, openapi_extra=requests.schema(requests.AddRequest))
    async def add(request: Request) -> dict[str, int]:
        """Add an item, with optional name and labels. The response means that it is on disk and found by every search."""
        asked, image = await requests.read_request(request, requests.AddRequest, settings.max_upload)
        if asked.id == -1:
            raise DataError("id: -1 marks a missing result: choose another")
        given = await service.input(asked, image, settings.max_pixels)
        labels = tuple(dict.fromkeys(asked.labels)) or None
        about = Item({"name": asked.name} if asked.name else {}, labels) if asked.name or labels else None
        code = await service.in_pool(service.code, given)
        return {"id": await service.change((asked.id, code, about))}

    @routes.delete("/items/{id}")
    async def remove(number: Number) -> dict[str, int]:
        """Remove an item. The response means that the removal is on disk and no search finds the item."""
        return {"id": await service.change((number, None, None))}


def _content(*kinds: str) -> dict[int | str, dict[str, Any]]:
    """The description of a response that is not JSON."""
    return {200: {"content": {kind: {"schema": {"type": "string"}} for kind in kinds}}}


async def _problem(request: Request, error: Exception) -> Response:
    """Every error is one line of JSON."""
    status, message, headers = 500, "internal error", {}
    if isinstance(error, HTTPException):
        status, message, headers = error.status_code, str(error.detail), dict(error.headers or {})
        routes = [one for one in request.app.state.routes if one.matches(request.scope)[0] != Match.NONE]
        if status == 405 and routes:  # a path may have several routes, but Starlette names only one
            headers = {"allow": ", ".join(sorted({name for one in routes for name in one.methods}))}
    elif isinstance(error, GpqError):
        status, message = getattr(error, "status", 422), str(error)
    elif isinstance(error, RequestValidationError):
        status, message = 422, requests.first_line(error, last=True)
    elif isinstance(error, ClientDisconnect):
        status, message = 400, "the request ended early"
    return JSONResponse({"error": message}, status, headers)
