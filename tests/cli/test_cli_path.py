"""The commands end to end: what they print, the files that they leave, and the keys of their
JSON.
"""

import json
import logging
import os
import re
import shutil

import faiss
import h5py
import numpy as np
import pytest
from commands import ITEMS, clusters, done, fill, gpq
from PIL import Image

from gpq_faiss import open_index
from gpq_faiss.store.changes import ChangeWriter


def answer(line):
    """Return the JSON of a command."""
    return json.loads(done(f"{line} --format json"))


def ids_of(line):
    return [query["ids"] for query in answer(line)["queries"]]


def test_train_prints_a_line_and_leaves_a_model(shop, tmp_path):
    settings = "--preset paper --bits 16 --seed 3 --set training.steps=3"
    line = done(f"train {shop.data} --labels {shop.labels} {settings} --out {tmp_path}/model")
    assert line.startswith(
        f"{tmp_path}/model: 16 bits, 205 labelled and 0 unlabelled items, 3 steps"
    )
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["input"] == {"kind": "features", "width": 16}
    assert (config["config"]["training"]["seed"], config["config"]["quantizer"]["codebooks"]) == (
        3,
        4,
    )
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_encode_and_index_leave_their_files(shop, tmp_path):
    codes, index, empty = (tmp_path / name for name in ("codes.h5", "index.faiss", "empty.faiss"))
    encode = f"encode {shop.model} {shop.data} --labels {shop.labels} --out {codes}"
    assert done(encode) == f"{codes}: 240 codes of 2 bytes\n"
    assert done(f"export-faiss {shop.model} --out {empty}") == f"{empty}\n"
    assert done(f"index {shop.model} {codes} --out {index}") == f"{index}\n"
    names = {"codes.h5", "features.h5", "empty.faiss", "index.faiss", "index.faiss.items.sqlite"}
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.parametrize("option", ["", "--kind fused", "--no-ids", "--no-names"])
def test_every_index_is_searched_alike(shop, tmp_path, option):
    done(f"index {shop.model} {shop.codes} {option} --out {tmp_path}/i.faiss")
    assert faiss.read_index(f"{tmp_path}/i.faiss").ntotal == ITEMS
    search = f"search {shop.model} {{}} {shop.queries} -k 80"
    assert ids_of(search.format(f"{tmp_path}/i.faiss")) == ids_of(search.format(shop.index))


def test_lists_and_codes_are_searched_alike(shop, tmp_path):
    done(f"index {shop.model} {shop.codes} --out {tmp_path}/index.lists")
    search = f"search {shop.model} {{}} {shop.queries} -k 80"
    for path in (tmp_path / "index.lists", shop.codes):
        assert answer(search.format(path)) == answer(search.format(shop.index))


@pytest.mark.parametrize("kind", ["fastscan", "ivf"])
def test_exports_are_for_plain_faiss(shop, tmp_path, kind):
    done(f"index {shop.model} {shop.codes} --kind {kind} --out {tmp_path}/x.faiss")
    assert faiss.read_index(f"{tmp_path}/x.faiss").ntotal == ITEMS
    result = gpq(f"search {shop.model} {tmp_path}/x.faiss {shop.queries}")
    wanted = {"fastscan": "a FastScan index for plain Faiss", "ivf": "an inverted file"}[kind]
    assert (result.exit_code, wanted in result.stderr) == (1, True)


def test_ids_and_names_of_files_are_those_of_results(shop, tmp_path):
    ids = np.arange(ITEMS)[::-1] * 3 + (1 << 40)
    np.save(tmp_path / "ids.npy", ids)
    (tmp_path / "names.txt").write_text("".join(f"item {row}\n" for row in range(ITEMS)))
    read = f"--read ids={tmp_path}/ids.npy --read names={tmp_path}/names.txt"
    done(f"encode {shop.model} {shop.data} {read} --out {tmp_path}/codes.h5")
    done(f"index {shop.model} {tmp_path}/codes.h5 --out {tmp_path}/index.faiss")
    for query in answer(f"search {shop.model} {tmp_path}/index.faiss {shop.queries} -k 5")[
        "queries"
    ]:
        rows = [ids.tolist().index(item) for item in query["ids"]]
        assert query["names"] == [f"item {row}" for row in rows]


