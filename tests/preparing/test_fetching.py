"""Remote files in the cache: what goes wrong on the way, what a stopped run leaves, how much."""

import os

import pytest

from preparing import InputError, remote, sources
from preparing.remote import DownloadCache
from preparing.sources import find_sources
from tests.preparing.hub import Hub

SIZES = (3_000_000, 45_000_000, 1_000_000, 2_000_000)  # the second one takes three requests


@pytest.fixture
def hub(tmp_path):
    """A hub with files of random bytes, whose endings say that they are text."""
    folder = tmp_path / "hub/ORG/NAME"
    folder.mkdir(parents=True)
    for n, size in enumerate(SIZES):
        (folder / f"{n}.txt").write_bytes(os.urandom(size))
    with Hub(tmp_path / "hub") as hub:
        yield hub


def cache_of(hub, folder, limit=1e9):
    """A cache in `folder` for all files of the hub, by the web."""
    web = f"{hub.address}/datasets/ORG/NAME/resolve/main/"
    found = find_sources([f"{web}{n}.txt" for n in range(len(SIZES))])
    return DownloadCache(found, folder, limit)


@pytest.mark.parametrize("fault", ["cut", 429, 500])
def test_what_may_pass_is_tried_again(tmp_path, hub, fault):
    files = cache_of(hub, tmp_path / "cache")
    hub.faults = {fault: 0.3}
    for n in range(len(SIZES)):
        assert files.path(n).read_bytes() == (hub.folder / f"ORG/NAME/{n}.txt").read_bytes()


def test_a_file_is_fetched_from_where_a_stopped_run_left_it(tmp_path, hub):
    path = cache_of(hub, tmp_path / "cache").path(1)
    begun = b"x" * remote.REQUEST_BYTES
    path.write_bytes(begun)
    whole = (hub.folder / "ORG/NAME/1.txt").read_bytes()
    assert cache_of(hub, tmp_path / "cache").path(1).read_bytes() == begun + whole[len(begun) :]


def test_files_are_dropped_when_they_are_done_with(tmp_path, hub):
    cache = tmp_path / "cache"
    files = cache_of(hub, cache, limit=46e6)
    for n in range(len(SIZES)):
        files.path(n)
        assert sum(path.stat().st_size for path in cache.iterdir()) <= 46e6


@pytest.mark.parametrize("size", [5, SIZES[0]])
def test_a_file_that_changed_is_named(tmp_path, hub, size):
    files = cache_of(hub, tmp_path / "cache")
    (hub.folder / "ORG/NAME/0.txt").write_bytes(os.urandom(size))
    with pytest.raises(InputError, match="changed at its source"):
        files.path(0)


def test_shakespeare_that_breaks_off_is_named_and_leaves_no_file(tmp_path, hub, monkeypatch):
    hub.faults = {"cut": 1}
    url = f"{hub.address}/datasets/ORG/NAME/resolve/main/0.txt"
    monkeypatch.setattr(sources, "SHAKESPEARE_URL", url)
    monkeypatch.setattr(sources, "SHAKESPEARE_FILE", tmp_path / "out/shakespeare.txt")
    with pytest.raises(InputError, match="could not be downloaded"):
        sources.shakespeare()
    assert not list((tmp_path / "out").iterdir())
