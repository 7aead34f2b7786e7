"""``gpq serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .options import data_options, device_option, open_dataset, ray_option

SIZES: dict[str, type] = {
    "max_upload": str,
    "max_pixels": int,
    "max_k": int,
    "max_connections": int,
    "rate": float,
    "timeout": float,
    "threads": int,
    "compact_after": int,
}
"""What ``--config`` may set, beside ``allowed_hosts``."""


@click.command()
@click.argument("index_file", metavar="INDEX")
@click.option(
    "--model",
    "model_dir",
    required=True,
    metavar="MODEL",
    help="The model of the index: its folder, or its network in ONNX, which needs no torch but is read-only.",
)
@click.option(
    "--data",
    metavar="DATA",
    help="The items, for names, labels and pictures, with the ids of the index.",
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
    help=f"Limits: allowed_hosts, {', '.join(SIZES)} (docs/serve.md).",
)
@ray_option(workers=click.INT, replicas=click.INT)
@device_option
@data_options
def serve(
    index_file: str,
    model_dir: str,
    data: str | None,
    host: str,
    port: int,
    token: str | None,
    config_file: str | None,
    ray: dict[str, Any],
    data_args: dict[str, Any],
    **options: Any,
) -> None:
    """Serve an index over HTTP, with a page to search it by images.

    The page is at /, the list of requests at /docs, their description for programs at /openapi.json. Searches of several clients are done
    together. It is read-only, for this machine alone, unless a token is given.

    An index file that is replaced is opened again, as by SIGHUP or POST /reload; no request is lost. With --writable, what is acknowledged
    is on disk. A manifest of shards is served too, with --ray from the nodes of a cluster.

    \b
    Examples:
      gpq serve index.faiss --model model --data digits
      gpq serve index.faiss --model encoder.onnx --config serve.toml
      gpq serve manifest.json --model model --ray auto,replicas=2
      GPQ_SERVE_TOKEN=$(openssl rand -hex 32) gpq serve index.faiss --model model --writable
    """
    from gpq_faiss.errors import UsageError, needs

    try:
        from gpq_faiss.serve.guard import Settings
        from gpq_faiss.serve.run import serve as run
    except ImportError as error:
        if (error.name or "").partition(".")[0] in ("gpq_faiss", "gpq_cli") or needs("gpq serve", error):
            raise
        raise UsageError(f"the package {error.name} is missing: pip install 'gpq-faiss[serve]'") from None

    limits = {} if config_file is None else _read_limits(Path(config_file))
    changes = {name: limits.pop(name) for name in ("compact_after",) if name in limits}
    settings = Settings(host=host, port=port, token=token, **limits)
    dataset = None if data is None else open_dataset(data, data_args)
    run(index_file, model_dir, data=dataset, settings=settings, **changes, **ray, **options)


def _read_limits(path: Path) -> dict[str, Any]:
    """Arguments of the service's settings, from TOML. Raises DataError: unreadable; UsageError: an unknown key or a wrong type."""
    from gpq_faiss.errors import UsageError, unknown
    from gpq_faiss.inputs import parse_bytes, read_toml

    found: dict[str, Any] = {}
    for name, value in read_toml(path, "the limits of a service (--config)").items():
        if name == "allowed_hosts" and isinstance(value, list) and all(isinstance(v, str) for v in value):
            found["names"] = tuple(value)
        elif name == "max_upload":
            found[name] = parse_bytes(value, f"{path}: max_upload")
        elif name in SIZES and type(value) in (int, SIZES[name]):
            found[name] = value
        elif name in SIZES or name == "allowed_hosts":
            raise UsageError(f"{path}: {name} = {value!r}: a value of another type is needed (docs/serve.md)")
        else:
            raise UsageError(unknown(f"{path}: '{name}'", name, [*SIZES, "allowed_hosts"]))
    return found