def test_search_in_json(shop):
    document = answer(f"search {shop.model} {shop.index} {shop.queries} -k 5")
    assert set(document) == {"k", "codebooks_fingerprint", "description", "queries"}
    assert (document["k"], document["description"]) == (5, f"{ITEMS} items")
    for i, query in enumerate(document["queries"]):
        assert set(query) == {"id", "name", "ids", "scores", "labels"}
        assert query["scores"] == sorted(query["scores"], reverse=True)
        # Well separated clusters: the neighbours of a query are of its class.
        assert {item % 3 for item in query["ids"]} == {i % 3}


def test_search_as_a_table(shop):
    search = f"search {shop.model} {shop.index} {shop.queries} -k 5"
    table = done(search).splitlines()
    assert table[0].split() == ["query", "rank", "id", "score", "labels"]
    rows = [line.split() for line in table if line.split() and line.split()[0].isdigit()]
    assert [int(row[2]) for row in rows] == [i for ids in ids_of(search) for i in ids]


def test_search_into_a_file(shop, tmp_path):
    search = f"search {shop.model} {shop.index} {shop.queries} --format json"
    assert done(f"{search} --out {tmp_path}/results.json") == ""
    assert (tmp_path / "results.json").read_text() == done(search)


def test_every_form_of_queries_gives_the_same(shop, tmp_path):
    queries = np.load(shop.queries)
    np.savez(tmp_path / "queries.npz", features=queries)
    with h5py.File(tmp_path / "queries.h5", "w") as file:
        file["features"] = queries
    search = f"search {shop.model} {shop.index}"
    for form in (f"{tmp_path}/queries.npz", f"{tmp_path}/queries.h5", f"features:{shop.queries}"):
        assert ids_of(f"{search} {form}") == ids_of(f"{search} {shop.queries}")


@pytest.mark.parametrize("option", ["--allow-ids", "--deny-ids"])
@pytest.mark.parametrize("name", ["ids.npy", "ids.txt"])
def test_lists_of_ids_filter(shop, tmp_path, option, name):
    search = f"search {shop.model} {shop.index} {shop.queries} --threads 1"
    np.save(tmp_path / "ids.npy", np.arange(0, ITEMS, 3))
    (tmp_path / "ids.txt").write_text("".join(f"{i}\n" for i in range(0, ITEMS, 3)))
    expected = [
        [i for i in ids if (i % 3 == 0) == (option == "--allow-ids")][:9]
        for ids in ids_of(f"{search} -k {ITEMS}")
    ]
    assert ids_of(f"{search} -k 9 {option} {tmp_path}/{name}") == expected


def test_minimum_score(shop):
    search = f"search {shop.model} {shop.index} {shop.queries}"
    every = answer(f"{search} -k {ITEMS}")["queries"]
    limit = float(np.median([query["scores"][5] for query in every]))
    expected = [query["ids"][: sum(s >= limit for s in query["scores"])] for query in every]
    assert ids_of(f"{search} --min-score {limit}") == expected
    assert done(f"{search} --min-score 1e6").strip() == "no item was found"
    assert ids_of(f"{search} --min-score -inf") == [query["ids"] for query in every]


def test_changes_of_a_service_are_searched_described_and_indexed(shop, tmp_path):
    path = shutil.copy(shop.index, tmp_path / "index.faiss")
    search = f"search {shop.model} {path} {shop.queries} -k 3"
    first = ids_of(search)[0][0]
    with ChangeWriter(path, 2, open_index(path).fingerprint) as writer:
        writer.write({first: (None, None, None)})
    assert all(first not in ids for ids in ids_of(search))
    assert answer(f"info {path}")["changed_items"] == 1
    done(f"index {shop.model} {path} --out {tmp_path}/new.faiss")
    assert answer(f"info {tmp_path}/new.faiss")["ntotal"] == ITEMS - 1


def test_features_are_used_again(shop, tmp_path):
    encode = f"encode {shop.model} {shop.data} --labels {shop.labels} --out {tmp_path}/codes.h5"
    times = []
    for _ in range(2):
        done(encode)
        times.append((tmp_path / "features.h5").stat().st_mtime_ns)
        (tmp_path / "codes.h5").unlink()
    assert times[0] == times[1]


