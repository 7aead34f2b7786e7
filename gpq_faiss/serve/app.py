"""The application and its routes."""

import hmac
import pathlib
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Form, HTTPException, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException as StarletteError
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__
from ..codes.checks import Floats
from ..errors import DataError, GpqError
from . import schemas
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
        docs_url=None,
        redoc_url=None,
        responses=_PROBLEMS,
        exception_handlers=dict.fromkeys(
            (StarletteError, RequestValidationError, GpqError, Exception), _problem
        ),
    )
    app.state.service = service
    app.get("/healthz")(health)
    app.get("/", include_in_schema=False)(page)
    app.get("/docs", include_in_schema=False)(docs)
    app.mount("/page", StaticFiles(directory=_PAGE))
    # Without these dependencies, the OpenAPI description says that a route needs no token.
    may_read = [] if settings.is_local else [Depends(_check_token)]
    app.include_router(reading, dependencies=may_read)
    app.include_router(writing, dependencies=[Depends(_check_writable), Depends(_check_token)])
    # Against DNS rebinding: the name of a foreign site may be made to point to this machine.
    hosts = [*schemas.LOOPBACK_HOSTS, *settings.allowed_hosts]
    if settings.is_local or settings.allowed_hosts:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    app.add_middleware(_Guard, max_upload=settings.max_upload)
    return app


class _Guard:
    """Limits the size of requests, and adds headers for browsers to responses.

    In plain ASGI: Starlette's BaseHTTPMiddleware starts tasks for each request, for 0.2 ms.
    """

    def __init__(self, app: ASGIApp, max_upload: int) -> None:
        self.app, self.max_upload = app, max_upload

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the start and the end of the service
            return await self.app(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            # The page /docs loads its scripts from another site.
            if message["type"] == "http.response.start" and scope["path"] != "/docs":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        app, headers = self.app, Headers(scope=scope)
        size = int(headers.get("content-length", 0))
        if size > self.max_upload or "transfer-encoding" in headers:
            message = f"a content-length of at most {self.max_upload:,} bytes is needed"
            app = JSONResponse({"error": message}, 413)
        return await app(scope, receive, send_with_headers)


async def _problem(_: Request, error: Exception) -> Response:
    """Answer every error with one line of JSON."""
    if isinstance(error, StarletteError):
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        field = ".".join(str(name)[:50] for name in first["loc"][1:])
        text = f"{field}: {first['msg']}".removeprefix(": ").replace("Value error, ", "")
        message = " ".join(text.split())[:300]
        types = "json_invalid", "dict_attributes_type", "model_attributes_type"
        if first["type"] in types or (first["type"] == "missing" and not field):
            message = "the body must be an object of JSON, sent with content-type: application/json"
        elif "UploadFile" in message:
            message = f"{field}: a file is needed (curl -F {field}=@photo.jpg)"
        return JSONResponse({"error": message}, 422)
    if isinstance(error, GpqError):
        return JSONResponse({"error": str(error)}, 422)
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
_MULTIPART = Form(media_type="multipart/form-data")  # of a form with a file
ItemId = Annotated[int, Path(alias="id", ge=-(2**63), le=2**63 - 1, description="Id of an item.")]


async def _check_token(service: Running, bearer: Bearer) -> None:
    sent = "" if bearer is None else bearer.credentials
    token = service.settings.token or ""
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
    """Answer, if the service runs, with the number of items."""
    return {"status": "ok", "ntotal": service.live.index.ntotal}


async def page() -> FileResponse:
    """Show the page."""
    return FileResponse(_PAGE / "index.html")


async def docs() -> HTMLResponse:
    """Show Swagger UI, also below a path of a proxy."""
    return get_swagger_ui_html(openapi_url="openapi.json", title="gpq serve")


reading = APIRouter()
writing = APIRouter()


def _search(service: Service, vector: Floats, request: schemas.Filters) -> Response:
    _check_k(request.k, service)
    scores, ids = service.search(vector, request)
    results = service.catalogue.items(ids.tolist())
    for item, score in zip(results, scores.tolist(), strict=True):
        item.score = score
    answer = schemas.Results(results=results, ntotal=service.live.index.ntotal)
    # FastAPI would validate the answer and wait for a second thread to serialise it.
    return Response(answer.model_dump_json(exclude_none=True), media_type="application/json")


@reading.post("/search/image", response_model=schemas.Results)
def search_by_image(service: Running, form: Annotated[schemas.SearchForm, _MULTIPART]) -> Response:
    """Find the k best items for an image."""
    return _search(service, service.embed_image(form.image.file.read()), form)


@reading.post("/search", response_model=schemas.Results)
def search(service: Running, body: schemas.SearchRequest) -> Response:
    """Find the k best items for a vector, features, an id or a name.

    Items of equal score are in ascending order of id.
    """
    id_ = body.id
    if body.name is not None:
        ids = service.live.items.find(body.name)
        if len(ids) != 1:
            raise HTTPException(
                409 if ids else 404, f"{len(ids)} items have the name {body.name!r}: give an id"
            )
        id_ = ids[0]
    if id_ is None:
        return _search(service, service.embed_numbers(body.vector, body.features), body)
    return _search(service, service.embed_item(id_), body)


@reading.get("/items", response_model_exclude_none=True)
def items(service: Running, query: Annotated[schemas.Listing, Query()]) -> schemas.Items:
    """List some items: a few of every label first.

    They are always the same, and those of a smaller k come first.
    """
    _check_k(query.k, service)
    if query.name is None:
        ids = service.catalogue.sample(query.k, query.label)
    else:
        ids = service.live.items.find(query.name)
        if query.label:
            with_labels = service.catalogue.with_labels(query.label)
            ids = [id_ for id_ in ids if id_ in with_labels]
    listed = service.catalogue.items(ids[: query.k])
    return schemas.Items(items=listed, ntotal=service.live.index.ntotal)


@reading.get("/items/{id}", response_model_exclude_none=True)
def item(service: Running, id_: ItemId) -> schemas.Item:
    """Show an item, with its name and labels if it has any."""
    service.code_of(id_)  # an error if no item has the id
    return service.catalogue.items([id_])[0]


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
        raise HTTPException(404, f"there is no picture of the item {id_}")
    return Response(picture[0], media_type=picture[1])


@reading.get("/info")
def info(service: Running) -> dict[str, Any]:
    """Describe the service: the index, the input of the model, labels and limits."""
    index = service.live.index
    model = service.encoder
    catalogue = service.catalogue
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
        "thumbnails": catalogue.has_pictures and model.input_kind == "images",
        "writable": service.live.writable,
        "max_k": service.settings.max_k,
        "max_upload": service.settings.max_upload,
    }


# Routes that change items -------------------------------------------------------------------------


def _add(
    service: Service, vector: Floats, new: schemas.NewItem, *, foreign: bool
) -> dict[str, int]:
    code = service.encode(vector, foreign=foreign)
    labels = tuple(sorted(set(new.labels)))
    return {"id": service.live.change(new.id, code, new.name, labels or None)}


@writing.post("/items/image", status_code=201)
def add_image(service: Running, form: Annotated[schemas.AddForm, _MULTIPART]) -> dict[str, int]:
    """Add an image, with optional name and labels."""
    vector = service.embed_image(form.image.file.read(), queries=False)
    return _add(service, vector, form, foreign=False)


@writing.post("/items", status_code=201)
def add(service: Running, body: schemas.AddRequest) -> dict[str, int]:
    """Add a vector or features, with optional name and labels.

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
