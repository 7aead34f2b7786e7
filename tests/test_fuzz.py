"""A short run of the harness; ``python tools/fuzz.py`` runs 10,000 cases."""

from tools.fuzz import mutate, run


def test_mutated_files_neither_crash_nor_hang_nor_pass_for_sound():
    outcome = run(496)
    assert outcome.failed == []
    assert outcome.read > 20
    assert outcome.refused > 100
    assert len(outcome.forms) > 50


def test_a_case_is_made_from_its_number():
    data = bytes(range(256)) * 20
    for text in (False, True):
        broken = [mutate(data, case, text=text) for case in range(40)]
        assert broken == [mutate(data, case, text=text) for case in range(40)]
        assert all(mutant != data for mutant in broken)
