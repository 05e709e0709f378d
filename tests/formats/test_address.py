"""formats/address.py: what failed at an address, in words."""

import functools
import http.server
import threading

import pytest

from formats import address

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


def test_a_web_address_that_nobody_answers_at_says_so():
    with pytest.raises(FileNotFoundError) as failure:
        fsspec.filesystem("http").info("http://127.0.0.1:1/x.txt")
    assert "Cannot connect to host" in address.short(failure.value)
