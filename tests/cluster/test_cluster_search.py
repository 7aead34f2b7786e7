"""Shards held by actors on two nodes answer as one file, whatever dies meanwhile."""

import threading

import numpy as np
import psutil
import pytest
from index_factory import same
from shard_factory import codebooks, make

from gpq_faiss import Allow, MemoryIndex, open_index
from gpq_faiss.cluster.search import ClusterIndex, live_nodes
from gpq_faiss.errors import DataError, MismatchError
from gpq_faiss.indexes.manifest import update_manifest

pytest.importorskip("ray", reason="ray is not installed: pip install 'gpq-faiss[ray]'")
from ray_kills import kill


def pids(index):
    asked = [actor.__ray_call__.remote(lambda _: __import__("os").getpid()) for actor, _ in index._parts]
    return index._ray.get(asked)


def test_two_nodes_answer_as_one_file_whatever_is_killed(nodes, tmp_path):
    made = make(tmp_path, 3, 400, 5, form="ivf")
    with open_index(made.manifest) as one, ClusterIndex(made.manifest, nodes.address) as spread:
        assert (spread.ntotal, spread.width) == (400, one.width)
        assert len(set(pids(spread))) == 2
        for where in (None, Allow(made.ids[::3]), lambda ids: ids % 2 == 0):
            expected = one.search(made.queries, 50, where=where)
            assert same(spread.search(made.queries, 50, where=where), expected)
            expected = one.range_search(made.queries, 0.5, where=where)
            assert same(spread.range_search(made.queries, 0.5, where=where), expected)
        assert same(spread.search(made.queries, 50, nprobe=1), one.search(made.queries, 50, nprobe=1))
        assert np.array_equal(spread.bound(made.queries, 50, 1), one.bound(made.queries, 50, 1))
        item = int(made.ids[7])
        np.testing.assert_array_equal(spread.code_of(item), one.code_of(item))

        expected = one.search(made.queries, 20)
        second = {process.pid for process in nodes.family(nodes.second)}
        (killed,) = second.intersection(pids(spread))
        kill(killed)
        assert same(spread.search(made.queries, 20), expected)
        nodes.kill_second()  # where the same actor is again
        assert same(spread.search(made.queries, 20), expected)
        nodes.two()
        with ClusterIndex(made.manifest, nodes.address) as again:  # the node that joined has its part
            assert same(again.search(made.queries, 20), expected)
            assert len(live_nodes(again._ray)) == 2
            assert len(again._parts) == 2


def test_a_shard_that_is_missing_or_of_another_model_is_named(nodes, tmp_path):
    made = make(tmp_path, 7, 100, 3)
    other = MemoryIndex.build(np.zeros((3, 2), np.uint8), codebooks(5), np.arange(3))
    other.save(tmp_path / "shards" / "1.faiss", overwrite=True)
    with pytest.raises(MismatchError, match=r"shards/1\.faiss is of another model"):
        ClusterIndex(made.manifest, nodes.address, workers=1)
    (tmp_path / "shards" / "1.faiss").unlink()
    with pytest.raises(DataError, match=r"shards/1\.faiss is missing"):
        ClusterIndex(made.manifest, nodes.address, workers=1)


def test_a_shard_is_replaced_while_searches_go_on_and_what_is_no_longer_searched_ends(nodes, tmp_path):
    made = make(tmp_path, 8, 300, 4)
    old, wrong, end = [ClusterIndex(made.manifest, nodes.address, workers=1)], [], threading.Event()
    before = old[0].search(made.queries, 30)

    def ask():
        try:
            while not end.is_set():
                assert same(old[0].search(made.queries, 30), before)
        except Exception as error:
            wrong.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    new = MemoryIndex.build(np.full((5, 2), 7, np.uint8), codebooks(), np.arange(10**8, 10**8 + 5))
    update_manifest(made.manifest, [new.save(tmp_path / "shards" / "new.faiss")], ["shards/0.faiss"])
    now = ClusterIndex(made.manifest, nodes.address, workers=1, timeout=0.5)
    ((actor, _),) = now._parts
    busy = actor.__ray_call__.remote(lambda _: __import__("time").sleep(2))
    with pytest.raises(DataError, match=r"no node answers for the shards shards/.* in 0\.5 s: start nodes"):
        now.search(made.queries, 5)
    now._ray.get(busy)
    now._timeout = old[0]._timeout
    with open_index(made.manifest) as one:
        assert same(now.search(made.queries, 30), one.search(made.queries, 30))
    end.set()
    asking.join()
    assert not wrong
    actors = [psutil.Process(*pids(index)) for index in (*old, now)]
    old.clear()  # as a service leaves it to its last searches
    del actor
    now.close()
    assert not psutil.wait_procs(actors, timeout=30)[1]
