"""The commands of ``gpq`` but for ``gpq experiment``: they parse, call the library and print."""

from pathlib import Path
from typing import Any

import click

import gpq_faiss as gpq
from gpq_faiss.errors import UsageError
from gpq_faiss.files import atomic_path, check_output, qrels_path
from gpq_faiss.launch import launched

from . import options as common


@click.command(
    short_help="Train a model on DATA.",
    help=f"""Train a model on DATA and write its folder: model.safetensors, config.json,
metrics.jsonl, split.json.

A killed run continues with --resume, and reaches the same codes (on the CPU). docs/settings.md
explains the settings of --set. Under torchrun, several processes train together.

\b
Examples:
  gpq train digits --labelled 10-per-class --set network.backbone=mlp --out model
  gpq train features:clip.npy --labels labels.npy --bits 48 --out model
  gpq train folder:signs --protocol transfer --set posterior.unseen_classes=true --out model
  gpq train cifar10 --labelled 500-per-class --set network.backbone=vgg \
--set network.weights=imagenet --device cuda --amp --out model
  torchrun --nproc-per-node 2 --no-python gpq train folder:photos \
--set network.backbone=vgg --out model

{common.DATA_HELP}
""",
)
@click.argument("data")
@common.out_option
@click.option(
    "--preset",
    default="recommended",
    show_default=True,
    help="Base settings: recommended, paper or authors, or a TOML file.",
)
@common.set_option
@click.option(
    "--bits",
    type=int,
    help="Code length: 12, 24, 32, 48 or any multiple of the bits per codeword.  [default: that of "
    "the preset, 48]",
)
@click.option(
    "--labelled",
    default="all",
    show_default=True,
    help="Labels for the training: N-per-class, a share (5%), a file of ids, or all (except those "
    "of the queries).",
)
@click.option(
    "--protocol",
    default="1",
    show_default=True,
    help="How queries are held out: 1, 2, transfer or none (docs/evaluation.md).",
)
@click.option(
    "--queries",
    help="Queries of protocol 1: N-per-class, or a file of ids.  [default: a sixtieth of each "
    "class, at least 10; NUS-WIDE: 100-per-class]",
)
@click.option("--amp", is_flag=True, help="Run the backbone in bf16.")
@click.option(
    "--validate-every",
    type=click.IntRange(1),
    default=100,
    hidden=True,
    help="Steps between two validations.",
)
@click.option(
    "--checkpoint-seconds", default=60.0, hidden=True, help="Seconds between two checkpoints."
)
@common.device_option
@click.option("--resume", is_flag=True, help="Continue an unfinished run.")
@common.overwrite_option
@common.labels_option
@common.read_option
def train(
    data: str,
    out: str,
    preset: str,
    changes: tuple[str, ...],
    bits: int | None,
    labels: str | None,
    data_args: dict[str, Any],
    **options: Any,
) -> None:
    from gpq_faiss.faissio.model import read_description

    config = _settings(preset, changes, bits)
    run = ("device", "resume", "amp", "validate_every", "checkpoint_seconds")
    options["options"] = gpq.RunOptions(**{name: options.pop(name) for name in run})
    folder = gpq.train(
        gpq.open_data(data, labels=labels, **data_args), out, config=config, **options
    )
    if launched().rank == 0:
        trained = read_description(folder)["training"]
        best = ""
        if trained["best_step"] is not None:
            score = f"{trained['validation_map']:.4f}"
            best = f", validation mAP {score} at step {trained['best_step']}"
        common.emit(
            f"{folder}: {config.quantizer.bits} bits, {trained['labelled_items']:,} labelled and "
            f"{trained['unlabelled_items']:,} unlabelled items, {trained['steps']:,} steps{best}"
        )


