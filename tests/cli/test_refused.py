"""Unfit options, and outputs that exist: one line before any work, and nothing is touched."""

import pytest
from commands import gpq, only_line, refused, untouched

SEARCH = "search model index.faiss queries.npy"
ENCODE = "encode model features:features.npy --out out"
EVALUATE = "evaluate model features:features.npy --labels labels.npy"
EXPERIMENT = "experiment run table2 digits --out out"


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--bits 50", 2, "50 bits"),
        ("--bits 48 --set quantizer.codebooks=3", 2, "give one of them"),
        ("--bits 12 --set quantizer.codewords=-1", 2, "quantizer.codewords = -1"),
        ("--set quantizer=3", 2, "quantizer = 3: input should be"),
        ("--set training.step=3", 2, "did you mean 'training.steps'?"),
        ("--set training.seed=-1", 2, "training.seed = -1"),
        ("--preset best", 2, "no preset 'best'"),
        ("--set network.backbone=tree", 2, "tree"),
        ("--protocol 3", 2, "3"),
        ("--labelled 0-per-class", 2, "0-per-class"),
        ("--labelled 500-per-class", 1, "class"),
        ("--device abacus", 2, "abacus"),
        ("--resume --overwrite", 2, "give one of them"),
        ("--validate-every 0", 2, "--validate-every"),
        ("--read max_bad=2", 2, "max_bad"),
        ("--read rot=x", 2, "--read 'rot' is unknown: did you mean 'root'?"),
        ("--read ids", 2, "write ids=VALUE"),
        ("--queries 17", 2, "17"),
        ("--queries 300-per-class", 1, "300"),
    ],
)
def test_wrong_training_is_one_line(folder, options, code, message):
    train = "train features:features.npy --labels labels.npy --out out"
    preset = "" if "--preset" in options else "--preset paper"
    with untouched(folder):
        assert message in refused(f"{train} {preset} {options}", code=code)


@pytest.mark.parametrize(
    ("call", "code", "message"),
    [
        ("train features:queries.npy --preset paper --out out", 1, "no item has a label"),
        ("train sounds:x --out out", 2, "sounds"),
        ("train webdataset:none.tar --out out", 1, "none.tar"),
        (f"{ENCODE} --batch-size -1", 2, "--batch-size -1"),
        ("encode model folder:images --out out", 1, "takes features, but"),
        ("encode image-model features:features.npy --out out", 1, "takes images, but"),
        (f"{ENCODE} --ray local --batch-size -1", 2, "--batch-size -1"),
        (f"{EVALUATE} --run a.qrels", 2, "name the run otherwise"),
        (f"{SEARCH} -k 0", 2, "k"),
        (f"{SEARCH} --rows 100", 2, "--rows 100"),
        (f"{SEARCH} --rows 5:2", 2, "--rows 5:2"),
        (f"{SEARCH} --rows 1:2:3:4", 2, "--rows 1:2:3:4"),
        (f"{SEARCH} --format png", 2, "needs --out FILE"),
        (f"{SEARCH} --format parquet", 2, "needs --out FILE"),
        (f"{SEARCH} --out x.png --images folder:images", 1, "a picture needs images"),
        (f"{SEARCH} --device abacus", 2, "abacus"),
        (f"{SEARCH} --allow-ids labels.npy --deny-ids labels.npy", 2, "exclude each other"),
        ("search model index.faiss images/a/0.png", 1, "images"),
        ("search model other.faiss queries.npy", 1, "has other codebooks"),
        ("search model index.faiss features.h5", 1, "was written by gpq encode: give the data"),
        ("search model . queries.npy", 1, "is a folder"),
        ("index model other-codes.h5 --out out", 1, "is of model"),
        ("index model --out out", 2, "Missing argument"),
        ("index model codes.h5 --out codes.h5 --overwrite", 2, "not the output itself"),
        (f"{EVALUATE} -k 0", 2, "k=0"),
        (f"{EVALUATE} --out out.parquet", 2, "'parquet' is not one of 'text', 'json'"),
        (f"{EVALUATE} --protocol 2", 1, "protocol"),
        (f"{EVALUATE} --codes codes.h5 --protocol 1", 2, "leave out --compare and --protocol"),
        ("export images --to numpy --out out", 1, "not a model folder"),
        ("export-encoder model --out out", 2, "end the name in .onnx"),
        ("experiment run table9 digits --out out", 2, "no grid 'table9'"),
        (f"{EXPERIMENT} --bits 12;24", 2, "write numbers with commas"),
        (f"{EXPERIMENT} --bits 13 --methods gpq --labelled 0.1", 2, "13 bits"),
        (f"{EXPERIMENT} --methods pq", 1, "500-per-class"),
        ("fly", 2, "No such command 'fly'"),
    ],
)
def test_wrong_call_is_one_line(folder, call, code, message):
    assert message in refused(*call.split(), code=code)
    assert not [path for path in folder.glob("out*") if path.is_file()]


# Outputs ------------------------------------------------------------------------------------------

STAGES = {
    "encode": "encode model features:features.npy --out out.h5",
    "export-faiss": "export-faiss model --out out.h5",
    "export": "export model --to numpy --out out.h5",
    "index": "index model codes.h5 --out out.h5",
    "search": "search model index.faiss queries.npy --out out.h5",
    "evaluate": f"{EVALUATE} --out out.h5",
    "plot": f"{EVALUATE} --plot out.h5",
    "run": f"{EVALUATE} --run out.h5",
    "export-encoder": "export-encoder model --out out.pt2",
}


@pytest.mark.parametrize("stage", STAGES)
def test_existing_output_is_kept(folder, stage):
    out = folder / STAGES[stage].split()[-1]
    out.write_bytes(b"precious")
    with untouched(folder):
        line = refused(STAGES[stage])
    assert "--overwrite" in line
    assert out.name in line


@pytest.mark.parametrize("out", [".", "..", "/", "n" * 300, "features.npy/x"])
@pytest.mark.parametrize("stage", ["encode", "export", "index", "search", "evaluate"])
def test_impossible_output_is_one_line(folder, stage, out):
    with untouched(folder):
        result = gpq(*STAGES[stage].split()[:-1], out)
    assert result.exit_code in (1, 2), repr(result.exception)
    only_line(result.stderr)
