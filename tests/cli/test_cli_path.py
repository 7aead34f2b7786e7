"""The commands end to end: what they print, and the files that they leave."""

import json
from pathlib import Path

import faiss
import numpy as np
import pandas as pd
import pytest
from commands import ITEMS, clusters, done

from gpq_faiss import open_index
from gpq_faiss.store.changes import ChangeWriter

SEARCH = "search model index.faiss queries.npy"
EVALUATE = "evaluate model features:features.npy --labels labels.npy --protocol 1"

pytestmark = pytest.mark.usefixtures("folder")


def answer(line):
    """Return the JSON of a command."""
    return json.loads(done(f"{line} --format json"))


def ids_of(line):
    """Return the ids of the results of each query."""
    return [query["ids"] for query in answer(line)["queries"]]


def test_train_prints_a_line_and_leaves_a_model(folder):
    train = "train features:features.npy --labels labels.npy --preset run.toml --bits 12"
    assert done(f"{train} --set training.steps=3 --out new").startswith("new: 12 bits, ")
    config = json.loads((folder / "new/config.json").read_text())["config"]
    # Options have priority over the file of settings.
    assert (config["training"]["steps"], config["training"]["validation"]) == (3, 0.2)
    assert (config["preset"], config["quantizer"]["codebooks"]) == ("paper", 3)


def test_encode_and_index_leave_their_files(folder):
    encode = "encode model features:features.npy --labels labels.npy --out new/codes.h5"
    assert done(encode) == "new/codes.h5: 240 codes of 2 bytes\n"
    assert done("export-faiss model --out new/empty.faiss") == "new/empty.faiss\n"
    assert done("index model new/codes.h5 --out new/index.faiss") == "new/index.faiss\n"
    names = {"codes.h5", "features.h5", "empty.faiss", "index.faiss", "index.faiss.items.sqlite"}
    assert {path.name for path in (folder / "new").iterdir()} == names


@pytest.mark.parametrize("options", ["", "--kind fused", "--no-ids", "--no-names"])
def test_every_index_is_searched_alike(options):
    done(f"index model codes.h5 {options} --out new.faiss")
    assert faiss.read_index("new.faiss").ntotal == ITEMS
    assert ids_of("search model new.faiss queries.npy -k 80") == ids_of(f"{SEARCH} -k 80")


def test_search_in_json():
    document = answer(f"{SEARCH} -k 5")
    assert set(document) == {"k", "codebooks_fingerprint", "description", "queries"}
    assert (document["k"], document["description"]) == (5, f"{ITEMS} items")
    for i, query in enumerate(document["queries"]):
        assert set(query) == {"id", "name", "ids", "scores", "names", "labels"}
        assert query["scores"] == sorted(query["scores"], reverse=True)
        # Well separated clusters: the neighbours of a query are of its class.
        assert {item % 3 for item in query["ids"]} == {i % 3}


@pytest.mark.parametrize(("name", "read"), [("r.csv", pd.read_csv), ("r.parquet", pd.read_parquet)])
def test_ending_of_the_output_chooses_the_format(name, read):
    assert done(f"{SEARCH} -k 5 --out {name}") == ""
    table = read(name)
    assert table.columns.tolist() == ["query", "rank", "id", "name", "labels", "score"]
    assert table["id"].tolist() == [number for ids in ids_of(f"{SEARCH} -k 5") for number in ids]


@pytest.mark.parametrize("name", ["ids.npy", "ids.txt"])
def test_lists_of_ids_filter(folder, name):
    ids = np.arange(0, ITEMS, 3)
    np.save("ids.npy", ids)
    (folder / "ids.txt").write_text("".join(f"{number}\n" for number in ids))
    ranked = ids_of(f"{SEARCH} -k {ITEMS}")
    rejected = [[number for number in query if number % 3][:9] for query in ranked]
    assert ids_of(f"{SEARCH} -k 9 --deny-ids {name}") == rejected


def test_changes_of_a_service_are_searched_and_indexed(folder):
    first = ids_of(SEARCH)[0][0]
    with ChangeWriter(folder / "index.faiss", 2, open_index("index.faiss").fingerprint) as writer:
        writer.write({first: (None, None, None)})
    assert all(first not in ids for ids in ids_of(SEARCH))
    assert answer("info index.faiss")["changed_items"] == 1
    done("index model index.faiss --out new.faiss")
    assert answer("info new.faiss")["ntotal"] == ITEMS - 1


def test_evaluate_in_json():
    document = answer(f"{EVALUATE} --compare pq,float --plot pr.png")
    assert (document["map"] > 0.9, document["bits"], document["protocol"]) == (True, 16, "1")
    assert set(document["compared"]) == {"pq", "float"}
    assert document["neighbour_recall"]["queries"] == document["n_queries"]
    assert Path("pr.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("form", "mark"), [("text", "queries,"), ("markdown", "|"), ("latex", "tabular")]
)
def test_evaluate_as_a_table(form, mark):
    text = done(f"{EVALUATE} --format {form}")
    assert all(text_part in text for text_part in ("gpq (paper)", "mAP", mark))
    assert f"{answer(EVALUATE)['map']:.4f}" in text


def test_evaluate_divides_as_papers_on_hashing_do():
    evaluate = f"{EVALUATE} -k 20 --denominator"
    hashing = answer(f"{evaluate} relevant-in-top-k")
    assert "the relevant items in the top k" in hashing["convention"]
    assert hashing["map"] >= answer(f"{evaluate} 'min(k, relevant)'")["map"]


@pytest.mark.parametrize("protocol", ["1 --queries 17-per-class", "2", "transfer"])
def test_every_protocol_trains_and_evaluates(protocol):
    features, labels = clusters(400)
    np.savez("x.npz", features=features, labels=np.where(np.arange(400) % 4 == 3, 3, labels))
    train = "train x.npz --preset run.toml --set training.steps=5 --labelled 0.5"
    done(f"{train} --protocol {protocol} --out new")
    name = protocol.split(maxsplit=1)[0]
    document = answer(f"evaluate new x.npz --protocol {name}")
    assert (document["protocol"], 0 < document["map"] <= 1) == (name, True)
