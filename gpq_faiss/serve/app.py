"""The application and its routes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from importlib import resources
from typing import Annotated, Any

import numpy as np
from fastapi import Depends, FastAPI, Path, Query, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from numpy.typing import NDArray
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp

from .. import __version__
from ..codes.checks import Ids
from ..errors import DataError, GpqError
from ..store import Item
from .guard import Guard, Settings
from .live import EVERYTHING, Where
from .requests import (
    AddRequest,
    Changed,
    Health,
    Info,
    Label,
    Listed,
    Problem,
    Reloaded,
    Result,
    SearchRequest,
    SearchResponse,
    read_request,
    schemas,
)
from .requests import Item as Described
from .service import Input, Service

_BEARER = HTTPBearer(auto_error=False, description="The token that the service was started with.")
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

Number = Annotated[int, Path(alias="id", ge=-(2**63), le=2**63 - 1, description="Id of an item.")]

_IN_PATH = 50  # labels: a request's head has at most 64 KiB
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

    app = FastAPI(
        title="gpq serve",
        version=__version__,
        description="Search an index of codes by image, vector or item; add and remove items.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses={status: {"model": Problem, "description": why} for status, why in _WHY.items()},
        exception_handlers=_handlers(),
    )

    def may_manage(credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)]) -> None:
        _check(settings, credentials)

    def may_write(credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)]) -> None:
        if not service.live.writable:
            raise HTTPException(403, "the service is read-only (--writable)")
        _check(settings, credentials)

    manage, write = Depends(may_manage), Depends(may_write)
    # Public routes require no token in /openapi.json either.
    read = [] if settings.open_to_read else [manage]

    _add_searches(app, service, settings, read)
    _add_changes(app, service, settings, write, manage)
    _add_facts(app, service, settings, read)
    _add_page(app)
    return Guard(app, settings, service.metrics)


def _add_searches(app: FastAPI, service: Service, settings: Settings, read: Sequence[Any]) -> None:
    """Routes that find and show items."""

    @app.post(
        "/search",
        response_model_exclude_none=True,
        dependencies=read,
        openapi_extra=schemas(SearchRequest, _info(service, settings)),
    )
    async def search(request: Request) -> SearchResponse:
        """Find the k best items for an image, a vector, features, or an item's id. Items with equal scores come by ascending id."""
        asked, image = await read_request(request, SearchRequest, settings)
        if asked.k > settings.max_k:
            raise DataError(f"k: {asked.k} is more than {settings.max_k}")
        where = _where(service, asked)
        began = time.perf_counter()
        given = await _input(service, asked, image, settings)
        scores, ids, best = await service.search(given, asked.k, where)
        took = time.perf_counter() - began
        results = [
            Result(score=score, **known)
            for known, score in zip(await service.known(ids), scores.tolist(), strict=True)
        ]
        return SearchResponse(
            results=results, best=best, took_ms=round(1000 * took, 3), ntotal=service.live.snapshot.ntotal
        )

    @app.get("/items", response_model_exclude_none=True, dependencies=read)
    async def items(k: Wanted = 24, label: Wished = ()) -> Listed:
        """Some items to begin with, a few of every label first. They are always the same, and those of a smaller k come first."""
        if k > settings.max_k:
            raise DataError(f"k: {k} is more than {settings.max_k}")
        ids = await service.some_items(k, label)
        return Listed(
            items=[Described(**known) for known in await service.known(ids)],
            ntotal=service.live.snapshot.ntotal,
        )

    @app.get(
        "/items/{id}",
        response_model_exclude_none=True,
        dependencies=read,
    )
    async def item(number: Number) -> Described:
        """An item, with its name and labels if known."""
        service.live.snapshot.code(number)  # an error where there is none
        return Described(**(await service.known(np.array([number])))[0])

    @app.get(
        "/items/{id}/thumbnail",
        dependencies=read,
        response_class=Response,
        responses={
            200: {
                "content": {
                    kind: {"schema": {"type": "string", "format": "binary"}}
                    for kind in ("image/png", "image/jpeg")
                },
                "description": "A small picture of the item.",
            },
        },
    )
    async def thumbnail(number: Number) -> Response:
        """A small picture of an item, from the data that the service was started with."""
        service.live.snapshot.code(number)  # an error where there is none
        made = await service.thumbnail(number)
        if made is None:
            raise HTTPException(404, f"there is no picture of the item {number}")
        return Response(made[0], media_type=made[1], headers={"cache-control": "private, max-age=3600"})


def _add_changes(app: FastAPI, service: Service, settings: Settings, write: Any, manage: Any) -> None:
    """Routes that change what is searched."""

    @app.post(
        "/items",
        status_code=201,
        dependencies=[write],
        openapi_extra=schemas(AddRequest, _info(service, settings)),
    )
    async def add(request: Request) -> Changed:
        """Add an item, with optional name and labels. The response means that it is on disk and found by every search."""
        asked, image = await read_request(request, AddRequest, settings)
        number = asked.id if "id" in asked.model_fields_set else None
        if number == -1:
            raise DataError("id: -1 marks a missing result: choose another")
        given = await _input(service, asked, image, settings)
        texts = {"name": asked.name} if asked.name else {}
        about = Item(texts, tuple(dict.fromkeys(asked.labels)) or None) if texts or asked.labels else None
        return Changed(id=await service.add(given, number, about))

    @app.delete("/items/{id}", dependencies=[write])
    async def remove(number: Number) -> Changed:
        """Remove an item. The response means that the removal is on disk and no search finds the item."""
        await service.remove(number)
        return Changed(id=number)

    @app.post("/reload", dependencies=[manage])
    async def reload() -> Reloaded:
        """Reopen the index file. If that fails, the old index stays in use."""
        await service.reload()
        return Reloaded(ntotal=service.live.snapshot.ntotal)