def _settings(preset: str, changes: tuple[str, ...], bits: int | None) -> Any:
    """Return the checked settings: each of preset, ``--set`` and ``--bits`` overrides those before
    it.
    """
    from gpq_faiss import config as settings

    is_file = preset.lower().endswith(".toml")
    config = settings.read_toml(preset) if is_file else settings.preset(preset)
    changed = settings.parse_settings(changes)
    config = config.with_settings(changed)
    if bits is not None:
        if "codebooks" in changed.get("quantizer", {}):
            raise UsageError(
                "--bits and --set quantizer.codebooks both set the code length: give one of them"
            )
        M = settings.codebooks_for_bits(bits, config.quantizer.codewords)
        config = config.with_settings({"quantizer": {"codebooks": M}})
    return settings.validate(config)


@click.command(
    short_help="Compute the vectors and codes of DATA.",
    help=f"""Encode DATA with a model: write features.h5, then codes.h5.

Memory does not grow with the data. The same command continues an interrupted run where it stopped,
unless the data have changed: names, sizes, labels and samples of the content are compared.
--overwrite runs the network again.

With --ray, the workers of a cluster run the network. Only the codes are written, as with
--no-features; either command continues what the other has begun.

Codes keep the labels of DATA, or of --labels: the results of a search show them, and an evaluation
with --codes needs them.

\b
Examples:
  gpq encode model features:clip.npy --out codes.h5
  gpq encode model features:clip.npy --ray auto --out codes.h5

{common.DATA_HELP}
""",
)
@click.argument("model", metavar="MODEL_DIR")
@click.argument("data")
@common.out_option
@click.option(
    "--no-features", is_flag=True, help="Write only the codes, not the features beside them."
)
@click.option(
    "--batch-size", type=int, default=0, help="Items per batch.  [default: by the data and device]"
)
@click.option("--amp", is_flag=True, help="Run the backbone in bf16.")
@click.option(
    "--ray",
    metavar="ADDRESS",
    help="Run on a Ray cluster: local (only this machine), auto (a cluster running here), or "
    "HOST:PORT. Its nodes must see the same files under the same paths (docs/scale.md).",
)
@common.device_option
@common.overwrite_option
@common.labels_option
@common.read_option
def encode(
    data: str,
    out: str,
    no_features: bool,
    ray: str | None,
    labels: str | None,
    data_args: dict[str, Any],
    **options: Any,
) -> None:
    if ray is None:
        path = gpq.encode(
            data=gpq.open_data(data, labels=labels, **data_args),
            out=out,
            keep_features=not no_features,
            **options,
        )
    else:
        options |= {"labels": labels, **data_args}
        path = gpq.encode_on_ray(data=data, out=out, address=ray, **options)
    with gpq.RowReader(path) as reader:
        common.emit(f"{path}: {reader.ntotal:,} codes of {reader.header.width} bytes")


@click.command(short_help="Write codebooks or codes for other tools.")
@click.argument("source")
@click.option(
    "--to",
    type=click.Choice(["numpy", "parquet"]),
    required=True,
    help="numpy for codebooks, parquet for codes.",
)
@common.out_option
@common.overwrite_option
def export(**options: Any) -> None:
    """Write a model's codebooks, or codes, for another tool. SOURCE is a model folder; for parquet,
    codes.h5.

    numpy is a .npz file of float32 codebooks, also byte-fused: two codebooks of 16 codewords become
    one of 256, for the same bytes of codes. parquet is a table of ids, codes, names and labels.
    docs/databases.md shows how other programs use them.

    \b
    Examples:
      gpq export model --to numpy --out codebooks.npz
      gpq export codes.h5 --to parquet --out codes.parquet
    """
    common.emit(str(gpq.export(**options)))


@click.command(short_help="Write an empty, trained Faiss index.")
@click.argument("model_dir")
@common.out_option
@click.option(
    "--kind",
    type=click.Choice(["flat", "fused", "fastscan", "ivf"]),
    default="flat",
    show_default=True,
    help="Kind of the index: flat is an IndexPQ.",
)
@common.overwrite_option
def export_faiss(**options: Any) -> None:
    """Write an empty, trained Faiss index (inner product) with the model's codebooks.

    Any Faiss program reads it with faiss.read_index, and adds item vectors to it. These must come
    from the model's network (gpq encode), and so must the vectors of queries (gpq export-encoder).
    If query and item vectors differ, as with all presets except paper and authors, a note says so:
    Faiss cannot tell them apart.

    \b
    Examples:
      gpq export-faiss model --out empty.faiss
      gpq export-faiss model --kind fastscan --out scan.faiss
    """
    common.emit(str(gpq.export_faiss(**options)))


