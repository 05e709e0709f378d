"""formats/address.py: what failed at an address, in words."""

import errno
import functools
import http.server
import os
import threading

import pytest

from formats import address
from formats.address import AddressError, Folder, without_credentials
from formats.files import error_message

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")


def test_a_web_server_lists_names_without_sizes(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "state.json").write_text("{}")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        there = address.Folder(f"http://127.0.0.1:{server.server_port}/run")
        assert there.list() == {"state.json": 0} and there.read("state.json") == b"{}"
        server.shutdown()


def test_credentials_are_left_out_of_what_is_recorded():
    for given, expected in (
        ("https://me:p@ss@host/a.txt", "https://host/a.txt"),
        (
            "https://host/a?id=1&X-Amz-Signature=ab%2F&x=2",
            "https://host/a?id=1&X-Amz-Signature=...&x=2",
        ),
        ("https://host/a?token=ab#part", "https://host/a?token=...#part"),
        ("s3://key:secret@bucket/a", "s3://bucket/a"),
        ("hf://datasets/ORG/NAME@refs/convert/parquet/a.parquet", None),
        ("hf://gpt2@main/a", None),
        ("https://host/a?design=3&author=me&monkey=1&assignment=2&key=b", None),
        ("https://host/a?accessToken=ab&api_key=c", "https://host/a?accessToken=...&api_key=..."),
        ("https://host/~me@home/a.txt?download=true", None),
        ("texts/me@home?token=a.txt", None),
    ):
        assert without_credentials(given) == (expected or given)


def test_a_web_address_that_nobody_answers_at_says_so():
    with pytest.raises(FileNotFoundError) as failure:
        fsspec.filesystem("http").info("http://127.0.0.1:1/x.txt")
    assert "Cannot connect to host" in error_message(failure.value)


def test_a_folder_that_cannot_be_read_is_not_empty(tmp_path, monkeypatch):
    """As a mount that has gone: to begin a run anew would end in two runs under one name."""
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(address, "PAUSES", ())

    def gone(path):
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected", path)

    monkeypatch.setattr(os, "scandir", gone)
    with pytest.raises(AddressError, match="not connected"):
        Folder(str(tmp_path / "run")).list()


def test_a_folder_that_does_not_exist_is_empty(tmp_path):
    assert Folder(str(tmp_path / "none")).list() == {}
