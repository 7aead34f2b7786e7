"""``gpq serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import gpq_faiss as gpq
from gpq_faiss.errors import UsageError

from . import options as common


@click.command()
@click.argument("index")
@click.option(
    "--model",
    required=True,
    metavar="MODEL",
    help="The model of the index: its folder, or its network in ONNX, which needs no torch but is "
    "read-only.",
)
@click.option(
    "--data",
    metavar="DATA",
    help="Pictures of the items, found by the names of the items, or the data that were indexed.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to bind. Other than a loopback address it needs a token.",
)
@click.option(
    "--port", type=int, default=8000, show_default=True, help="Port to bind; 0: any free one."
)
@click.option(
    "--token",
    envvar="GPQ_SERVE_TOKEN",
    help="Bearer token for writing, and for reading on other than loopback addresses. Better set "
    "the environment variable GPQ_SERVE_TOKEN, which process lists do not show.",
)
@click.option("--writable", is_flag=True, help="Let requests with the token add and remove items.")
@click.option(
    "--config",
    "config_file",
    metavar="TOML",
    help="Limits: allowed_hosts, max_upload, max_k, threads (docs/serve.md).",
)
@common.device_option
@common.data_options
def serve(
    data: str | None, config_file: str | None, data_args: dict[str, Any], **options: Any
) -> None:
    """Serve an index over HTTP, with a page to search it by images.

    The page is at /, the requests for programs are at /docs. The service is read-only, for this
    machine alone, unless a token is given.

    An index file that is replaced is opened within a second; no request is lost. With --writable,
    acknowledged changes are on disk, in a file beside the index.

    \b
    Examples:
      gpq serve index.faiss --model model --data digits
      gpq serve index.faiss --model encoder.onnx --config serve.toml
      GPQ_SERVE_TOKEN=$(openssl rand -hex 32) gpq serve index.faiss --model model --writable
    """
    from gpq_faiss.inputs import read_toml
    from gpq_faiss.serve.run import serve as run
    from gpq_faiss.serve.schemas import Settings

    address = {name: options.pop(name) for name in ("host", "port", "token")}
    settings = Settings(**address)
    if config_file is not None:
        limits = read_toml(Path(config_file), "the limits of a service (--config)")
        for name in limits.keys() & address:
            raise UsageError(f"{config_file}: {name} belongs on the command line: --{name}")
        try:
            settings = Settings(**address, **limits)
        except UsageError as error:
            raise UsageError(f"{config_file}: {error}") from None
    dataset = None if data is None else gpq.open_data(data, **data_args)
    run(data=dataset, settings=settings, **options)
