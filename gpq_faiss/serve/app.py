"""The application and its routes."""

import hmac
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Form, HTTPException, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException as StarletteError
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.trustedhost import TrustedHostMiddleware

from .. import __version__
from ..codes.checks import Floats
from ..errors import DataError, GpqError
from . import schemas
from .live import RequestError
from .service import Service

_PAGE = pathlib.Path(__file__).with_name("page")
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
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.Problem} for status in (400, 401, 403, 404, 409, 413, 422, 507)
}


def create_app(service: Service) -> FastAPI:
    """Return the complete application."""
    settings = service.settings
    app = FastAPI(
        title="gpq serve",
        version=__version__,
        description="Search an index of codes by image, vector or item; add and remove items.",
        redoc_url=None,
        responses=_PROBLEMS,
        exception_handlers=dict.fromkeys(
            (StarletteError, RequestValidationError, GpqError, Exception), _problem
        ),
    )
    app.state.service = service
    app.get("/healthz")(health)
    app.get("/", include_in_schema=False)(page)
    app.mount("/page", StaticFiles(directory=_PAGE))
    # Without these dependencies, the OpenAPI description says that a route needs no token.
    may_read = [] if settings.is_local else [Depends(_check_token)]
    for router in (reading_forms, reading):
        app.include_router(router, dependencies=may_read)
    for router in (writing_forms, writing):
        app.include_router(router, dependencies=[Depends(_check_writable), Depends(_check_token)])
    # Against DNS rebinding: the name of a foreign site may be made to point to this machine.
    hosts = [*schemas.LOOPBACK_HOSTS, *settings.allowed_hosts]
    if settings.is_local or settings.allowed_hosts:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    app.add_middleware(BaseHTTPMiddleware, dispatch=_guard)
    return app


async def _guard(request: Request, call_next: RequestResponseEndpoint) -> Response:
    """Limit the size of a request, and add headers for browsers to its response."""
    size = int(request.headers.get("content-length", 0))
    limit: int = request.app.state.service.settings.max_upload
    if size > limit or "transfer-encoding" in request.headers:
        message = f"a content-length of at most {limit:,} bytes is needed"
        return JSONResponse({"error": message}, 413)
    response = await call_next(request)
    if request.url.path != "/docs":  # FastAPI's page loads its scripts from another site
        response.headers.update(_HEADERS)
    return response


async def _problem(_: Request, error: Exception) -> Response:
    """Answer every error with one line of JSON."""
    if isinstance(error, StarletteError):
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        field = ".".join(str(name)[:50] for name in first["loc"][1:]) or "body"
        return JSONResponse({"error": " ".join(f"{field}: {first['msg']}".split())[:300]}, 422)
    if isinstance(error, GpqError):
        return JSONResponse({"error": str(error)}, getattr(error, "status", 422))
    return JSONResponse({"error": "internal error"}, 500)


# Dependencies -------------------------------------------------------------------------------------


async def _service(request: Request) -> Service:
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


async def _check_token(service: Running, bearer: Bearer) -> None:
    sent, token = "" if bearer is None else bearer.credentials, service.settings.token or ""
    if not (token and hmac.compare_digest(sent.encode(), token.encode())):  # in constant time
        raise HTTPException(401, "the token is missing or wrong", {"www-authenticate": "Bearer"})


async def _check_writable(service: Running) -> None:
    if not service.live.writable:
        raise HTTPException(403, "the service is read-only (--writable)")


def _check_k(k: int, service: Service) -> None:
    if k > service.settings.max_k:
        raise DataError(f"k: {k} is more than {service.settings.max_k}")


# Routes that find and show items ------------------------------------------------------------------


async def health(service: Running) -> dict[str, str | int]:
    """Tell that the service answers, and the number of items."""
    return {"status": "ok", "ntotal": service.live.index.ntotal}


async def page() -> FileResponse:
    """Show the page."""
    return FileResponse(_PAGE / "index.html")


reading, writing = APIRouter(), APIRouter()
reading_forms, writing_forms = (
    APIRouter(route_class=schemas.FormRoute, include_in_schema=False) for _ in range(2)
)


def _search(service: Service, vector: Floats, request: schemas.Filters) -> schemas.Results:
    _check_k(request.k, service)
    scores, ids = service.search(vector, request)
    items = zip(service.catalogue.items(ids.tolist()), scores.tolist(), strict=True)
    results = [schemas.Item(score=score, **item) for item, score in items]
    return schemas.Results(results=results, ntotal=service.live.index.ntotal)


@reading_forms.post("/search", response_model_exclude_none=True)
def search_by_image(
    service: Running, form: Annotated[schemas.SearchForm, Form()]
) -> schemas.Results:
    """Find the k best items for an image."""
    return _search(service, service.embed_image(form.image.file.read()), form)


