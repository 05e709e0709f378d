"""Sets what PyTorch reads when it is imported, before a test's modules import it."""

import os

import startup

startup.tune_environment()  # as the scripts do
# Models this small gain nothing from a second thread, and processes side by side lose.
os.environ["OMP_NUM_THREADS"] = "1"