def test_features_are_not_kept(shop, tmp_path):
    done(f"encode {shop.model} {shop.data} --out {tmp_path}/codes.h5 --no-features --batch-size 32")
    assert [path.name for path in tmp_path.iterdir()] == ["codes.h5"]


def test_evaluate_in_json(shop, tmp_path):
    evaluate = f"evaluate {shop.model} {shop.data} --labels {shop.labels} --protocol 1"
    document = answer(f"{evaluate} --compare pq,float --plot {tmp_path}/pr.png")
    keys = {
        "map",
        "bits",
        "protocol",
        "split_hash",
        "data",
        "model_fingerprint",
        "notes",
        "versions",
    }
    assert keys <= set(document)
    assert (document["map"] > 0.9, document["bits"], document["protocol"]) == (True, 16, "1")
    assert set(document["compared"]) == {"pq", "float"}
    assert document["neighbour_recall"]["queries"] == document["n_queries"]
    with Image.open(tmp_path / "pr.png") as image:
        assert image.format == "PNG"


@pytest.mark.parametrize(
    ("form", "mark"), [("table", "queries,"), ("markdown", "|"), ("latex", "tabular")]
)
def test_evaluate_as_a_table(shop, form, mark):
    evaluate = f"evaluate {shop.model} {shop.data} --labels {shop.labels} --protocol 1"
    text = done(f"{evaluate} --format {form}")
    figure = f"{answer(evaluate)['map']:.4f}"
    assert all(part in text for part in ("gpq (paper)", "mAP", mark, figure))


def test_evaluate_as_csv(shop):
    evaluate = f"evaluate {shop.model} {shop.data} --labels {shop.labels} --protocol 1"
    head, row = done(f"{evaluate} --format csv").splitlines()[:2]
    figures = dict(zip(head.split(","), row.split(","), strict=True))
    assert figures["mAP"] == str(answer(evaluate)["map"])
    assert re.fullmatch(r"0\.\d+|1\.0", figures["NN10@100"])


@pytest.mark.parametrize("protocol", ["1 --queries 17-per-class", "2", "transfer", "transfer:0,3"])
def test_every_protocol_trains_and_evaluates(shop, tmp_path, protocol):
    features, labels = clusters(400)
    labels = np.where(np.arange(400) % 4 == 3, 3, labels)
    np.savez(tmp_path / "x.npz", features=features, labels=labels)
    settings = f"--config {shop.settings} --set training.steps=5 --preset paper --labelled 0.5"
    done(f"train {tmp_path}/x.npz {settings} --protocol {protocol} --out {tmp_path}/model")
    name = protocol.split(maxsplit=1)[0]
    document = answer(f"evaluate {tmp_path}/model {tmp_path}/x.npz --protocol {name}")
    assert (document["protocol"], 0 < document["map"] <= 1) == (name, True)
    classes = json.loads((tmp_path / "model" / "config.json").read_text())["class_names"]
    assert len(classes) == {"1": 4, "2": 3, "transfer": 3, "transfer:0,3": 2}[name]


def test_names_of_files_that_are_no_text_are_shown(shop, tmp_path, monkeypatch):
    monkeypatch.setattr(
        logging.root.manager, "disable", logging.CRITICAL
    )  # xdist does not send them
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    os.makedirs(folder)
    photo = shutil.copy(shop.photo, os.fsdecode(os.fsencode(folder) + b"/\xff.png"))
    encode = ["encode", shop.image_model, f"folder:{folder}", "--out", f"{folder}/codes.h5"]
    assert "caf\\xe9/codes.h5" in done(*encode)
    search = ["search", shop.image_model, shop.image_index, photo, "-k", 1]
    assert "\\xff.png" in done(*search)
    done(*search, "--out", tmp_path / "out.txt")
    assert "\\xff.png" in (tmp_path / "out.txt").read_text()


def test_device_that_is_missing_is_one_line(shop):
    result = gpq(*fill("search MODEL INDEX QUERIES --device cuda:9", shop))
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
