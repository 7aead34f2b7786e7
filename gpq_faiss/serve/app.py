"""The application and its routes."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import pathlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, FastAPI, Form, HTTPException, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException as StarletteError
from starlette.middleware.trustedhost import TrustedHostMiddleware

from .. import __version__
from ..codes.checks import Floats, Ids
from ..errors import DataError, GpqError
from . import requests
from . import service as queries
from .live import ChangeRequest, RequestError
from .service import Service

_PAGE = pathlib.Path(__file__).with_name("page")
_WATCH_SECONDS = 1.0
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
# FastAPI's page of the requests loads its scripts from elsewhere.
_DOCS_POLICY = (
    "default-src 'self' 'unsafe-inline' data: https://cdn.jsdelivr.net https://fastapi.tiangolo.com"
)
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": requests.Problem} for status in (400, 401, 403, 404, 409, 411, 413, 422, 507)
}
_PICTURES = {
    "content": {kind: {"schema": {"type": "string"}} for kind in ("image/png", "image/jpeg")}
}


def create_app(service: Service) -> FastAPI:
    """Return the complete application, which closes ``service`` at its end."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(_watch(service))
        yield
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await asyncio.to_thread(service.close)

    errors = (StarletteError, RequestValidationError, GpqError, Exception)
    app = FastAPI(
        title="gpq serve",
        version=__version__,
        description="Search an index of codes by image, vector or item; add and remove items.",
        redoc_url=None,
        lifespan=lifespan,
        responses=_PROBLEMS,
        exception_handlers=dict.fromkeys(errors, _problem),
    )
    app.state.service = service
    # Routes that need no token say so in the description of the requests.
    may_read = [] if service.settings.is_local else [Depends(_check_token)]
    may_write = [Depends(_check_writable), Depends(_check_token)]
    app.include_router(public)
    for router in (forms, reading):
        app.include_router(router, dependencies=may_read)
    for router in (writing_forms, writing):
        app.include_router(router, dependencies=may_write)
    app.mount("/page", StaticFiles(directory=_PAGE))
    hosts = service.settings.trusted_hosts
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    app.middleware("http")(_guard)
    return app


async def _watch(service: Service) -> None:
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        await asyncio.to_thread(service.live.watch)


async def _guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """Refuse bodies of unknown or too large size, and add headers for the security of browsers."""
    limit = request.app.state.service.settings.max_upload
    size = request.headers.get("content-length", "0")
    if "transfer-encoding" in request.headers:
        response: Response = JSONResponse({"error": "a content-length is needed"}, 411)
    elif not size.isdecimal() or int(size) > limit:
        response = JSONResponse({"error": f"more than {limit:,} bytes"}, 413)
    else:
        response = await call_next(request)
    response.headers.update(_HEADERS)
    if request.url.path == "/docs":
        response.headers["content-security-policy"] = _DOCS_POLICY
    return response


async def _problem(_: Request, error: Exception) -> Response:
    """Answer every error with one line of JSON."""
    if isinstance(error, StarletteError):
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        place = ".".join(str(part)[:50] for part in first["loc"][1:]) or "body"
        return JSONResponse({"error": " ".join(f"{place}: {first['msg']}".split())[:300]}, 422)
    if isinstance(error, GpqError):
        return JSONResponse({"error": str(error)}, getattr(error, "status", 422))
    return JSONResponse({"error": "internal error"}, 500)


# Dependencies -----------------------------------------------------------------------------------


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Running = Annotated[Service, Depends(_service)]
Bearer = Annotated[
    HTTPAuthorizationCredentials | None,
    Depends(
        HTTPBearer(auto_error=False, description="The token that the service was started with.")
    ),
]
ItemId = Annotated[int, Path(alias="id", ge=-(2**63), le=2**63 - 1, description="Id of an item.")]
Count = Annotated[int, Query(ge=1, description="Number of items.")]
Labels = Annotated[
    Sequence[requests.Label],
    Query(max_length=50, description="Only items with one of these labels."),
]
Name = Annotated[str | None, Query(max_length=1000, description="Only items of this name.")]


def _check_token(service: Running, bearer: Bearer) -> None:
    sent, token = "" if bearer is None else bearer.credentials, service.settings.token or ""
    if not (token and hmac.compare_digest(sent.encode(), token.encode())):  # in constant time
        raise HTTPException(401, "the token is missing or wrong", {"www-authenticate": "Bearer"})


def _check_writable(service: Running) -> None:
    if not service.live.writable:
        raise HTTPException(403, "the service is read-only (--writable)")


def _check_k(k: int, service: Service) -> None:
    if k > service.settings.max_k:
        raise DataError(f"k: {k} is more than {service.settings.max_k}")


# Routes for everybody ---------------------------------------------------------------------------

public = APIRouter()


@public.get("/healthz")
def health(service: Running) -> dict[str, str | int]:
    """Tell that the service answers, and the number of items."""
    return {"status": "ok", "ntotal": service.live.index.ntotal}


@public.get("/", include_in_schema=False)
def page() -> FileResponse:
    """Show the page."""
    return FileResponse(_PAGE / "index.html")


# Routes that find and show items ----------------------------------------------------------------

reading = APIRouter()
forms = APIRouter(route_class=requests.FormRoute, include_in_schema=False)