@click.command(short_help="Write the network as ONNX or torch.export.")
@click.argument("model_dir")
@common.out_option
@click.option(
    "--side",
    type=click.Choice(["queries", "items"]),
    default="queries",
    show_default=True,
    help="Which vectors the exported network computes.",
)
@common.overwrite_option
def export_encoder(**options: Any) -> None:
    """Write a model's network as one file, ONNX or (.pt2) torch.export: from input to vectors.

    Features go in as float32 [B, W], images as float32 RGB [B, 3, S, S] in [0, 1]. Nothing is
    written unless the graph gives the model's vectors on random input. ONNX needs the extra onnx
    (docs/install.md).

    \b
    Examples:
      gpq export-encoder model --out encoder.onnx
      gpq export-encoder model --side items --out items.onnx
      gpq export-encoder model --out encoder.pt2
    """
    path = gpq.export_encoder(**options)
    common.emit(
        f"{path}: {path.stat().st_size:,} bytes; vectors of {options['side']} match the model's"
    )


@click.command(short_help="Build an index of codes, or merge several indexes.")
@click.argument("model_dir")
@click.argument("sources", metavar="CODES_OR_FEATURES...", nargs=-1, required=True)
@common.out_option
@click.option(
    "--kind",
    type=click.Choice(["flat", "fused", "fastscan", "ivf"]),
    default="flat",
    show_default=True,
    help="Kind of the Faiss file: flat is an IndexPQ; the others are exports for plain Faiss.",
)
@click.option(
    "--no-ids",
    is_flag=True,
    help="Write a bare index, in which an item's id is its position; ids must be 0 to n - 1.",
)
@click.option(
    "--no-names",
    is_flag=True,
    help="Do not write OUT.items.sqlite (names, labels and kept columns for results).",
)
@common.overwrite_option
def index(sources: tuple[str, ...], no_ids: bool, no_names: bool, **options: Any) -> None:
    """Build an index of codes.h5 or features.h5, with the 64-bit ids of the items.

    CODES_OR_FEATURES... is one file or several, which are merged: codes.h5, features.h5, or an
    index, with the changes that a service has made to it.

    OUT is a plain Faiss file (an IndexPQ in an IndexIDMap2), or NAME.lists. The latter opens at
    once, whatever its size: gpq search and gpq serve map it into memory.

    Names and labels of the items go into OUT.items.sqlite, and from there into results.

    \b
    Examples:
      gpq index model codes.h5 --out index.faiss
      gpq index model codes-*.h5 --out index.lists
      gpq index model a.faiss b.faiss --out merged.faiss
      gpq index model served.faiss --out new.faiss
      gpq index model codes.h5 --kind fused --out fused.faiss
    """
    path = gpq.index(source=list(sources), ids=not no_ids, names=not no_names, **options)
    common.emit(str(path))


