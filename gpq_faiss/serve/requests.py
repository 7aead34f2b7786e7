"""Request and response models, their schemas, and parsing of bodies."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from ..errors import DataError
from ..inputs import parse_json
from .guard import Settings, TooLargeError

MAX_JSON = 1 << 20
MAX_IDS = 10_000
MAX_LABELS = 1000
MAX_ITEM_LABELS = 100
_NAMES = {"application/json": "JSON", "multipart/form-data": "a form"}
_LARGEST = 1e30  # magnitude of numbers, so that no score overflows

Id = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Number = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST, allow_inf_nan=False)]
Label = Annotated[str, Field(max_length=1000)]
Text = Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""A name or label to be stored: a line."""


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    # Missing fields are not in ``model_fields_set``.
    vector: list[Number] = Field(default=[])
    features: list[Number] = Field(default=[])


class SearchRequest(_Request):
    """A query."""

    id: Id = 0
    k: int = Field(default=10, ge=1)
    allow_ids: list[Id] = Field(default=[], max_length=MAX_IDS)
    deny_ids: list[Id] = Field(default=[], max_length=MAX_IDS)
    allow_labels: list[Label] = Field(default=[], max_length=MAX_LABELS)
    deny_labels: list[Label] = Field(default=[], max_length=MAX_LABELS)


class AddRequest(_Request):
    """An item to add, with its name and labels."""

    id: Id = 0
    name: Text = Field(default="")
    labels: list[Text] = Field(default=[], max_length=MAX_ITEM_LABELS)


class Item(BaseModel):
    """An item, with its name and labels if known."""

    id: int
    name: str | None = None
    labels: list[str] | None = None


class Result(Item):
    """An item that a search found."""

    score: float


class Listed(BaseModel):
    """Some items."""

    items: list[Item]
    ntotal: int = Field(description="Items in the index.")


class SearchResponse(BaseModel):
    """Results, best first; equal scores by ascending id."""

    results: list[Result]
    best: float = Field(description="Score of the code most alike the query, which no item need have.")
    took_ms: float = Field(description="Milliseconds from the parsed request to the results.")
    ntotal: int = Field(description="Items in the index.")


class Changed(BaseModel):
    """Id of the added or removed item. The change is on disk."""

    id: int


class Health(BaseModel):
    """The service answers."""

    status: str
    ntotal: int


class Info(BaseModel):
    """What is served."""

    version: str
    ntotal: int
    bits: int
    dimensions: int = Field(description="Of a vector.")
    input: str = Field(description="What the model takes: images or features.")
    input_size: int = Field(description="Numbers of an item's features, or pixels of an image's side.")
    labels: list[str]
    label_counts: list[int] | None = Field(
        default=None, description="Items with each label; null if unknown, as of shards."
    )
    thumbnails: bool
    writable: bool
    max_k: int
    max_upload: int


class Reloaded(BaseModel):
    """The index file was opened again."""

    ntotal: int


class Problem(BaseModel):
    """Why a request failed, in one line."""

    error: str


def schemas(model: type[_Request], info: Info) -> dict[str, Any]:
    """The request body for OpenAPI: JSON, or a form if the model takes images."""
    fields: dict[str, Any] = model.model_json_schema()["properties"]
    for field in fields.values():
        field.pop("default", None)
        field.pop("title", None)
    images, search = info.input == "images", model is SearchRequest
    for name, width in (("vector", info.dimensions), ("features", info.input_size)):
        fields[name] |= {"minItems": width, "maxItems": width}
    if search:
        fields["k"] |= {"maximum": info.max_k, "default": 10}
        for name in ("allow_labels", "deny_labels"):
            if not info.labels:
                del fields[name]
            elif len(info.labels) <= MAX_LABELS:
                fields[name]["items"] = {"enum": info.labels}
    if images:
        del fields["features"]
    one_of = [name for name in ("vector", "features", *(["id"] if search else [])) if name in fields]
    content = {
        "application/json": _body(fields, oneOf=[{"required": [name]} for name in one_of]),
        "multipart/form-data": _body(
            {name: field for name, field in fields.items() if name not in (one_of if search else ["vector"])}
            | {"image": {"type": "string", "format": "binary", "description": "An image file."}},
            required=["image"],
        ),
    }
    if not images:
        del content["multipart/form-data"]
    return {"requestBody": {"required": True, "content": content}}


def _body(fields: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"schema": {"type": "object", "properties": fields, "additionalProperties": False, **others}}


class _Parser(MultiPartParser):
    spool_max_size = 1 << 62  # no temporary files, as the size is already limited


async def read_request(
    request: Request, model: type[_Request], settings: Settings
) -> tuple[Any, bytes | None]:
    """The validated body, and the image of a form.

    Raises:
        HTTPException: 400 neither JSON nor form, 413 too large, 415 another type.
        DataError: an invalid field.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    image: bytes | None = None
    fields: Any
    try:
        if kind == "application/json":
            body = b""
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_JSON:
                    raise TooLargeError(MAX_JSON)
            fields = parse_json(body)
        elif kind == "multipart/form-data":
            fields, image = await _form(request, model, settings)
        else:
            raise HTTPException(415, "content-type must be application/json or multipart/form-data")
        # The values of a form are texts.
        checked = model.model_validate(fields, strict=kind == "application/json")
    except ValidationError as error:
        raise DataError(_first(error)) from None
    except (ValueError, KeyError, MultiPartException) as error:
        raise HTTPException(
            400, f"the body is not {_NAMES[kind]}: {' '.join(str(error).split())[:200]}"
        ) from None
    choices = ["vector", "features", *(["id"] if model is SearchRequest else [])]
    given = [name for name in choices if name in checked.model_fields_set]
    given += ["image"] if image is not None else []
    if len(given) != 1:
        raise DataError(
            f"give one of {', '.join([*choices, 'image'])}"
            + (f", not {' and '.join(given)}" if given else "")
        )
    return checked, image


async def _form(
    request: Request, model: type[_Request], settings: Settings
) -> tuple[dict[str, Any], bytes | None]:
    parser = _Parser(
        request.headers, request.stream(), max_files=1, max_fields=MAX_IDS, max_part_size=settings.max_upload
    )
    form = await parser.parse()
    image: bytes | None = None
    fields: dict[str, Any] = {}
    for name in form:
        values = form.getlist(name)
        field = model.model_fields.get(name)
        if name == "image" and len(values) == 1 and isinstance(values[0], UploadFile):
            image = await values[0].read()
        elif name == "image" or not all(isinstance(value, str) for value in values):
            raise DataError(f"{name[:50]!r}: image must be a file, and nothing else")
        elif len(values) > 1 and (field is None or not isinstance(field.get_default(), list)):
            raise DataError(f"{name[:50]}: it is given twice")
        else:
            fields[name] = (
                values if field is not None and isinstance(field.get_default(), list) else values[0]
            )
    if model is SearchRequest and "id" in fields:
        raise DataError("id: search by an id with JSON")
    return fields, image


def _first(error: ValidationError) -> str:
    """The first error, in one line."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part)[:50] for part in first["loc"]) or "body"
    return " ".join(f"{where}: {first['msg']}".split())[:300]
