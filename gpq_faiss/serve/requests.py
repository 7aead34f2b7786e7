"""Bodies of requests and responses."""

from __future__ import annotations

from typing import Annotated, Any, Self

from fastapi import UploadFile
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field, model_validator
from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import Scope

_LARGEST = 1e12  # magnitude of numbers, so that no score overflows

Id = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Ids = Annotated[list[Id], Field(max_length=10_000)]
Number = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST, allow_inf_nan=False)]
Numbers = Annotated[list[Number], Field(max_length=1 << 16)]
Label = Annotated[str, Field(max_length=1000)]
Labels = Annotated[list[Label], Field(max_length=1000)]
Text = Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""A name or label to store, in one line."""


class Filters(BaseModel, extra="forbid"):
    """How many items to find, and which."""

    k: Annotated[int, Field(ge=1)] = 10
    allow_ids: Ids | None = None
    deny_ids: Ids | None = None
    allow_labels: Labels | None = None
    deny_labels: Labels | None = None


class SearchForm(Filters):
    """A query by image. All other values of a form are texts."""

    image: UploadFile


class SearchRequest(Filters, strict=True):
    """A query by vector, features, or the id or name of an item."""

    vector: Numbers | None = None
    features: Numbers | None = None
    id: Id | None = None
    name: Label | None = None

    @model_validator(mode="after")
    def _one_query(self) -> Self:
        if [self.vector, self.features, self.id, self.name].count(None) != 3:
            raise ValueError("give one of vector, features, id, name, or the image of a form")
        return self


class NewItem(BaseModel, extra="forbid"):
    """Id, name and labels of an item to add."""

    id: Id | None = Field(default=None, description="Default: the next larger one.")
    name: Text | None = None
    labels: Annotated[list[Text], Field(max_length=100)] = []


class AddForm(NewItem):
    """An item to add, as an image."""

    image: UploadFile


class AddRequest(NewItem, strict=True):
    """An item to add, as a vector or features."""

    vector: Numbers | None = None
    features: Numbers | None = None


class Item(BaseModel):
    """An item, with its name and labels if it has any, and its score in a search."""

    id: int
    name: str | None = None
    labels: list[str] | None = None
    score: float | None = None


class Items(BaseModel):
    """Some of the ``ntotal`` items of the index."""

    items: list[Item]
    ntotal: int


class Results(BaseModel):
    """Results, best first; milliseconds of the search; number of items in the index."""

    results: list[Item]
    took_ms: float
    ntotal: int


class Problem(BaseModel):
    """Why a request failed, in one line."""

    error: str


class FormRoute(APIRoute):
    """A route for forms: the route for JSON may have the same path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match a request with a form only."""
        content_type = Headers(scope=scope).get("content-type", "")
        if content_type.lower().startswith("multipart/form-data"):
            return super().matches(scope)
        return Match.NONE, {}


def with_form(form: type[BaseModel]) -> dict[str, Any]:
    """Return the form as a part of the description of the route for JSON."""
    content = {"multipart/form-data": {"schema": form.model_json_schema()}}
    return {"requestBody": {"content": content}}