def _search(service: Service, vector: Floats, request: requests.Filters) -> requests.Results:
    _check_k(request.k, service)
    labels = service.catalogue.labels(service.live.index)
    deny = np.array(request.deny_ids or (), np.int64)
    deny = np.union1d(deny, labels.with_labels(request.deny_labels or (), "deny_labels"))
    filters = {"deny": deny} if len(deny) else {}
    if request.allow_ids is not None:
        filters = {"allow": np.setdiff1d(np.array(request.allow_ids, np.int64), deny)}
    if request.allow_labels is not None:
        allow = np.setdiff1d(labels.with_labels(request.allow_labels, "allow_labels"), deny)
        filters = {"allow": np.intersect1d(allow, filters.get("allow", allow))}
    start = time.perf_counter()
    scores, ids = service.search(queries.Query(vector, request.k, filters)).result()
    milliseconds = round(1000 * (time.perf_counter() - start), 3)
    items = zip(service.catalogue.items(ids.tolist()), scores.tolist(), strict=True)
    results = [requests.Item(score=score, **item) for item, score in items]
    ntotal = service.live.index.ntotal
    return requests.Results(results=results, took_ms=milliseconds, ntotal=ntotal)


@forms.post("/search", response_model_exclude_none=True)
def search_by_image(
    service: Running, form: Annotated[requests.SearchForm, Form()]
) -> requests.Results:
    """Find the k best items for an image."""
    return _search(service, service.embed_image(form.image.file.read()), form)


@reading.post(
    "/search",
    response_model_exclude_none=True,
    openapi_extra=requests.with_form(requests.SearchForm),
)
def search(service: Running, body: requests.SearchRequest) -> requests.Results:
    """Find the k best items for an image (in a form), a vector, features, or the id or name of an item.

    Items of equal score are in ascending order of id.
    """
    if body.id is not None:
        return _search(service, service.embed_item(body.id), body)
    if body.name is None:
        return _search(service, service.embed_numbers(body.vector, body.features), body)
    ids = service.catalogue.find(body.name)
    if len(ids) != 1:
        raise RequestError(
            409 if ids else 404, f"{len(ids)} items have the name {body.name!r}: give an id"
        )
    return _search(service, service.embed_item(ids[0]), body)


@reading.get("/items", response_model_exclude_none=True)
def items(service: Running, k: Count = 24, label: Labels = (), name: Name = None) -> requests.Items:
    """List some items: a few of every label first. They are always the same, and those of a smaller k come first."""
    _check_k(k, service)
    labels = service.catalogue.labels(service.live.index)
    ids: Sequence[int] | Ids = labels.round_robin()
    if name is not None:
        ids = service.catalogue.find(name)
    elif not labels.names:
        # The items next to the code of all first codewords.
        first = np.ascontiguousarray(service.live.index.codebooks[:, 0]).reshape(-1)
        ids = service.search(queries.Query(first, k, {})).result()[1]
    if label:
        ids = np.array(ids, np.int64)[np.isin(ids, labels.with_labels(label, "label"))]
    distinct = [int(id_) for id_ in dict.fromkeys(ids)][:k]
    listed = [requests.Item(**item) for item in service.catalogue.items(distinct)]
    return requests.Items(items=listed, ntotal=service.live.index.ntotal)


@reading.get("/items/{id}", response_model_exclude_none=True)
def item(service: Running, id_: ItemId) -> requests.Item:
    """Show an item, with its name and labels if it has any."""
    service.code_of(id_)  # an error if no item has the id
    return requests.Item(**service.catalogue.items([id_])[0])


@reading.get("/items/{id}/thumbnail", response_class=Response, responses={200: _PICTURES})
def thumbnail(service: Running, id_: ItemId) -> Response:
    """Show a small picture of an item, from the data that the service was started with."""
    service.code_of(id_)  # an error if no item has the id
    row = service.catalogue.row(id_)
    picture = None if row is None else service.catalogue.thumbnail(row)
    if picture is None:
        raise RequestError(404, f"there is no picture of the item {id_}")
    return Response(picture[0], media_type=picture[1])


@reading.get("/info")
def info(service: Running) -> dict[str, Any]:
    """Describe the service: items, bits, numbers in a vector, input of the model, labels, limits."""
    index, model, dataset = service.live.index, service.encoder, service.catalogue.dataset
    labels = service.catalogue.labels(index)
    return {
        "version": __version__,
        "ntotal": index.ntotal,
        "bits": model.bits,
        "dimensions": index.d,
        "input": model.input_kind,
        "input_size": model.image_size or model.input_width,
        "labels": labels.names,
        "label_counts": labels.counts.tolist(),
        "thumbnails": dataset is not None and dataset.kind == "images",
        "writable": service.live.writable,
        "max_k": service.settings.max_k,
        "max_upload": service.settings.max_upload,
    }


# Routes that change items -----------------------------------------------------------------------

writing = APIRouter()
writing_forms = APIRouter(route_class=requests.FormRoute, include_in_schema=False)


def _add(service: Service, code: bytes, new: requests.NewItem) -> dict[str, int]:
    if new.id == -1:
        raise DataError("id: -1 marks a missing result: choose another")
    labels = tuple(sorted(set(new.labels))) or None
    return {"id": service.change(ChangeRequest(new.id, code, new.name, labels)).result()}


@writing_forms.post("/items", status_code=201)
def add_image(service: Running, form: Annotated[requests.AddForm, Form()]) -> dict[str, int]:
    """Add an image."""
    vector = service.embed_image(form.image.file.read(), queries=False)
    return _add(service, service.encode(vector, foreign=False), form)


@writing.post("/items", status_code=201, openapi_extra=requests.with_form(requests.AddForm))
def add(service: Running, body: requests.AddRequest) -> dict[str, int]:
    """Add an item, with optional name and labels. The response means that it is on disk and in every search."""
    vector = service.embed_numbers(body.vector, body.features, queries=False)
    return _add(service, service.encode(vector, foreign=body.features is None), body)


@writing.delete("/items/{id}")
def remove(service: Running, id_: ItemId) -> dict[str, int]:
    """Remove an item. The response means that the removal is on disk, and that no search finds the item."""
    return {"id": service.change(ChangeRequest(id_, None)).result()}
