"""The default beside codecs of Faiss: mAP, the first ten results and neighbour recall by code
length.

    python benchmarks/faiss_codecs.py             # CIFAR-10 features of $GPQ_DATA
    python benchmarks/faiss_codecs.py --data features:x.npy --labels y.npy --seeds 0 --bits 48

Every codec is fitted without labels to the vectors of the same split (protocol 1), by the string of
its ``faiss.index_factory``. ``float`` ranks by the exact cosine of the vectors.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from common import Results, data_path, make_parser, numbers, publish, require_data, run_main

import gpq_faiss as gpq
from gpq_faiss.config import codebooks_for_bits, preset

CODECS = {
    12: ["opq", "faiss:RQ2x6"],
    24: ["opq", "faiss:RQ3x8"],
    48: [
        "opq",
        "faiss:RQ6x8",
        "faiss:LSQ6x8",
        "faiss:OPQ6_48,PQ6x8",
        "faiss:PCA48,RaBitQ",
        "float",
    ],
}
"""Codecs that are compared with codes of each length."""


def main() -> None:
    parser = make_parser(__doc__, "faiss-codecs.json")
    parser.add_argument("--data", help="default: the CIFAR-10 features of $GPQ_DATA")
    parser.add_argument("--labels")
    parser.add_argument("--labelled", default="500-per-class")
    parser.add_argument("--bits", type=numbers, default=tuple(CODECS))
    parser.add_argument("--seeds", type=numbers, default=(0, 1, 2))
    options = parser.parse_args()
    name = "cifar10-features"
    source = options.data or require_data(data_path(name, "features.npy"), "features:PATH", name)
    data = gpq.open_data(str(source), labels=options.labels or str(data_path(name, "labels.npy")))
    evaluations = []
    for bits in options.bits:
        for seed in options.seeds:
            changes = {
                "quantizer": {"codebooks": codebooks_for_bits(bits, 16)},
                "training": {"seed": seed},
            }
            config = preset("recommended").with_settings(changes)
            with tempfile.TemporaryDirectory() as folder:
                model = Path(folder, "model")
                gpq.train(data, model, config=config, labelled=options.labelled)
                evaluation = gpq.evaluate(model, data, compare=CODECS[bits]).to_dict()
            rows = {"default": evaluation} | evaluation.pop("compared")
            figures = {codec: figures_of(row) for codec, row in rows.items()}
            evaluations.append({"bits": bits, "seed": seed, "rows": figures})
            convention = evaluation["convention"]
    results = {
        "data": data.name,
        "labelled": options.labelled,
        "convention": convention,
        "evaluations": evaluations,
    }
    publish(results, options.out, markdown)


def figures_of(row: Results) -> Results:
    """Return the figures of a row of an evaluation."""
    return {
        "bits": row["bits"],
        "mAP": row["map"],
        "P@1": row["precision"]["1"],
        "P@10": row["precision"]["10"],
        "NN10@100": row["neighbour_recall"]["nn10_at_100"],
    }


def markdown(results: Results) -> str:
    """Return a table with a row for each codec and length."""
    rows: dict[tuple[int, str], list[Results]] = {}
    for evaluation in results["evaluations"]:
        for codec, row in evaluation["rows"].items():
            rows.setdefault((evaluation["bits"], codec), []).append(row)
    lines = [
        "# The default beside codecs of Faiss",
        "",
        "| codec | bits an item | mAP | P@1 | P@10 | NN10@100 |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for (_, codec), by_seed in rows.items():
        cells = [codec, str(by_seed[0]["bits"] or "–")]
        for measure in ("mAP", "P@1", "P@10", "NN10@100"):
            figures = [row[measure] for row in by_seed]
            cells.append(f"{np.mean(figures):.3f} ± {np.std(figures):.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    seeds = sorted({evaluation["seed"] for evaluation in results["evaluations"]})
    return "\n".join(
        [
            *lines,
            "",
            f"{results['data']}, protocol 1, labelled {results['labelled']}: mean and deviation "
            f"over seeds {', '.join(map(str, seeds))}. {results['convention']}.",
        ]
    )


if __name__ == "__main__":
    run_main(main)
