"""Request and response models, their schemas, and parsing of bodies."""

from __future__ import annotations

import re
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
    image = info.input == "images"
    properties: dict[str, Any] = model.model_json_schema()["properties"]
    for field in properties.values():
        field.pop("default", None)
        field.pop("title", None)
    properties["vector"] |= {"minItems": info.dimensions, "maxItems": info.dimensions}
    one_of = ["vector"]
    if image:
        del properties["features"]
    else:
        properties["features"] |= {"minItems": info.input_size, "maxItems": info.input_size}
        one_of.append("features")
    if model is SearchRequest:
        one_of.append("id")
        properties["k"] |= {"maximum": info.max_k, "default": 10}
        for name in ("allow_labels", "deny_labels"):
            if not info.labels:
                del properties[name]
            elif len(info.labels) <= MAX_LABELS:
                properties[name]["items"] = {"enum": info.labels}
    content: dict[str, Any] = {
        "application/json": {
            "schema": {
                "type": "object",
                "properties": properties,
                "additionalProperties": False,
                "oneOf": [{"required": [name]} for name in one_of],
            }
        }
    }
    if image:
        form = {name: field for name, field in properties.items() if name != "vector"}
        if model is SearchRequest:
            form.pop("id")
        form["image"] = {"type": "string", "format": "binary", "description": "An image file."}
        content["multipart/form-data"] = {
            "schema": {
                "type": "object",
                "properties": form,
                "additionalProperties": False,
                "required": ["image"],
            }
        }
    return {"requestBody": {"required": True, "content": content}}


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
    if kind == "application/json":
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_JSON:
                raise TooLargeError(MAX_JSON)
        try:
            fields = parse_json(body)
        except ValueError as error:
            raise HTTPException(400, f"the body is not JSON: {' '.join(str(error).split())[:200]}") from None
    elif kind == "multipart/form-data":
        fields, image = await _form(request, model, settings)
    else:
        raise HTTPException(415, "content-type must be application/json or multipart/form-data")
    try:
        checked = model.model_validate(fields)
    except ValidationError as error:
        raise DataError(_first(error)) from None
    kinds = ["vector", "features", *(["id"] if model is SearchRequest else [])]
    given = [name for name in kinds if name in checked.model_fields_set]
    given += ["image"] if image is not None else []
    if len(given) != 1:
        choices = "vector, features or image" + (", or id" if model is SearchRequest else "")
        raise DataError(f"give one of {choices}" + (f", not {' and '.join(given)}" if given else ""))
    return checked, image


async def _form(
    request: Request, model: type[_Request], settings: Settings
) -> tuple[dict[str, Any], bytes | None]:
    if "boundary=" not in request.headers["content-type"]:
        raise HTTPException(400, "the form has no boundary")
    parser = _Parser(
        request.headers, request.stream(), max_files=1, max_fields=MAX_IDS, max_part_size=settings.max_upload
    )
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise HTTPException(400, f"the form cannot be read: {error.message[:200]}") from None
    except (ValueError, KeyError) as error:  # a header that is no text, say
        raise HTTPException(400, f"the form cannot be read: {' '.join(str(error).split())[:200]}") from None
    image: bytes | None = None
    fields: dict[str, Any] = {}
    for name, value in form.multi_items():
        if isinstance(value, UploadFile) or name == "image":
            if name != "image" or not isinstance(value, UploadFile):
                raise DataError(f"{name[:50]!r}: image must be a file, and nothing else")
            image = await value.read()
            continue
        lists = name in ("allow_ids", "deny_ids", "allow_labels", "deny_labels", "labels")
        number = name in ("id", "k", "allow_ids", "deny_ids")
        if number and not re.fullmatch(r"-?[0-9]{1,19}", value):
            raise DataError(f"{name}: a whole number is needed")
        read: Any = int(value) if number else value
        if lists:
            fields.setdefault(name, []).append(read)
        elif name in fields:
            raise DataError(f"{name}: it is given twice")
        else:
            fields[name] = read
    await form.close()
    if model is SearchRequest and "id" in fields:
        raise DataError("id: search by an id with JSON")
    return fields, image


def _first(error: ValidationError) -> str:
    """The first error, in one line."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part)[:50] for part in first["loc"]) or "body"
    return " ".join(f"{where}: {first['msg']}".split())[:300]
