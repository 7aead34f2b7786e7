"""Compiled code in files: damaged or unwritable ones never stop a search."""

import numba

from gpq_faiss.compiled import compiled


def test_damaged_or_unwritable_compiled_code_is_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def twice(x):
        return x + x

    def hits():
        made = compiled(twice)
        assert made(4) == 8
        return sum(made.stats.cache_hits.values())

    assert hits() == 0
    assert hits() == 1
    for kind in ("nbi", "nbc"):
        for content in (b"", b"garbage"):
            for file in tmp_path.rglob(f"*.{kind}"):
                file.write_bytes(content)
            assert hits() == 0
            assert hits() == 1
    made = compiled(twice)
    (folder,) = tmp_path.iterdir()
    folder.rename(tmp_path / "elsewhere")
    folder.write_bytes(b"")  # no file can be written below it
    assert made(4) == 8
