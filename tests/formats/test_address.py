"""formats/address.py: folders on web servers and disks, and addresses as they are recorded."""

import errno
import functools
import http.server
import os
import threading
import time

import pytest

from command_line import without_credentials
from formats import address
from formats.address import AddressError, Folder, version_of

pytest.importorskip("fsspec")
aiohttp = pytest.importorskip("aiohttp")


class SlowServer(http.server.SimpleHTTPRequestHandler):
    def copyfile(self, source, outputfile):
        time.sleep(0.3)
        super().copyfile(source, outputfile)


def test_a_web_server_lists_names_without_sizes_and_may_be_slow(tmp_path, monkeypatch):
    # By default a file may take 300 seconds in all, however steadily it arrives.
    monkeypatch.setattr("aiohttp.client.DEFAULT_TIMEOUT", aiohttp.ClientTimeout(total=0.2))
    (tmp_path / "state.json").write_text("{}")
    handler = functools.partial(SlowServer, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        there = Folder(f"http://127.0.0.1:{server.server_port}")
        assert there.list() == {"state.json": 0}
        assert there.read("state.json") == b"{}"
        server.shutdown()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("https://me:p@ss@host/a.txt", "https://host/a.txt"),
        (
            "https://host/a?id=1&X-Amz-Signature=ab%2F&x=2",
            "https://host/a?id=1&X-Amz-Signature=...&x=2",
        ),
        ("https://host/a?sig=b&my_secret=c#d", "https://host/a?sig=...&my_secret=...#d"),
        ("s3://key:secret@bucket/a", "s3://bucket/a"),
        ("https://host/a?accessToken=ab&api_key=c", "https://host/a?accessToken=...&api_key=..."),
        ("hf://gpt2@main/a", None),
        ("https://host/a?compass=3&author=me&monkey=1&assignment=2&key=b", None),
        ("https://host/~me@home/a.txt?download=true", None),
        ("texts/me@home?token=a.txt", None),
        ("no hf://a@b at s3://k:s@host/a?sig=b c@d", "no hf://a@b at s3://host/a?sig=... c@d"),
    ],
)
def test_credentials_are_left_out_of_what_is_recorded(given, expected):
    assert without_credentials(given) == (expected or given)


def test_a_version_is_what_changes_with_the_content_alone():
    assert version_of({"mtime": 5.0, "LastModified": "noon", "ETag": "a1", "size": 3}) == "a1"
    assert version_of({"mtime": 5.0, "ETag": None}) == "5.0"
    assert version_of({"size": 3}) == ""


def test_a_folder_that_cannot_be_read_is_not_empty(tmp_path, monkeypatch):
    """As a mount that has gone: to begin a run anew would end in two runs under one name."""
    monkeypatch.setattr(address, "PAUSES", ())

    def gone(path):
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected", path)

    monkeypatch.setattr(os, "scandir", gone)
    with pytest.raises(AddressError, match="not connected"):
        Folder(str(tmp_path)).list()


def test_a_folder_that_does_not_exist_is_empty(tmp_path):
    assert Folder(str(tmp_path / "none")).list() == {}


@pytest.mark.parametrize("address", ["hf://../x", "hf://a--b/x"])
def test_a_name_that_the_hub_cannot_have_is_no_question_of_permission(address):
    with pytest.raises(AddressError) as caught:
        Folder(address).list()
    assert str(caught.value).startswith(f"{address} cannot be reached: ")
    assert "HF_TOKEN" not in str(caught.value)
