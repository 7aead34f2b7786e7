"""Shards held by actors on two nodes answer as one file, whatever dies meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from shard_factory import Made, codebooks, make, same

from gpq_faiss.cluster.search import ClusterIndex, Holder, Holders
from gpq_faiss.errors import DataError, MismatchError
from gpq_faiss.indexes.filters import Allow
from gpq_faiss.indexes.manifest import update_manifest
from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.indexes.opening import open_index

pytest.importorskip("ray", reason="ray is not installed: pip install 'gpq-faiss[ray]'")
from ray_kills import Nodes, kill


@pytest.fixture(scope="module")
def held(cluster: Nodes) -> Iterator[Holders]:
    holders = Holders(cluster.address)
    yield holders
    holders.close()


@pytest.fixture
def holders(nodes: Nodes, held: Holders) -> Holders:
    """The same actors for all tests, as a service keeps them; two nodes."""
    return held


def pids(index: ClusterIndex) -> list[int]:
    """Of the actors."""
    ray = index._ray
    return [
        ray.get(actor.__ray_call__.remote(lambda self: __import__("os").getpid())) for actor in index._actors
    ]


@pytest.mark.parametrize("form", ["flat", "ivf"])
def test_two_nodes_answer_as_one_file(holders: Holders, tmp_path: Path, form: str) -> None:
    made = make(tmp_path, 3, 400, 5, form=form)
    with open_index(made.manifest) as one, ClusterIndex(made.manifest, holders, replicas=2) as spread:
        assert (spread.ntotal, spread.width) == (400, one.width)
        assert len(set(pids(spread))) == 2
        for where in (None, Allow(made.ids[::3]), lambda ids: ids % 2 == 0):
            for _ in range(2):  # the replicas take turns
                same(spread.search(made.queries, 50, where=where), one.search(made.queries, 50, where=where))
            same(
                spread.range_search(made.queries, 0.5, where=where),
                one.range_search(made.queries, 0.5, where=where),
            )
        same(spread.search(made.queries, 50, nprobe=1), one.search(made.queries, 50, nprobe=1))
        assert np.array_equal(spread.bound(made.queries, 50, 1), one.bound(made.queries, 50, 1))
        item = int(made.ids[7])
        np.testing.assert_array_equal(spread.code_of(item), one.code_of(item))


def test_an_actor_that_is_killed_comes_back(holders: Holders, tmp_path: Path) -> None:
    made = make(tmp_path, 4, 300, 4)
    with open_index(made.manifest) as one, ClusterIndex(made.manifest, holders) as spread:
        expected = one.search(made.queries, 20)
        for _ in range(2):
            kill(pids(spread)[0])
            same(spread.search(made.queries, 20), expected)
        assert not spread.missing


def test_the_shards_of_a_node_that_is_killed_go_to_another(
    nodes: Nodes, holders: Holders, tmp_path: Path
) -> None:
    made = make(tmp_path, 5, 300, 4)
    with open_index(made.manifest) as one, ClusterIndex(made.manifest, holders) as spread:
        expected = one.search(made.queries, 20)
        same(spread.search(made.queries, 20), expected)
        nodes.kill_second()
        same(spread.search(made.queries, 20), expected)
        nodes.two()
        with ClusterIndex(made.manifest, holders, replicas=2) as again:  # the node that joined has its part
            same(again.search(made.queries, 20), expected)
            assert len(holders.nodes()) == 2
            nodes.kill_second()
            same(again.search(made.queries, 20), expected)
            assert not again.missing


def test_an_answer_is_partial_only_where_that_is_asked_for(
    holders: Holders, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = make(tmp_path, 6, 300, 4)
    lost = tmp_path / "shards" / "2.faiss"
    lost.unlink()
    with pytest.raises(DataError, match=r"shards/2\.faiss is missing"):
        ClusterIndex(made.manifest, holders)
    with ClusterIndex(made.manifest, holders, allow_partial=True) as spread:
        found = spread.search(made.queries, 300)[1]
        assert spread.missing == {"shards/2.faiss"}
        assert "without the shards shards/2.faiss" in caplog.text
    update_manifest(made.manifest, [], ["shards/2.faiss"])
    with open_index(made.manifest) as rest:
        n = rest.ntotal
        np.testing.assert_array_equal(found[:, :n], rest.search(made.queries, n)[1])
        assert (found[:, n:] == -1).all()


def test_a_shard_of_another_model_is_named(holders: Holders, tmp_path: Path) -> None:
    made = make(tmp_path, 7, 100, 3)
    other = MemoryIndex.build(np.zeros((3, 2), np.uint8), codebooks(5), np.arange(3))
    other.save(tmp_path / "shards" / "1.faiss", overwrite=True)
    with pytest.raises(MismatchError, match=r"shards/1\.faiss is of another model"):
        ClusterIndex(made.manifest, holders)


def test_a_shard_is_replaced_while_searches_go_on(holders: Holders, tmp_path: Path) -> None:
    made: Made = make(tmp_path, 8, 300, 4)
    wrong: list[Exception] = []
    with ClusterIndex(made.manifest, holders) as old:
        before = old.search(made.queries, 30)
        end = threading.Event()

        def ask() -> None:
            try:
                while not end.is_set():
                    same(old.search(made.queries, 30), before)
            except Exception as error:
                wrong.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        new = MemoryIndex.build(np.full((5, 2), 7, np.uint8), codebooks(), np.arange(10**8, 10**8 + 5))
        update_manifest(made.manifest, [new.save(tmp_path / "shards" / "new.faiss")], ["shards/0.faiss"])
        with ClusterIndex(made.manifest, holders) as now, open_index(made.manifest) as one:
            same(now.search(made.queries, 30), one.search(made.queries, 30))
            end.set()
            asking.join()
    assert not wrong


def test_a_holder_lets_go_of_what_it_is_not_to_keep(tmp_path: Path) -> None:
    made = make(tmp_path, 9, 100, 3)
    from gpq_faiss.indexes.manifest import read_manifest

    manifest, holder = read_manifest(made.manifest), Holder()
    (answer, problems) = holder.answer(manifest, None, 1, "search", (made.queries, 5), {})
    assert not problems
    with open_index(made.manifest) as one:
        same(answer, one.search(made.queries, 5))
    # The budget of another distribution: the shards are opened anew.
    holder.answer(manifest, None, 2, "codebooks", (), {})
    holder.keep(manifest.shards[:1], None, 2)
    assert [key[1:] for key in holder._held] == [(manifest.shards[0], None, 2)]
