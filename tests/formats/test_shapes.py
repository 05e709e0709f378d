"""formats/shapes.py: a model without its weights."""

import torch

from formats.shapes import ShapesAlone, without_weights
from model import GPTConfig
from tests.conftest import run_script


def test_a_model_of_shapes_alone_imports_no_compiler():  # which takes a second of each start
    code = "import sys; from formats.shapes import *; without_weights(GPTConfig(97, arch='llama'));"
    result = run_script("-c", f"{code} print('torch._dynamo' in sys.modules)")
    assert result.stdout == "False\n", result.stderr


def test_a_model_of_shapes_alone_has_whatever_it_computes():
    with ShapesAlone():
        layer, slopes = torch.nn.Linear(2, 3), torch.tensor([0.5, 0.25])
    assert layer.weight.is_meta
    assert slopes.tolist() == [0.5, 0.25]
    assert without_weights(GPTConfig(97, arch="llama")).rotary[0].max() == 1