@click.command(short_help="Find the best items of an index for each query.")
@click.argument("model")
@click.argument("index")
@click.argument("queries")
@click.option("-k", "k", type=int, default=10, show_default=True, help="Results per query.")
@click.option("--rows", help="Only these queries: 0:8, or 3,5,9.")
@click.option(
    "--allow-ids",
    "allow",
    metavar="FILE",
    help="Only items with these ids: .npy, or text with one per line.",
)
@click.option(
    "--deny-ids",
    "deny",
    metavar="FILE",
    help="No items with these ids: .npy, or text with one per line.",
)
@common.format_option("json", "csv", "parquet", "png")
@common.file_option
@click.option("--images", metavar="DATA", help="For png: images of the items, as DATA.")
@common.device_option
@common.overwrite_option
@common.read_option
def search(
    model: str,
    queries: str,
    allow: str | None,
    deny: str | None,
    form: str | None,
    out: str | None,
    images: str | None,
    device: str,
    overwrite: bool,
    data_args: dict[str, Any],
    **options: Any,
) -> None:
    """Find the k best items of an index for each query.

    MODEL is a model folder, or its network as gpq export-encoder writes it in ONNX, which runs
    without torch. INDEX is index.faiss, index.lists or codes.h5. QUERIES is a file of embeddings
    (.npy, .npz, .parquet), an image, a folder of images, or any DATA that gpq train takes.

    Results are exact, ties in the order of ids. With --device cuda the network and the search run
    on the GPU, with the same results. CSV and Parquet have one row per result.

    \b
    Examples:
      gpq search model index.faiss queries.npy -k 10 --format json
      gpq search encoder.onnx index.lists photo.jpg
      gpq search model index.faiss queries.npy --deny-ids seen.txt --out results.csv
      gpq search model codes.h5 queries.npy --allow-ids new.npy --out results.parquet
      gpq search model index.faiss digits --rows 0:8 --images digits --out ranked.png
    """
    from gpq_faiss.ids import read_ids

    name: Any = common.output_form(form, out, overwrite)
    if (name in ("parquet", "png") and out is None) or (name == "png" and images is None):
        raise UsageError(f"--format {name} needs --out FILE, and png --images DATA of the index")
    dataset = gpq.open_data(queries, **data_args)
    result = gpq.search(
        gpq.open_encoder(model, device),
        queries=dataset,
        allow=None if allow is None else read_ids(allow),
        deny=None if deny is None else read_ids(deny),
        **options,
    )
    if name == "png":
        result.draw(gpq.open_data(images, **data_args), dataset, str(out), overwrite=overwrite)
    elif name == "parquet":
        with atomic_path(str(out)) as temporary:
            result.to_pandas().to_parquet(temporary)
    elif name == "csv":
        common.emit(gpq.render(list(result), name).rstrip(), out)
    elif name == "json":
        common.emit(result.to_dict(), out)
    else:
        common.emit(gpq.render(result.rows(), digits=4).rstrip() or "no item was found", out)


@click.command(short_help="Serve an index over HTTP, with a page.")
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
    help="Pictures of the items: files with their names, or the data that were indexed.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to bind. Any but a loopback address needs a token.",
)
@click.option(
    "--port", type=int, default=8000, show_default=True, help="Port to bind; 0: any free one."
)
@click.option(
    "--token",
    envvar="GPQ_SERVE_TOKEN",
    help="Bearer token for writing, and for reading on any but a loopback address. Prefer "
    "GPQ_SERVE_TOKEN: a token on the command line is visible in process listings.",
)
@click.option("--writable", is_flag=True, help="Let requests with the token add and remove items.")
@click.option(
    "--config",
    "config_file",
    metavar="TOML",
    help="Limits: allowed_hosts, max_upload, max_k (docs/serve.md).",
)
@common.device_option
@common.labels_option
@common.read_option
def serve(
    data: str | None,
    config_file: str | None,
    labels: str | None,
    data_args: dict[str, Any],
    **options: Any,
) -> None:
    """Serve an index over HTTP, with a page to search it by images.

    The page is at /, and /docs describes the requests for programs. Without further options the
    service is read-only, and only this machine can reach it.

    If the index file is replaced, the service opens the new one within a second; no request is
    lost. With --writable, acknowledged changes are on disk, in a file beside the index.

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
    limits = {} if config_file is None else read_toml(Path(config_file), "limits of a service")
    if clash := limits.keys() & address:
        raise UsageError(f"{config_file}: {clash.pop()} belongs on the command line")
    try:
        Settings(**limits)
    except UsageError as error:
        raise UsageError(f"{config_file}: {error}") from None
    run(
        settings=Settings(**address, **limits),
        data=None if data is None else gpq.open_data(data, labels=labels, **data_args),
        **options,
    )


@click.command(
    short_help="Measure a model on labelled DATA, beside other methods.",
    help=f"""Measure a model on labelled DATA: mAP, precision and recall at k, neighbour recall.

