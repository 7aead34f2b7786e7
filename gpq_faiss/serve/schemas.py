"""Settings of the service, and schemas of its requests and responses."""

from collections.abc import Sequence
from typing import Annotated, Any, Self

from fastapi import UploadFile
from pydantic import BaseModel, ByteSize, Field, ValidationError, model_validator

from ..errors import UsageError

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1", "[::1]")

Id = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Ids = Annotated[list[Id], Field(max_length=10_000)]
# Limited so that no score overflows.
Numbers = list[Annotated[float, Field(ge=-1e12, le=1e12, allow_inf_nan=False)]]
Label = Annotated[str, Field(max_length=1000)]
Labels = Annotated[list[Label], Field(max_length=1000)]
Text = Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""A name or label to store, in one line."""
Host = Annotated[str, Field(pattern=r"^(\*|(\*\.)?[^*:/\s]+)$")]
"""The name of a host, also ``*.example.org``, without scheme and port."""


class Settings(BaseModel, frozen=True, extra="forbid", strict=True):
    """Address and limits of a service; docs/serve.md explains each.

    Raises:
        UsageError: a name is unknown, a value is of another type or out of range, or the token is
            missing.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, lt=1 << 16)
    token: str | None = None
    allowed_hosts: tuple[Host, ...] = Field(default=(), strict=False)
    max_upload: Annotated[ByteSize, Field(ge=1)] = ByteSize(16 << 20)
    max_k: int = Field(default=1000, ge=1)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise UsageError(f"{first['loc'][0]} = {first['input']!r}: {first['msg']}") from None

    @model_validator(mode="after")
    def _check_token(self) -> Self:
        token = self.token
        if token is not None and (len(token) < 16 or not token.isascii() or " " in token):
            raise UsageError(
                "the token must have at least 16 ASCII characters and no spaces: "
                "openssl rand -hex 32 makes one"
            )
        if token is None and not self.is_local:
            raise UsageError(
                f"{self.host} can be reached from other machines: a token is needed (--token)"
            )
        return self

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the address."""
        return self.host in LOOPBACK_HOSTS


# Requests and responses ---------------------------------------------------------------------------


class Filters(BaseModel, extra="forbid"):
    """How many items to find, and which."""

    k: Annotated[int, Field(ge=1)] = 10
    allow_ids: Ids | None = None
    deny_ids: Ids | None = None
    allow_labels: Labels | None = None
    deny_labels: Labels | None = None


class Listing(BaseModel, extra="forbid"):
    """Which items to list."""

    k: Annotated[int, Field(ge=1, description="Number of items.")] = 24
    label: Annotated[
        Sequence[Label], Field(max_length=1000, description="Only items with one of these labels.")
    ] = ()
    name: Annotated[Label | None, Field(description="Only items of this name.")] = None


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
            raise ValueError(
                "give one of vector, features, id, name (an image: POST /search/image)"
            )
        return self


class NewItem(BaseModel, extra="forbid"):
    """Id, name and labels of an item to add."""

    id: int | None = Field(
        default=None, ge=0, le=2**62, description="Default: the next larger one."
    )
    name: Text | None = None
    labels: Annotated[list[Text], Field(max_length=100)] = []


class AddForm(NewItem):
    """An item to add, as an image."""

    image: UploadFile


class AddRequest(NewItem, strict=True):
    """An item to add, as a vector or features."""

    vector: Numbers | None = None
    features: Numbers | None = None

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.vector is None) == (self.features is None):
            raise ValueError("give one of vector, features (an image: POST /items/image)")
        return self


class Item(BaseModel):
    """An item, with its name and labels if it has any, and its score in a search."""

    id: int
    name: str | None = None
    labels: Sequence[str] | None = None
    score: float | None = None


class Items(BaseModel):
    """Some of the ``ntotal`` items of the index."""

    items: list[Item]
    ntotal: int


class Results(BaseModel):
    """Results, best first, and the number of items in the index."""

    results: list[Item]
    ntotal: int


class Problem(BaseModel):
    """Why a request failed, in one line."""

    error: str
