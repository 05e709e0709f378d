"""Remote files as open files: what goes wrong on the way, what a stopped run leaves, how much."""

import os
import time

import pytest

from preparing import fetching
from preparing.errors import InputError
from preparing.fetching import Fetcher
from preparing.inputs import find_sources
from preparing.remote_file import open_source
from tests.preparing.hub import Faults, Hub

pytest.importorskip("aiohttp")
SIZES = (3_000_000, 45_000_000, 1_000_000, 2_000_000)  # the second one takes three parts


@pytest.fixture
def hub(tmp_path):
    """A hub with files of random bytes, whose endings say that they are text."""
    folder = tmp_path / "hub/ORG/NAME"
    folder.mkdir(parents=True)
    for n, size in enumerate(SIZES):
        (folder / f"{n}.txt").write_bytes(os.urandom(size))
    with Hub(tmp_path / "hub") as hub:
        yield hub


def sources(hub):
    """All files of the hub, by the web."""
    web = f"{hub.address}/datasets/ORG/NAME/resolve/main/"
    return find_sources([f"{web}{n}.txt" for n in range(len(SIZES))])


def content(hub, n):
    """What file number n holds."""
    return (hub.folder / f"ORG/NAME/{n}.txt").read_bytes()


@pytest.mark.parametrize("fault", ["cut", "too_many", "broken"])
def test_what_may_pass_is_tried_again(tmp_path, hub, fault):
    found = sources(hub)
    hub.faults = Faults(**{fault: 0.3}, seed=1)
    with Fetcher(found, tmp_path / "cache", limit=1e9) as files:
        for n, source in enumerate(found):
            with files.open(source) as file:
                assert file.read() == content(hub, n)
    assert "fetched 51 MB" in files.status()


def test_a_stopped_run_leaves_the_beginning_of_a_file(tmp_path, hub):
    found = sources(hub)
    hub.bytes_a_second = 40_000_000
    with Fetcher(found, tmp_path / "cache", limit=1e9) as files:
        while files.have.get(1, 0) < fetching.PART:
            time.sleep(0.01)
    left = sum(path.stat().st_size for path in (tmp_path / "cache").iterdir())
    assert fetching.PART <= left < sum(SIZES)
    hub.bytes_a_second = 0
    with Fetcher(found, tmp_path / "cache", limit=1e9) as files:
        for n, source in enumerate(found):
            with files.open(source) as file:
                assert file.read() == content(hub, n)
    assert files.fetched == sum(SIZES) - left


def test_files_are_dropped_when_they_are_done_with(tmp_path, hub):
    found = sources(hub)
    cache = tmp_path / "cache"
    with Fetcher(found, cache, limit=46e6) as files:
        for n, source in enumerate(found):
            with files.open(source) as file:
                assert file.read() == content(hub, n)
            assert sum(path.stat().st_size for path in cache.iterdir()) <= 46e6
        files.release(len(found))
        assert list(cache.iterdir()) == []


def test_nothing_is_fetched_far_beyond_what_is_enough(tmp_path, hub):
    found = sources(hub)
    with Fetcher(found, tmp_path / "cache", limit=1e9, enough=1e6) as files:
        with files.open(found[0]) as file:
            file.read()
        time.sleep(0.5)
        assert files.have == {0: SIZES[0]}
        with files.open(found[3]) as file:  # asked for, so all before it come too
            assert file.read() == content(hub, 3)


def test_the_end_of_a_file_is_there_before_its_middle(hub):
    source = sources(hub)[1]
    with open_source(source) as file:
        file.seek(-100, os.SEEK_END)
        assert file.read() == content(hub, 1)[-100:]
    asked = [path for path in hub.asked if path.endswith("/1.txt")]
    assert len(asked) == 1 and hub.asked[asked[0]] < 5


def test_a_file_that_became_shorter_is_named(tmp_path, hub):
    found = sources(hub)
    (hub.folder / "ORG/NAME/0.txt").write_bytes(b"short")
    files = Fetcher(found, tmp_path / "cache", limit=1e9)
    with files, pytest.raises(InputError, match="changed at its source"):
        files.open(found[0]).read()