Queries and database are those of the training split. mAP is over the full ranking, with the
expected value over random order within ties (gpq.evaluate in Python has other orders). NN10@100 is
the share of a query's ten nearest items by features that are among its first 100 results. Networks
run on --device, rankings on the CPU.

MODEL is a model folder. With --codes FILE, that file is the database, and all labelled items of
DATA are the queries; MODEL may then be the network in ONNX (gpq export-encoder), which runs without
torch, and --compare and --protocol do not apply.

--compare adds rows to the table: methods, which are fitted on the same items, and models trained on
the same split. A model's row has the name of its method and its preset.

\b
Examples:
  gpq evaluate model digits --protocol 1 --compare pq,opq,itq
  gpq evaluate model digits -k 100 --denominator relevant-in-top-k
  gpq evaluate model features:clip.npy --labels labels.npy --out scores.json
  gpq evaluate model digits --run run.trec
  gpq evaluate encoder.onnx features:queries.npy --labels queries-labels.npy --codes codes.h5

{common.DATA_HELP}
""",
)
@click.argument("model")
@click.argument("data")
@click.option("--protocol", help="1, 2 or transfer.  [default: the training's; 1 for other data]")
@click.option(
    "--compare",
    default="",
    metavar="NAMES",
    help="Rows to add, separated by commas: pq, opq, lopq, itq, sh, sdh, float, classifier, "
    "classifier-6, faiss:FACTORY_STRING, folders of models.",
)
@click.option(
    "--codes",
    metavar="FILE",
    help="Codes of the database, encoded with --labels; DATA are the queries, no split is drawn.",
)
@click.option("-k", "k", type=int, help="mAP@k instead of the full ranking.")
@click.option(
    "--denominator",
    type=click.Choice(["relevant", "relevant-in-top-k", "min(k, relevant)"]),
    default="relevant",
    show_default=True,
    help="Divisor of mAP@k: all relevant items, those in the top k (usual in papers on hashing), "
    "or min(k, relevant).",
)
@common.format_option("json", "markdown", "csv", "latex")
@common.file_option
@click.option(
    "--run",
    metavar="FILE",
    help="Write the model's rankings as a TREC run, as run.trec, and the relevant items beside it, "
    "as run.qrels, for ir-measures, ranx and pytrec_eval.",
)
@click.option(
    "--plot", metavar="FILE", help="Draw the precision-recall curves: .png, .svg or .pdf."
)
@common.device_option
@common.overwrite_option
@common.labels_option
@common.read_option
def evaluate(
    data: str,
    k: int | None,
    denominator: Any,
    form: str | None,
    out: str | None,
    run: str | None,
    plot: str | None,
    overwrite: bool,
    labels: str | None,
    data_args: dict[str, Any],
    **options: Any,
) -> None:
    for path in (run, plot, None if run is None else qrels_path(run)):
        if path is not None:
            check_output(path, overwrite=overwrite)
    name: Any = common.output_form(form, out, overwrite)
    result = gpq.evaluate(
        convention=gpq.Convention(k=k, denominator=denominator),
        data=gpq.open_data(data, labels=labels, **data_args),
        **options,
    )
    if plot is not None:
        result.draw(plot, overwrite=overwrite)
    if run is not None:
        result.run.write(run, overwrite=overwrite)
    if name == "json":
        common.emit(result.to_dict(), out)
    else:
        lines = result.about() if name == "text" else []
        common.emit("\n".join([gpq.render(result.rows(), name, digits=4), *lines]), out)


@click.command(short_help="Describe and verify a file or folder.")
@click.argument("path")
@common.format_option("json")
def info(path: str, form: str | None) -> None:
    """Describe and verify a file or folder: shapes, sizes, fingerprints, versions.

    PATH is a model folder, features.h5, codes.h5, an index (with the changes that a service has
    made to it), or an exported encoder (.onnx, .pt2). JSON has everything.

    \b
    Examples:
      gpq info model
      gpq info index.faiss --format json
    """
    description = gpq.info(path)
    lines = [f"{name:<22}  {str(value)[:100]}" for name, value in description.items()]
    common.emit(description if form == "json" else "\n".join(lines))
