"""Unfit options, and outputs that exist: one line before any work, and nothing is touched."""

import os
import shutil
import stat

import pytest
from commands import STAGES, TRAIN, fill, gpq, only_line, refused, stage_call, untouched

# Exit code, call, and what the line says beside the call.
REFUSED = """
2 train DATA --bits 50
2 train DATA --bits 48 --set quantizer.codebooks=3
2 train DATA --set quantizer.codewords=-1 --bits 12
2 train DATA --set quantizer=3 --bits 12                  | quantizer = 3: input should be
2 train DATA --set training.step=3
2 train DATA --seed -1
2 train DATA --preset best
2 train DATA --set network.backbone=tree
2 train DATA --protocol 3
2 train DATA --labelled 0-per-class
1 train DATA --labelled 500-per-class                     | class
2 train DATA --device abacus
2 train DATA --resume --overwrite
2 train DATA --validate-every 0
2 train DATA --read max_bad=2                             | give a fraction
2 train DATA --queries 17                                 | --queries 17: write N-per-class, or name a file
1 train DATA --queries 300-per-class                      | --queries 300-per-class needs more: lower it
2 train DATA --queries 5-per-class --protocol 2           | only protocol 1 takes queries
1 train features:QUERIES                                  | no item has a label
2 train sounds:x
2 train ""
1 train webdataset:none.tar                               | none.tar not found
2 train digits --read vectors=x                           | --read vectors does not apply to digits
1 train http://127.0.0.1:1/x.npy                          | cannot be read
2 encode MODEL DATA --batch-size -1
2 encode MODEL DATA --read rot=x
2 encode MODEL DATA --read root
2 encode MODEL DATA --labels x --read labels=x
1 encode MODEL folder:IMAGES                              | takes features, but
1 encode IMAGE_MODEL DATA                                 | takes images, but
2 search MODEL INDEX QUERIES -k 0
2 search MODEL INDEX QUERIES -k 100000
2 search MODEL INDEX QUERIES --rows 100
2 search MODEL INDEX QUERIES --rows ::0
2 search MODEL INDEX QUERIES --rows 5:2
2 search MODEL INDEX QUERIES --rows 1:2:3:4
2 search MODEL INDEX QUERIES --format png
1 search MODEL INDEX QUERIES --format png --out x.png --images folder:IMAGES     | is not the data of the index
1 search IMAGE_MODEL IMAGE_INDEX PHOTO --format png --out x.png --images DATA -k 2 | a picture needs images
2 search MODEL INDEX QUERIES --threads 0
2 search MODEL INDEX QUERIES --device abacus
2 search MODEL INDEX QUERIES --min-score nan
2 search MODEL INDEX QUERIES --min-score 1 -k 5
2 search MODEL INDEX QUERIES --allow-ids x --deny-ids x
1 search MODEL INDEX PHOTO                                | images
1 search MODEL OTHER_INDEX QUERIES                        | codebooks
1 search MODEL INDEX VECTORS                              | the data of the queries
1 index MODEL OTHER_CODES                                 | model
1 index MODEL OTHER_VECTORS                               | model
1 search MODEL . QUERIES                                  | is a folder
2 evaluate MODEL DATA --labels LABELS -k 0
2 evaluate MODEL DATA --labels LABELS --plot plot.doc
1 evaluate MODEL DATA --labels LABELS --protocol 2        | protocol
2 evaluate MODEL DATA --labels LABELS --codes CODES --protocol 1 | leave out --compare and --protocol
2 evaluate encoder.onnx DATA --labels LABELS              | encodes queries only
2 encode MODEL DATA --ray local --batch-size -1           | must be positive
2 index MODEL                                             | nothing to index
2 export MODEL --to numpy --factory PQ6x4
2 export MODEL --to factory --factory PQ8                 | PQ4x4
1 export IMAGES --to numpy                                | not a model folder
2 export-encoder MODEL                                    | end the name in .onnx
2 experiment run table9 digits                            | no grid 'table9'
2 experiment run table2 digits --bits 12;24               | write whole numbers with commas
2 experiment run table2 digits --bits 13 --methods gpq --labelled 0.1 | 13 bits
2 experiment run table2 digits --seeds 100000000000000000000 | seeds.0 = 100000000000000000000:
2 experiment run table2 digits --queries 7                | --queries 7: write N-per-class
1 experiment run table2 digits --methods pq               | 500-per-class
2 experiment run table2 digits --methods gpq-f --labelled 0.1 | nothing to run (gpq-f:
1 experiment run table2 features:none.npy                 | none.npy
2 fly                                                     | No such command 'fly'
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_what_cannot_be_is_one_line(shop, tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    text, _, says = line.partition("|")
    code, _, call = text.strip().partition(" ")
    arguments = fill(call, shop, out=tmp_path / "out")
    if call.startswith("train DATA"):
        arguments += ["--labels", str(shop.labels)]
    if call.startswith("train") and "--preset" not in call:
        arguments += ["--preset", "paper"]
    assert says.strip() in refused(*arguments, code=int(code))
    assert not any(path.is_file() for path in tmp_path.rglob("*") if path.name != "experiment.json")


# Outputs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_an_existing_output_is_kept_and_replaced_only_by_a_whole_one(shop, tmp_path, stage):
    call, out = stage_call(stage, shop, tmp_path)
    out.mkdir() if stage == "train" else out.write_bytes(b"precious")
    with untouched(tmp_path, shop.root):
        line = refused(*call)
        assert "--overwrite" in line
        assert out.name in line
    out.rmdir() if stage == "train" else out.unlink()
    assert gpq(*call).exit_code == 0
    (tmp_path / "bad.npy").write_bytes(b"")
    swapped = dict.fromkeys(
        map(str, (shop.model, shop.image_model, shop.queries)), f"{tmp_path}/bad.npy"
    )
    swapped[shop.data] = f"features:{tmp_path}/bad.npy"
    with untouched(tmp_path, shop.root):
        refused(*[swapped.get(part, part) for part in call], "--overwrite")
    assert gpq(*call, "--overwrite").exit_code == 0


@pytest.mark.parametrize(
    ("stage", "name", "content"),
    [
        ("encode", "features.h5", b"precious"),
        ("encode", "features.h5", None),  # of another model
    ],
)
def test_what_lies_beside_the_output_is_kept_too(shop, tmp_path, stage, name, content):
    (tmp_path / name).write_bytes(content or shop.other_vectors.read_bytes())
    with untouched(tmp_path, shop.root):
        assert (name if content else "--overwrite") in refused(
            *stage_call(stage, shop, tmp_path)[0]
        )


def test_overwrite_swallows_neither_a_folder_that_is_no_model_nor_its_source(shop, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
    codes = shutil.copy(shop.codes, tmp_path / "codes.h5")
    with untouched(tmp_path):
        train = (
            f"train {shop.data} --labels {shop.labels} {TRAIN} --overwrite --out {tmp_path}/thesis"
        )
        assert "thesis" in refused(train)
        refused(f"index {shop.model} {codes} --out {codes} --overwrite", code=2)


@pytest.mark.parametrize(
    ("call", "option"),
    [
        ("search MODEL INDEX here/queries.npy", "--out here/queries.npy"),
        ("search MODEL INDEX features:here/q*.npy", "--out here/queries.npy"),
        ("search MODEL here/link.faiss QUERIES", "--out here/index.faiss"),
        ("search MODEL INDEX QUERIES --deny-ids here/ids.txt", "--out here/hard.txt"),
        ("evaluate MODEL DATA --read labels=here/labels.txt", "--plot here/labels.png"),
        ("index MODEL CODES here/codes.h5", "--out here/codes.h5"),
        ("export here/codes.h5 --to parquet", "--out here/codes.h5"),
        (f"train features:here/model/own.npy --labels LABELS {TRAIN}", "--out here/model"),
    ],
)
def test_an_input_is_not_replaced(shop, tmp_path, monkeypatch, call, option):
    """By whatever name, and in a folder that is replaced as a whole."""
    monkeypatch.chdir(tmp_path)
    here = tmp_path / "here"
    shutil.copytree(shop.model, here / "model")
    for name in ("queries.npy", "index.faiss", "codes.h5"):
        shutil.copy(shop.root / name, here)
    shutil.copy(shop.queries, here / "model" / "own.npy")
    (here / "ids.txt").write_text("1\n")
    (here / "hard.txt").hardlink_to(here / "ids.txt")
    shutil.copy(shop.labels, here / "labels.txt")
    (here / "labels.png").symlink_to(here / "labels.txt")
    (here / "link.faiss").symlink_to(here / "index.faiss")
    with untouched(here):
        line = refused(*fill(call, shop), *option.split(), "--overwrite", code=2)
    assert f"{option.split()[1]} would be replaced" in line


def test_an_output_may_have_the_name_of_a_word(shop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json").touch()
    assert (
        gpq(
            *fill("search MODEL INDEX QUERIES --format json --out json --overwrite", shop)
        ).exit_code
        == 0
    )


@pytest.mark.parametrize("out", ["", ".", "..", "/", "n" * 300, "pipe"])
@pytest.mark.parametrize("stage", STAGES)
def test_outputs_that_cannot_be_are_one_line(shop, tmp_path, monkeypatch, stage, out):
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    os.mkfifo("pipe")
    call, _ = stage_call(stage, shop, tmp_path)
    with untouched(tmp_path, shop.root):
        result = gpq(*call[:-1], out, "--overwrite")
    assert result.exit_code in {1, 2}, repr(result.exception)
    only_line(result.stderr)
    assert stat.S_ISFIFO(os.lstat("pipe").st_mode)
