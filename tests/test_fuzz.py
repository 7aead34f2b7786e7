"""A short run of the harness; ``python tools/fuzz.py`` runs 10,000 cases."""

from __future__ import annotations

import pytest

from tools.fuzz import mutate, run


def test_mutated_files_neither_crash_nor_hang_nor_pass_for_sound() -> None:
    outcome = run(480)
    assert outcome.failed == []
    assert outcome.read > 20
    assert outcome.refused > 100
    assert len(outcome.forms) > 50


def test_a_case_is_made_from_its_number() -> None:
    data = bytes(range(256)) * 20
    for text in (False, True):
        broken = [mutate(data, case, text=text) for case in range(40)]
        assert broken == [mutate(data, case, text=text) for case in range(40)]
        assert all(mutant != data for mutant in broken)


@pytest.mark.parametrize("case", [1310, 8996])
def test_a_case_that_was_a_traceback_once(case: int) -> None:
    """Columns of a damaged Parquet file of different lengths, and a row of a damaged data set without a value."""
    assert run(1, case).failed == []
