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
    help="The model of the index: its folder, or its network in ONNX, which needs no torch but is read-only.",
)
@click.option(
    "--data", metavar="DATA", help="The items, for names, labels and pictures, with the ids of the index."
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to bind. Other than a loopback address it needs a token.",
)
@click.option("--port", type=int, default=8000, show_default=True, help="Port to bind; 0: any free one.")
@click.option(
    "--token",
    envvar="GPQ_SERVE_TOKEN",
    help="Bearer token for writing, and for reading on non-loopback addresses. Better set the environment variable "
    "GPQ_SERVE_TOKEN, which process lists do not show.",
)
@click.option("--writable", is_flag=True, help="Let requests with the token add and remove items.")
@click.option(
    "--config",
    "config_file",
    metavar="TOML",
    help="Limits: allowed_hosts, max_upload, max_pixels, max_k, max_connections, rate, timeout, threads, compact_after "
    "(docs/serve.md).",
)
@common.ray_option("workers")
@common.device_option
@common.data_options
def serve(
    data: str | None, config_file: str | None, ray: dict[str, Any], data_args: dict[str, Any], **options: Any
) -> None:
    """Serve an index over HTTP, with a page to search it by images.

    The page is at /, the description of the requests for programs at /openapi.json. Searches of several clients are done together. It is
    read-only, for this machine alone, unless a token is given.

    An index file that is replaced is opened within a second; no request is lost. With --writable, what is acknowledged is on disk. A
    manifest of shards is served too, with --ray from the nodes of a cluster.

    \b
    Examples:
      gpq serve index.faiss --model model --data digits
      gpq serve index.faiss --model encoder.onnx --config serve.toml
      gpq serve manifest.json --model model --ray auto
      GPQ_SERVE_TOKEN=$(openssl rand -hex 32) gpq serve index.faiss --model model --writable
    """
    from gpq_faiss.inputs import read_toml
    from gpq_faiss.serve.guard import Settings
    from gpq_faiss.serve.run import serve as run

    given = {name: options.pop(name) for name in ("host", "port", "token")}
    settings = Settings(**given)
    if config_file is not None:
        limits = read_toml(Path(config_file), "the limits of a service (--config)")
        for name in limits.keys() & given:
            raise UsageError(f"{config_file}: {name} belongs on the command line: --{name}")
        try:
            settings = Settings(**given, **limits)
        except UsageError as error:
            raise UsageError(f"{config_file}: {error}") from None
    dataset = None if data is None else gpq.open_data(data, **data_args)
    run(data=dataset, settings=settings, **ray, **options)
