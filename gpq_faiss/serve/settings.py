"""Address and limits of the service."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ..errors import UsageError, unknown
from ..inputs import parse_bytes

_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1", "[::1]")

Size = Annotated[int, Field(ge=1), BeforeValidator(lambda size: parse_bytes(size, "max_upload"))]


class Settings(BaseModel):
    """Address and limits of a service; docs/serve.md explains each.

    Raises:
        UsageError: an unknown name, a value of another type or out of range, or a missing token.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, lt=1 << 16)
    token: str | None = None
    allowed_hosts: tuple[str, ...] = Field(default=(), strict=False)
    max_upload: Size = 16 << 20
    max_k: int = Field(default=1000, ge=1)
    threads: int | None = Field(default=None, ge=1)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = str(first["loc"][0])
            if first["type"] == "extra_forbidden":
                raise UsageError(unknown(f"'{name}'", name, list(Settings.model_fields))) from None
            raise UsageError(f"{name} = {first['input']!r}: {first['msg']}") from None

    @model_validator(mode="after")
    def _check_token(self) -> Self:
        token = self.token
        if token is not None and (len(token) < 16 or not token.isascii() or " " in token):
            raise UsageError(
                "the token must have at least 16 ASCII characters and no spaces (openssl rand -hex 32)"
            )
        if token is None and not self.is_local:
            raise UsageError(
                f"{self.host} can be reached from other machines: a token is needed (--token)"
            )
        return self

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the address."""
        return self.host in _LOOPBACK_HOSTS

    @property
    def trusted_hosts(self) -> list[str]:
        """Names that requests may give as their host.

        On a loopback address others are refused: a page of another site could let its name point to this
        machine (DNS rebinding).
        """
        if not self.is_local and not self.allowed_hosts:
            return ["*"]
        return [*_LOOPBACK_HOSTS, *self.allowed_hosts]
