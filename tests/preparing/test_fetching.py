"""Remote files in the cache: what goes wrong on the way, what a stopped run leaves, how much."""

import os

import pytest

from preparing import InputError, remote
from preparing.remote import DownloadCache
from preparing.sources import find_sources
from tests.conftest import run_script
from tests.preparing.hub import Faults, Hub

pytest.importorskip("aiohttp")
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


def sources(hub):
    """All files of the hub, by the web."""
    web = f"{hub.address}/datasets/ORG/NAME/resolve/main/"
    return find_sources([f"{web}{n}.txt" for n in range(len(SIZES))])


def assert_whole(files, hub):
    """Read all files in order, and compare them with the hub's."""
    for n in range(len(SIZES)):
        assert files.path(n).read_bytes() == (hub.folder / f"ORG/NAME/{n}.txt").read_bytes()


@pytest.mark.parametrize("fault", ["cut", "too_many", "broken"])
def test_what_may_pass_is_tried_again(tmp_path, hub, fault):
    found = sources(hub)
    hub.faults = Faults(**{fault: 0.3}, seed=1)
    assert_whole(DownloadCache(found, tmp_path / "cache", limit=1e9), hub)


def test_a_file_is_fetched_from_where_a_stopped_run_left_it(tmp_path, hub):
    found = sources(hub)
    path = DownloadCache(found, tmp_path / "cache", limit=1e9).path(1)
    begun = b"x" * remote.REQUEST_BYTES
    path.write_bytes(begun)
    whole = (hub.folder / "ORG/NAME/1.txt").read_bytes()
    files = DownloadCache(found, tmp_path / "cache", limit=1e9)
    assert files.path(1).read_bytes() == begun + whole[len(begun) :]


def test_files_are_dropped_when_they_are_done_with(tmp_path, hub):
    cache = tmp_path / "cache"
    files = DownloadCache(sources(hub), cache, limit=46e6)
    for n in range(len(SIZES)):
        files.path(n)
        assert sum(path.stat().st_size for path in cache.iterdir()) <= 46e6


@pytest.mark.parametrize("size", [5, SIZES[0]])
def test_a_file_that_changed_is_named(tmp_path, hub, size):
    found = sources(hub)
    (hub.folder / "ORG/NAME/0.txt").write_bytes(os.urandom(size))
    files = DownloadCache(found, tmp_path / "cache", limit=1e9)
    with pytest.raises(InputError, match="changed at its source"):
        files.path(0)


def test_a_token_does_not_follow_a_redirect_to_another_host(tmp_path, hub):
    hub.token = "hf_secret"
    code = (
        "import sys, pathlib; from preparing import remote, sources;"
        " found = sources.find_sources(['hf://datasets/ORG/NAME/3.txt']);"
        " files = remote.DownloadCache(found, pathlib.Path(sys.argv[1]), 1e9);"
        " print(len(files.path(0).read_bytes()))"
    )
    with Hub(hub.folder) as elsewhere:
        hub.files_at = elsewhere.address.replace("127.0.0.1", "localhost")
        variables = hub.environment | {"HF_TOKEN": hub.token, "NO_PROXY": "localhost,127.0.0.1"}
        result = run_script("-c", code, tmp_path / "cache", **variables)
    assert result.stdout == f"{SIZES[3]}\n", result.stderr
    assert hub.token in hub.tokens
    assert elsewhere.asked and elsewhere.tokens == {""}
