"""Runs a script as `python SCRIPT ARGUMENTS` does, and tells how much memory it took.

    python benchmarks/with_peak.py SCRIPT [ARGUMENT ...]

The last line that it prints is "peak bytes N": on a GPU as PyTorch's allocator counts, else the
resident size. Imports nothing of this project: nanoGPT has modules of the same names.
"""

import resource
import runpy
import sys


def peak_bytes() -> int:
    """The most memory that this process has held."""
    import torch

    on_gpu = torch.cuda.max_memory_allocated()
    return on_gpu or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = ""  # the working directory, as the script's own folder would be
    runpy.run_path(sys.argv[0], run_name="__main__")
    print("peak bytes", peak_bytes())
