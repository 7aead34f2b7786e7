"""``gpq index``."""

from __future__ import annotations

from typing import Any

import click

from .options import out_option, overwrite_option, progress


@click.command()
@click.argument("model_dir")
@click.argument("sources", metavar="CODES_OR_FEATURES...", nargs=-1, required=True)
@out_option
@click.option(
    "--kind",
    type=click.Choice(["flat", "fused", "fastscan", "exact", "grouped", "auto", "ivf"]),
    default="flat",
    show_default=True,
    help="How the codes are kept: flat is a plain 4-bit IndexPQ; ivf has lists.",
)
@click.option(
    "--memory",
    metavar="SIZE",
    help="Build within this much, such as 2GB, through files; resumable by source.",
)
@click.option(
    "--lists",
    metavar="N|prototypes",
    help="For ivf: number of lists by k-means, or one a class prototype of the model.  [default: square root of the items]",
)
@click.option("--nprobe", type=int, help="For ivf: lists that a query looks at.  [default: 8]")
@click.option(
    "--recall", type=float, help="For ivf: choose nprobe for this recall of the top 10, such as 0.95."
)
@overwrite_option
def index(
    model_dir: str,
    sources: tuple[str, ...],
    out: str,
    kind: str,
    memory: str | None,
    lists: str | None,
    nprobe: int | None,
    recall: float | None,
    overwrite: bool,
) -> None:
    """Build a Faiss index of codes.h5 or features.h5, with the 64-bit ids that they carry.

    CODES_OR_FEATURES... is one file or several, which are shards of one index: codes.h5, features.h5, or Parquet with columns
    "codes" and "id"; or index files, of which several are merged and one takes another form.

    With --recall, what each number of probed lists gives is printed before the path.

    \b
    Examples:
      gpq index model codes.h5 --out index.faiss
      gpq index model shard-*.h5 --memory 2GB --out index.faiss
      gpq index model a.faiss b.faiss --out merged.faiss
      gpq index model codes.h5 --kind ivf --recall 0.95 --out index.faiss
    """
    from gpq_faiss.errors import UsageError
    from gpq_faiss.index.build import index as run
    from gpq_faiss.index.build import read_prototypes
    from gpq_faiss.index.io import read_sidecar
    from gpq_faiss.index.ivf import IvfSettings

    if nprobe is not None and recall is not None:
        raise UsageError("--nprobe and --recall both choose the lists to look at: give one")
    settings: dict[str, Any] = {}
    if lists == "prototypes":
        settings["centroids"] = read_prototypes(model_dir)
    elif lists is not None:
        if not lists.isdecimal():
            raise UsageError(f"--lists {lists}: write a number, or prototypes")
        settings["lists"] = int(lists)
    if nprobe is not None:
        settings["nprobe"] = nprobe
    with progress("index", "code") as update:
        path = run(
            model_dir,
            sources,
            out,
            kind=kind,  # type: ignore[arg-type]  # one of the choices
            memory=memory,
            ivf=IvfSettings(**settings) if settings else None,
            recall=recall,
            overwrite=overwrite,
            progress=update,
        )
    if recall is not None:
        for point in (read_sidecar(path) or {})["extra"]["operating_points"]:
            click.echo(
                f"nprobe {point['nprobe']:.0f}: recall {point['recall']:.4f}, {point['share']:.2%} of the codes, "
                f"{point['seconds_per_query'] * 1e3:.3f} ms a query",
            )
    click.echo(str(path))
