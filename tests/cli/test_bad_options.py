"""Outputs that exist or cannot be, and options that cannot be: refused before any work, and nothing is touched."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
from pathlib import Path

import pytest
from commands import Shop, gpq, refused, untouched
from stages import STAGES, TRAIN, fill, stage_call

# Outputs that exist -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_an_existing_output_is_kept_without_overwrite(shop: Shop, tmp_path: Path, stage: str) -> None:
    call, out = stage_call(stage, shop, tmp_path)
    out.mkdir() if stage == "train" else out.write_bytes(b"precious")
    with untouched(tmp_path, shop.root):
        line = refused(*call)
        assert "--overwrite" in line
        assert out.name in line


@pytest.mark.parametrize(
    "beside", [("encode", "features.h5"), ("index", "out.faiss.json"), ("export-faiss", "out.faiss.json")]
)
def test_what_lies_beside_the_output_is_kept_too(shop: Shop, tmp_path: Path, beside: tuple[str, str]) -> None:
    stage, name = beside
    call, _ = stage_call(stage, shop, tmp_path)
    (tmp_path / name).write_bytes(b"precious")
    with untouched(tmp_path, shop.root):
        assert name in refused(*call)


@pytest.mark.parametrize("stage", STAGES)
def test_overwrite_with_bad_input_keeps_the_old_output(shop: Shop, tmp_path: Path, stage: str) -> None:
    call, _ = stage_call(stage, shop, tmp_path)
    assert gpq(*call).exit_code == 0
    bad = tmp_path / "bad.npy"
    bad.write_bytes(b"")
    swapped = {str(shop.data): f"features:{bad}"} | {
        str(path): str(bad) for path in (shop.model, shop.image_model, shop.queries)
    }
    with untouched(tmp_path, shop.root):
        refused(*[swapped.get(str(part), part) for part in call], "--overwrite")
    assert gpq(*call, "--overwrite").exit_code == 0


def test_overwrite_does_not_swallow_a_folder_that_is_no_model(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
    train = ("train", shop.data, "--labels", shop.labels, *TRAIN, "--overwrite")
    with untouched(tmp_path, shop.root):
        assert "thesis" in refused(*train, "--out", tmp_path / "thesis")


def test_a_device_or_a_pipe_is_no_output(shop: Shop, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for stage in ("export-faiss", "encode", "index"):
        call, place = stage_call(stage, shop, tmp_path)
        for more in ((), ("--overwrite",)):
            assert "device or a pipe" in refused(
                *[pipe if str(part) == str(place) else part for part in call], *more
            )
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


@pytest.mark.parametrize("out", ["", ".", "..", "/", "n" * 300])
@pytest.mark.parametrize("stage", STAGES)
def test_outputs_that_are_no_names_are_one_line(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, out: str
) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    call, place = stage_call(stage, shop, tmp_path)
    named = [out if str(part) == str(place) else part for part in call]
    with untouched(tmp_path, shop.root):
        result = gpq(*named, "--overwrite")
        assert isinstance(result.exception, SystemExit), repr(result.exception)
        assert result.exit_code in {1, 2}
        assert result.stderr.startswith("gpq: ")
        assert len(result.stderr.splitlines()) == 1


def test_one_file_as_two_outputs_is_refused(shop: Shop, tmp_path: Path) -> None:
    codes = tmp_path / "codes.h5"
    shutil.copy(shop.codes, codes)
    with untouched(tmp_path):
        refused("index", shop.model, codes, "--out", codes, "--overwrite", code=2)


# Options ------------------------------------------------------------------------------------------------------------------

USAGE = """
train DATA --bits 50
train DATA --bits 48 --set quantizer.codebooks=3
train DATA --set quantizer.codewords=15
train DATA --set quantizer.codewords=-1 --bits 12
train DATA --set training.step=3
train DATA --set training.steps=many
train DATA --set training.steps
train DATA --set training=3
train DATA --set loss.beta=inf
train DATA --seed -1
train DATA --preset best
train DATA --set network.backbone=tree
train DATA --protocol 3
train DATA --labelled 0-per-class
train DATA --labelled 1.5
train DATA --device abacus
train DATA --resume --overwrite
train DATA --validate-every 0
train DATA --read max_bad=2
train DATA --read max_bad=nan
train sounds:x
train ""
encode MODEL DATA --batch-size -1
encode MODEL DATA --device tpu
encode MODEL DATA --read rot=x
encode MODEL DATA --read root
encode MODEL DATA --ids x --read ids=x
search MODEL INDEX QUERIES -k 0
search MODEL INDEX QUERIES -k 100000
search MODEL INDEX QUERIES --rows x
search MODEL INDEX QUERIES --rows 100
search MODEL INDEX QUERIES --rows ::0
search MODEL INDEX QUERIES --format png
search MODEL INDEX QUERIES --threads 0
search MODEL INDEX QUERIES --nprobe 0
search MODEL INDEX QUERIES --nprobe 3 --min-score 1
search MODEL INDEX QUERIES --memory much
search MODEL INDEX QUERIES --memory 1kB
search MODEL INDEX QUERIES --min-score nan
search MODEL INDEX QUERIES --min-score 1 -k 5
search MODEL INDEX QUERIES --allow-ids x --deny-ids x
search MODEL INDEX QUERIES --ray auto,worker=2
search MODEL INDEX QUERIES --ray ,workers=2
search MODEL INDEX QUERIES --ray auto,workers=two
evaluate MODEL DATA --labels LABELS --compare luck
evaluate MODEL DATA --labels LABELS -k 0
evaluate MODEL DATA --labels LABELS --plot plot.doc
index MODEL CODES --memory lots
index MODEL CODES --memory 1MB
export-encoder MODEL
"""


@pytest.mark.parametrize("line", USAGE.strip().splitlines())
def test_an_option_that_cannot_be_is_a_usage_error(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    call = tuple(shlex.split(line))
    arguments = fill(call, shop, tmp_path / "bad", tmp_path / "out")
    if call[0] == "train" and "--labels" not in call and call[1] == "DATA":
        arguments += ["--labels", str(shop.labels)]
    if call[0] == "train" and "--preset" not in call:
        arguments += ["--preset", "paper"]
    with untouched(tmp_path, shop.root):
        refused(*arguments, code=2)
