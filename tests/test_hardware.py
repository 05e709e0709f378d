"""hardware.py: what it asks of the allocators; more of it is tested where it is used."""

import ast
import os
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT
from training.memory import release


def allocator_settings(**environment):
    """What a process that imports hardware.py asks PyTorch's allocator for, by variable."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    code = (
        "import os, torch, hardware;"
        f" print({{name: os.environ[name] for name in {names} if name in os.environ}})"
    )
    command = [sys.executable, "-c", code]
    return ast.literal_eval(
        subprocess.run(
            command, cwd=ROOT, env=clean | environment, check=True, capture_output=True, text=True
        ).stdout
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PyTorch has them on Linux")
def test_gpu_memory_is_taken_in_segments_that_grow_unless_the_user_says_otherwise():
    assert allocator_settings() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        own = {name: "expandable_segments:False"}
        assert allocator_settings(**own) == own


def test_pytorch_reads_the_allocators_setting_after_it_is_imported():
    code = (
        "import os, torch; os.environ['PYTORCH_ALLOC_CONF'] = 'garbage_collection_threshold:7';"
        " torch._C._accelerator_setAllocatorSettings('expandable_segments:True')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "threshold is invalid" in result.stderr


def test_after_out_of_memory_a_mac_gives_its_memory_back_too(monkeypatch):
    given_back = []
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: given_back.append("mps"))
    release(torch.device("mps"))
    release(torch.device("cpu"))
    assert given_back == ["mps"]
