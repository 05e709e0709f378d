"""Scripts in processes that begin with all imported, which takes three seconds with PyTorch.

multiprocessing's fork server imports it once. Each process is a fork of that one, in which the
script then runs as its own main program: for tests of what a script says and writes. What happens
while it starts, or when it is killed, is tested with a Python of its own.
"""

import io
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPTS = ("train.py", "generate.py", "prepare_data.py")
if sys.platform == "linux":  # Windows has no fork, and macOS none that is safe
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["train", "generate", "prepare_data", "tools.evaluate", "torch._dynamo"]
    )


def suits(command: list[str]) -> bool:
    """True if a command is one of ours, and can be run so."""
    ours = command[0] in SCRIPTS or (command[0] == "-m" and command[1].startswith("tools."))
    return ours and sys.platform == "linux"


def run(
    command: list[str], cwd: Path, timeout: float, stdin: str = ""
) -> subprocess.CompletedProcess:
    """Run `python *command` to its end, as subprocess.run does with its output as text."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = context.Process(
            target=work, args=(command, cwd, dict(os.environ), stdin, out, err)
        )
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(command, timeout, out.read_text(), err.read_text())
        texts = out.read_text("utf-8"), err.read_text("utf-8")
        return subprocess.CompletedProcess(command, process.exitcode, *texts)


def work(
    command: list[str], cwd: Path, environment: dict, stdin: str, out: Path, err: Path
) -> None:
    """The life of such a process."""
    os.environ.clear()
    os.environ.update(environment)
    for fd, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), fd)
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode()))
    os.chdir(cwd)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")
