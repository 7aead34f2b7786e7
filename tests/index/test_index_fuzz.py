"""A short run of the harness; ``python tests/index/fuzz.py`` runs 10,000 cases."""

from __future__ import annotations

from fuzz import mutate, run


def test_mutated_files_neither_crash_nor_hang() -> None:
    outcome = run(300)
    assert outcome.failed == []
    assert outcome.read > 20
    assert outcome.refused > 100


def test_a_case_is_made_from_its_number() -> None:
    data = bytes(range(256)) * 20
    assert [mutate(data, case) for case in range(40)] == [mutate(data, case) for case in range(40)]
    assert all(mutate(data, case) != data for case in range(40))
