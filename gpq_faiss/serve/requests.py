"""Bodies of requests and responses."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from ..errors import DataError
from ..inputs import parse_json

MAX_JSON = 1 << 20
MAX_IDS = 10_000
_LARGEST = 1e30  # magnitude of numbers, so that no score overflows

Id = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Ids = Annotated[list[Id], Field(max_length=MAX_IDS)]
Vector = list[Annotated[float, Field(ge=-_LARGEST, le=_LARGEST, allow_inf_nan=False)]]
Label = Annotated[str, Field(max_length=1000)]
Labels = Annotated[list[Label], Field(max_length=1000)]
Text = Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""A name or label to be stored: a line."""


class Body(BaseModel):
    """An image in a form, or one of these; ``queries`` are not fields of a form, where ``lists`` may be repeated."""

    model_config = ConfigDict(extra="forbid", strict=True)
    lists: ClassVar = {"vector", "features", "allow_ids", "deny_ids", "allow_labels", "deny_labels", "labels"}
    queries: ClassVar = ["vector", "features"]

    vector: Vector | None = None
    features: Vector | None = None
    id: Id | None = None


class SearchRequest(Body):
    """A query, and filters."""

    queries: ClassVar = [*Body.queries, "id"]

    k: Annotated[int, Field(ge=1)] = 10
    allow_ids: Ids | None = None
    deny_ids: Ids | None = None
    allow_labels: Labels | None = None
    deny_labels: Labels | None = None


class AddRequest(Body):
    """An item to add, with its name and labels."""

    name: Text | None = None
    labels: Annotated[list[Text], Field(max_length=100)] = []


class Item(BaseModel):
    """An item, with its name and labels if known."""

    id: int
    name: str | None = None
    labels: list[str] | None = None


class Result(Item):
    """An item that a search found."""

    score: float


class Listed(BaseModel):
    """Some items, of so many in the index."""

    items: list[Item]
    ntotal: int


class SearchResponse(BaseModel):
    """Results, best first; the best score that any code could have; milliseconds from the parsed request; items in the index."""

    results: list[Result]
    best: float
    took_ms: float
    ntotal: int


class Problem(BaseModel):
    """Why a request failed, in one line."""

    error: str


def schema(model: type[Body]) -> dict[str, Any]:
    """The request body for OpenAPI: JSON, or a form with an image."""
    fields = model.model_json_schema()
    form = {name: one for name, one in fields["properties"].items() if name not in model.queries}
    form["image"] = {"type": "string", "format": "binary", "description": "An image file."}
    kinds = {
        "application/json": fields,
        "multipart/form-data": fields | {"properties": form, "required": ["image"]},
    }
    return {
        "requestBody": {"required": True, "content": {kind: {"schema": one} for kind, one in kinds.items()}}
    }


class _Parser(MultiPartParser):
    spool_max_size = 1 << 62  # no temporary files, as the size is already limited


B = TypeVar("B", bound=Body)


async def read_request(request: Request, model: type[B], max_upload: int) -> tuple[B, bytes | None]:
    """The validated body, and the image of a form.

    Raises:
        HTTPException: 400 neither JSON nor form, 413 too large, 415 another type.
        DataError: an invalid field.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    image: Any = None
    try:
        if kind == "application/json":
            body = await request.body()
            if len(body) > MAX_JSON:
                raise HTTPException(413, f"JSON of more than {MAX_JSON:,} bytes")
            fields = parse_json(body)
        elif kind == "multipart/form-data":
            limits = {"max_files": 1, "max_fields": MAX_IDS, "max_part_size": max_upload}
            form = await _Parser(request.headers, request.stream(), **limits).parse()
            fields = {name: form.getlist(name) if name in model.lists else form[name] for name in form}
            image = fields.pop("image", None)
            if not isinstance(image, UploadFile):
                raise DataError("image: a file is needed")
            image = await image.read()
        else:
            raise HTTPException(415, "content-type must be application/json or multipart/form-data")
        # The values of a form are texts.
        asked = model.model_validate(fields, strict=image is None)
    except ValidationError as error:
        raise DataError(first_line(error)) from None
    except (ValueError, KeyError, MultiPartException) as error:
        raise HTTPException(400, f"the body is not {kind}: {' '.join(str(error).split())[:200]}") from None
    given = [name for name in model.queries if getattr(asked, name) is not None]
    if len(given) + (image is not None) != 1:
        raise DataError(f"give one of {', '.join(model.queries)}, or the image of a form")
    return asked, image


def first_line(error: Any, *, last: bool = False) -> str:
    """The first error of a validation in one line, with all of its place, or the last part."""
    first = error.errors()[0]
    where = ".".join(str(part)[:50] for part in first["loc"][-1 if last else 0 :]) or "body"
    return " ".join(f"{where}: {first['msg']}".split())[:300]
