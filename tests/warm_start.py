"""Scripts in processes that begin with all imported, which takes three seconds with PyTorch.

multiprocessing's fork server imports it once. Each process is a fork of that one, in which the
script then runs as its own main program: for tests of what a script says and writes, and of what
signals, kills and other processes do to it. What happens while Python starts is tested with a
Python of its own.
"""

import gc
import io
import multiprocessing
import os
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPTS = ("train.py", "generate.py", "prepare_data.py")
if sys.platform == "linux":  # Windows has no fork, and macOS none that is safe
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            *("train", "generate", "prepare_data", "tools.evaluate"),
            *("torch._dynamo", "s3fs", "awkward", "tests.tables"),  # imported late, or computed
        ]
    )
started = {}  # process id: the test that started it, and its command


def suits(command: list[str]) -> bool:
    """True if a command is one of ours, and can be run so."""
    ours = Path(command[0]).name in SCRIPTS
    ours |= command[0] == "-m" and command[1].startswith("tools.")
    return ours and sys.platform == "linux"


class Process:
    """`python *command` in a fork, with what tests use of a subprocess.Popen.

    variables: added to the environment, which libraries that are imported already do not read.
    handlers: {signal: SIG_IGN or SIG_DFL}, as a shell may have set them.
    """

    def __init__(self, command, cwd: Path, stdin: str = "", variables=(), handlers=()):
        self.args = [str(word) for word in command]
        self.folder = tempfile.TemporaryDirectory()
        self.out, self.err = Path(self.folder.name, "out"), Path(self.folder.name, "err")
        self.out.touch()  # it may be killed before it writes
        self.err.touch()
        given = (cwd, os.environ | dict(variables), dict(handlers), stdin, self.out, self.err)
        self.process = context.Process(target=work, args=(self.args, *given))
        self.process.start()
        self.pid = self.process.pid
        started[self.pid] = f"{os.environ.get('PYTEST_CURRENT_TEST')}: {shlex.join(self.args)}"

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for it; returns what it wrote to stdout and stderr."""
        self.wait(timeout)
        with self.folder:
            return self.out.read_text("utf-8"), self.err.read_text("utf-8")

    def complete(self, timeout: float | None = None) -> subprocess.CompletedProcess:
        """Wait for it; returns it as subprocess.run does, with its output as text."""
        texts = self.communicate(timeout)
        return subprocess.CompletedProcess(self.args, self.returncode, *texts)

    def send_signal(self, signum: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    command: list[str], cwd: Path, timeout: float, stdin: str = "", variables=()
) -> subprocess.CompletedProcess:
    """Run `python *command` to its end."""
    process = Process(command, cwd, stdin, variables)
    try:
        return process.complete(timeout)
    finally:
        process.kill()


def work(
    command: list[str],
    cwd: Path,
    environment: dict,
    handlers: dict,
    stdin: str,
    out: Path,
    err: Path,
) -> None:
    """The life of such a process."""
    gc.freeze()  # else each collection looks at all that PyTorch is made of
    os.environ.clear()
    os.environ.update(environment)
    for fd, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY), fd)
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode(errors="surrogateescape")))
    os.chdir(cwd)
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    kind, *rest = command
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = command[:1] + rest[1:]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = command
        runpy.run_path(kind, run_name="__main__")
