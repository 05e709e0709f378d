"""Hostile input, a sample of tests/hostile.py: a sentence or a right result, never a traceback."""

import sys

import pytest

from tests.conftest import run_script


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork and /proc")
def test_hostile_input_is_answered_in_a_sentence():
    result = run_script("-m", "tests.hostile", "--every", 15)
    assert result.returncode == 0, result.stdout + result.stderr
