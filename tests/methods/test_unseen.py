"""Recognising unlabelled items of classes that no label names."""

import numpy as np
import pytest

from gpq_faiss.config import preset
from gpq_faiss.data.base import Reader
from gpq_faiss.data.open import open_data
from gpq_faiss.methods.gpq import build_gpq
from gpq_faiss.methods.unseen import LEAST_AUC, has_unseen_classes, separation

CENTRES = np.random.default_rng(0).normal(size=(40, 16)).astype(np.float32)


def draw(classes, seed):
    """Items of the classes, with noise."""
    noise = np.random.default_rng(seed).normal(size=(len(classes), 16))
    return CENTRES[classes] + noise.astype(np.float32)


LABELLED = np.arange(1200) % 5
Y = np.eye(5, dtype=np.float32)[LABELLED]


@pytest.mark.parametrize("seed", range(3))
def test_a_random_sample_is_not_told_from_the_rest(seed):
    assert separation(draw(LABELLED, seed), Y, draw(LABELLED, seed + 9)) < LEAST_AUC


def test_other_shares_of_the_same_classes_do_not_matter():
    rare = np.minimum(np.random.default_rng(0).geometric(0.4, 4000) - 1, 4)
    assert separation(draw(LABELLED, 0), Y, draw(rare, 1)) < LEAST_AUC


@pytest.mark.parametrize("seed", range(3))
def test_items_of_other_classes_are_recognised(seed):
    assert has_unseen_classes(draw(LABELLED, seed), Y, draw(np.arange(3000) % 10, seed + 9))


def test_items_of_another_source_are_not_of_other_classes(caplog):
    y = np.arange(1200) % 8
    assert separation(draw(y, 0) + 0.5, np.eye(8, dtype=np.float32)[y], draw(y, 9)) == 0.5
    assert "are both of one source" in caplog.text


def test_few_labels_or_many_classes_decide_nothing():
    unlabelled = draw(np.arange(3000) % 10, 1)
    assert separation(draw(LABELLED[:100], 0), Y[:100], unlabelled) == 0.5
    classes = np.arange(1200) % 40
    assert not has_unseen_classes(
        draw(classes, 0), np.eye(40, dtype=np.float32)[classes], 9 - unlabelled
    )


@pytest.mark.parametrize(("setting", "expected"), [("auto", True), (True, True), (False, False)])
def test_codes_are_joint_where_classes_have_no_labels(setting, expected):
    classes = np.concatenate([LABELLED, np.arange(3000) % 10])
    data = open_data(draw(classes, 0), labels=classes)
    settings = {"posterior": {"unseen_classes": setting}, "network": {"hidden": [8]}}
    method = build_gpq(preset("recommended").with_settings(settings), data, 0, 5)
    with Reader(data, 0) as reader:
        method.fit_labels(reader, np.arange(1200), Y, np.arange(1200, 4200))
    assert (method.unseen, method.A == 0, method.entropy_weight > 0) == 3 * (expected,)
    assert (method.pseudo_labels is None) == (expected or len(LABELLED) > 133 * 5)
