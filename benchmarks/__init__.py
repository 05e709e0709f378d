"""What backs every number in README.md, run as `python -m benchmarks.NAME`. Results go to results/
as JSON, with the machine that they are of.
"""

import contextlib
import json
import platform
import subprocess
from pathlib import Path

import torch

import hardware

RESULTS = Path(__file__).parent / "results"


def machine(device: torch.device) -> dict:
    """What numbers are of: device, processor and PyTorch; of a GPU also CUDA and the driver."""
    of = {
        "device": hardware.describe(device),
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        of |= {"cuda": torch.version.cuda, "driver": None}
        with contextlib.suppress(OSError, IndexError):
            of["driver"] = subprocess.run(
                ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                capture_output=True,
                text=True,
            ).stdout.split()[0]
    return of


def write(name: str, device: torch.device, result: dict) -> Path:
    """Write a result, with its machine, to results/NAME_DEVICE.json and say so."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}_{device.type}.json"
    path.write_text(json.dumps(machine(device) | result, indent=1) + "\n")
    print(f"written to {path}")
    return path