def _add_facts(app: FastAPI, service: Service, settings: Settings, read: Sequence[Any]) -> None:
    """Routes for information, health and metrics."""

    @app.get("/info", dependencies=read)
    async def about() -> Info:
        """What is served, and its limits."""
        return _info(service, settings).model_copy(update={"label_counts": await service.label_counts()})

    @app.get("/healthz")
    async def health() -> Health:
        """Whether the service answers."""
        return Health(status="ok", ntotal=service.live.snapshot.ntotal)

    @app.get(
        "/metrics",
        dependencies=read,
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_page(app: FastAPI) -> None:
    """Routes of the page's files, which are read once."""
    for file in (resources.files(__package__) / "page").iterdir():
        path = {"index.html": "/", "docs.html": "/docs"}.get(file.name, f"/page/{file.name}")
        kind = _TYPES[file.name.rsplit(".", 1)[1]]
        content = Response(file.read_bytes(), media_type=kind, headers={"cache-control": "no-cache"})
        app.add_api_route(path, _always(content), methods=["GET"], include_in_schema=False)


def _always(content: Response) -> Callable[[], Coroutine[Any, Any, Response]]:
    async def page() -> Response:
        return content

    return page


def _check(settings: Settings, credentials: HTTPAuthorizationCredentials | None) -> None:
    if not settings.is_token(None if credentials is None else credentials.credentials):
        raise HTTPException(401, "the token is missing or wrong", {"www-authenticate": "Bearer"})


async def _input(service: Service, asked: Any, image: bytes | None, settings: Settings) -> Input:
    """The input of a request to search by or to add."""
    if image is not None:
        return await service.image(image, settings.max_pixels)
    if isinstance(asked, SearchRequest) and "id" in asked.model_fields_set:
        return await service.item(asked.id)
    if "vector" in asked.model_fields_set:
        return service.vector(asked.vector)
    return service.features(asked.features)


def _where(service: Service, asked: SearchRequest) -> Where:
    """The filter of a request. Raises DataError: a label that no item has."""
    names = {"allow_ids", "deny_ids", "allow_labels", "deny_labels"}
    given: dict[str, Any] = asked.model_dump(include=names, exclude_unset=True)
    if not given:
        return EVERYTHING
    for name in names & {"allow_labels", "deny_labels"} & given.keys():
        service.check_labels(given[name], name)

    def passes(ids: Ids) -> NDArray[np.bool_]:
        mask = np.ones(len(ids), np.bool_)
        if "allow_labels" in given:
            mask &= service.have_label(ids, given["allow_labels"])
        if "deny_labels" in given:
            mask &= ~service.have_label(ids, given["deny_labels"])
        return mask

    return Where(
        allow=np.array(given["allow_ids"], np.int64) if "allow_ids" in given else None,
        deny=np.array(given["deny_ids"], np.int64) if "deny_ids" in given else None,
        passes=passes if given.keys() & {"allow_labels", "deny_labels"} else None,
        key=repr(given),
    )


def _info(service: Service, settings: Settings) -> Info:
    model, catalogue = service.encoder, service.catalogue
    M, K, d = model.shape
    images = model.input_kind == "images"
    return Info(
        version=__version__,
        ntotal=service.live.snapshot.ntotal,
        bits=M * (K.bit_length() - 1),
        dimensions=M * d,
        input=model.input_kind,
        input_size=model.image_size if images else model.input_width,
        labels=[] if catalogue is None else list(catalogue.classes),
        thumbnails=catalogue is not None and catalogue.dataset.kind == "images",
        writable=service.live.writable,
        max_k=settings.max_k,
        max_upload=settings.max_upload,
    )


def _handlers() -> dict[int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]]:
    """Every error is one line of JSON."""

    async def of_http(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        if error.status_code == 405:  # a path may have several routes, but Starlette names only one
            routes = [one for one in request.app.routes if one.matches(request.scope)[0] != Match.NONE]
            headers["allow"] = ", ".join(sorted({name for one in routes for name in one.methods}))
        return JSONResponse({"error": str(error.detail)}, error.status_code, headers)

    async def of_gpq(_: Request, error: GpqError) -> Response:
        status = getattr(error, "status", 422)
        return JSONResponse({"error": str(error)}, status, {"retry-after": "1"} if status == 503 else None)

    async def of_path(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return JSONResponse({"error": f"{first['loc'][-1]}: {first['msg']}"}, 422)

    async def of_disconnect(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)

    async def of_mistake(_: Request, error: Exception) -> Response:
        return JSONResponse({"error": "internal error"}, 500)

    return {
        HTTPException: of_http,
        GpqError: of_gpq,
        RequestValidationError: of_path,
        ClientDisconnect: of_disconnect,
        Exception: of_mistake,
    }
