"""formats/address.py: what failed at an address, in words."""

import pytest

from formats import address

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")


def test_a_web_address_that_nobody_answers_at_says_so():
    with pytest.raises(FileNotFoundError) as failure:
        fsspec.filesystem("http").info("http://127.0.0.1:1/x.txt")
    assert "Cannot connect to host" in address.short(failure.value)
