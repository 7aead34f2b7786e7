"""``gpq serve``."""

from __future__ import annotations

from typing import Any

import click

from .options import data_options, device_option, open_dataset, ray_options


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
    "--compact-after",
    type=int,
    default=10_000,
    show_default=True,
    metavar="N",
    help="With --writable: rewrite the index file after this many changes. Until then they are in INDEX.changes.sqlite.",
)
@click.option("--threads", type=int, help="Threads of a search.  [default: all cores]")
@click.option(
    "--allowed-host",
    "names",
    multiple=True,
    metavar="NAME",
    help="Additional host name of a service on a loopback address, such as that of a proxy.",
)
@click.option("--max-k", type=int, default=1000, show_default=True, help="Maximum results per request.")
@click.option(
    "--max-upload", default="16MiB", show_default=True, metavar="SIZE", help="Maximum size of a request."
)
@click.option(
    "--max-pixels",
    type=int,
    default=25_000_000,
    show_default=True,
    help="Maximum pixels of an uploaded image.",
)
@click.option(
    "--rate",
    type=float,
    default=200,
    show_default=True,
    help="Average requests per second and client; 0: unlimited.",
)
@click.option(
    "--timeout", type=float, default=30, show_default=True, help="Seconds for a request, and for its head."
)
@click.option(
    "--max-connections",
    type=int,
    default=128,
    show_default=True,
    help="Maximum open connections per client address: more for a proxy, which is one client.",
)
@ray_options
@click.option(
    "--replicas",
    type=int,
    default=1,
    show_default=True,
    help="With --ray: copies of each shard, which share the queries.",
)
@device_option
@data_options
def serve(
    index_file: str,
    model_dir: str,
    data: str | None,
    host: str,
    port: int,
    token: str | None,
    writable: bool,
    compact_after: int,
    threads: int | None,
    names: tuple[str, ...],
    max_k: int,
    max_upload: str,
    max_pixels: int,
    rate: float,
    timeout: float,
    max_connections: int,
    ray: str | None,
    workers: int | None,
    replicas: int,
    device: str,
    data_args: dict[str, Any],
) -> None:
    """Serve an index over HTTP, with a page to search it by images.

    The page is at /, the list of requests at /docs, their description for programs at /openapi.json. Searches of several clients are done
    together. It is read-only, for this machine alone, unless a token is given.

    An index file that is replaced is opened again, as by SIGHUP or POST /reload; no request is lost. With --writable, what is acknowledged
    is on disk. A manifest of shards is served too, with --ray from the nodes of a cluster.

    \b
    Examples:
      gpq serve index.faiss --model model --data digits
      gpq serve index.faiss --model encoder.onnx
      gpq serve manifest.json --model model --ray auto --replicas 2
      GPQ_SERVE_TOKEN=$(openssl rand -hex 32) gpq serve index.faiss --model model --writable
    """
    from gpq_faiss.errors import UsageError, needs
    from gpq_faiss.inputs import parse_bytes

    try:
        from gpq_faiss.serve.guard import Settings
        from gpq_faiss.serve.run import serve as run
    except ImportError as error:
        if (error.name or "").partition(".")[0] in ("gpq_faiss", "gpq_cli") or needs("gpq serve", error):
            raise
        raise UsageError(f"the package {error.name} is missing: pip install 'gpq-faiss[serve]'") from None

    if ray is None and (workers is not None or replicas != 1):
        raise UsageError("--workers and --replicas need --ray")
    settings = Settings(
        host=host,
        port=port,
        token=token,
        names=names,
        max_upload=parse_bytes(max_upload, "--max-upload"),
        max_pixels=max_pixels,
        max_k=max_k,
        rate=rate,
        timeout=timeout,
        max_connections=max_connections,
        threads=threads,
    )
    dataset = None if data is None else open_dataset(data, data_args)
    run(
        index_file,
        model_dir,
        data=dataset,
        settings=settings,
        writable=writable,
        compact_after=compact_after,
        device=device,
        ray=ray,
        workers=workers,
        replicas=replicas,
    )