@reading.post(
    "/search",
    response_model_exclude_none=True,
    openapi_extra=schemas.with_form(schemas.SearchForm),
)
def search(service: Running, body: schemas.SearchRequest) -> schemas.Results:
    """Find the k best items for an image (in a form), a vector, features, an id or a name.

    Items of equal score are in ascending order of id.
    """
    id_ = body.id
    if body.name is not None:
        ids = service.live.items.find(body.name)
        if len(ids) != 1:
            raise RequestError(
                409 if ids else 404, f"{len(ids)} items have the name {body.name!r}: give an id"
            )
        id_ = ids[0]
    if id_ is None:
        return _search(service, service.embed_numbers(body.vector, body.features), body)
    return _search(service, service.embed_item(id_), body)


@reading.get("/items", response_model_exclude_none=True)
def items(
    service: Running,
    k: Annotated[int, Query(ge=1, description="Number of items.")] = 24,
    label: Annotated[
        Sequence[schemas.Label],
        Query(max_length=50, description="Only items with one of these labels."),
    ] = (),
    name: Annotated[
        str | None, Query(max_length=1000, description="Only items of this name.")
    ] = None,
) -> schemas.Items:
    """List some items: a few of every label first.

    They are always the same, and those of a smaller k come first.
    """
    _check_k(k, service)
    if name is None:
        ids = service.catalogue.sample(k, label)
    else:
        with_labels = service.catalogue.with_labels(label)
        ids = [id_ for id_ in service.live.items.find(name) if not label or id_ in with_labels]
    listed = [schemas.Item(**item) for item in service.catalogue.items(ids[:k])]
    return schemas.Items(items=listed, ntotal=service.live.index.ntotal)


@reading.get("/items/{id}", response_model_exclude_none=True)
def item(service: Running, id_: ItemId) -> schemas.Item:
    """Show an item, with its name and labels if it has any."""
    service.code_of(id_)  # an error if no item has the id
    return schemas.Item(**service.catalogue.items([id_])[0])


@reading.get(
    "/items/{id}/thumbnail",
    response_class=Response,
    responses={200: {"content": {"image/png": {}, "image/jpeg": {}}}},
)
def thumbnail(service: Running, id_: ItemId) -> Response:
    """Show a small picture of an item, from the data that the service was started with."""
    service.code_of(id_)  # an error if no item has the id
    picture = service.catalogue.thumbnail(id_)
    if picture is None:
        raise RequestError(404, f"there is no picture of the item {id_}")
    return Response(picture[0], media_type=picture[1])


@reading.get("/info")
def info(service: Running) -> dict[str, Any]:
    """Describe the service: the index, the input of the model, labels and limits."""
    index, model, catalogue = service.live.index, service.encoder, service.catalogue
    labels = catalogue.labels(index)
    return {
        "version": __version__,
        "ntotal": index.ntotal,
        "bits": model.bits,
        "dimensions": index.d,
        "input": model.input_kind,
        "input_size": model.image_size or model.input_width,
        "labels": list(labels),
        "label_counts": [len(ids) for ids in labels.values()],
        "thumbnails": catalogue.has_pictures,
        "writable": service.live.writable,
        "max_k": service.settings.max_k,
        "max_upload": service.settings.max_upload,
    }


# Routes that change items -------------------------------------------------------------------------


def _add(
    service: Service, vector: Floats, new: schemas.NewItem, *, foreign: bool
) -> dict[str, int]:
    code, labels = service.encode(vector, foreign=foreign), tuple(sorted(set(new.labels)))
    return {"id": service.live.change(new.id, code, new.name, labels or None)}


@writing_forms.post("/items", status_code=201)
def add_image(service: Running, form: Annotated[schemas.AddForm, Form()]) -> dict[str, int]:
    """Add an image."""
    vector = service.embed_image(form.image.file.read(), queries=False)
    return _add(service, vector, form, foreign=False)


@writing.post("/items", status_code=201, openapi_extra=schemas.with_form(schemas.AddForm))
def add(service: Running, body: schemas.AddRequest) -> dict[str, int]:
    """Add an item, with optional name and labels.

    The response means that it is on disk and in every search.
    """
    vector = service.embed_numbers(body.vector, body.features, queries=False)
    return _add(service, vector, body, foreign=body.features is None)


@writing.delete("/items/{id}")
def remove(service: Running, id_: ItemId) -> dict[str, int]:
    """Remove an item.

    The response means that the removal is on disk, and that no search finds the item.
    """
    return {"id": service.live.change(id_, None)}
