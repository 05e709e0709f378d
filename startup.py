"""Before the slow imports of a script: PyTorch takes seconds. Knows nothing of what scripts do."""

import atexit
import importlib.util
import os
import signal
import sys
from pathlib import Path

PACKAGES = ("numpy", "tiktoken", "tokenizers", "tqdm")  # that each script needs
SIGNALS = (signal.SIGINT, signal.SIGTERM)

# Turns for which PyTorch's threads (libgomp's) spin while they wait for each other. The default,
# 300,000, keeps them on the core that the thread they wait for needs: next to two busy programs a
# step takes four times as long. 20,000 cost 2 to 4% on a quiet machine.
SPIN = "20000"

handlers = {}  # of each signal, before `begin`


def begin(*packages: str) -> None:
    """From here on Ctrl-C and SIGTERM end the script quietly.

    An older Python, or a missing package, ends it now.
    """
    script, version = Path(sys.argv[0]).name, ".".join(map(str, sys.version_info[:2]))
    if sys.version_info < (3, 11):  # noqa: UP036 - that a user may start it with
        print(f"{script}: this is Python {version}; 3.11 or newer is needed", file=sys.stderr)
        sys.exit(2)
    missing = [name for name in (*PACKAGES, *packages) if not importlib.util.find_spec(name)]
    if missing:
        place = "Scripts/python.exe" if os.name == "nt" else "bin/python"
        python = Path(__file__).parent / ".venv" / place
        advice = "pip install -r requirements.txt -c constraints.txt"
        if python.exists():
            advice += f"\nor use {python}, which has them"
        print(
            f"{script}: {sys.executable} has no {', '.join(missing)}:\n  {advice}", file=sys.stderr
        )
        sys.exit(2)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as with >&-
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    atexit.register(drop_unread)
    for signum in SIGNALS:
        if signal.getsignal(signum) != signal.SIG_IGN:  # as in the background of a shell
            handlers[signum] = signal.signal(signum, lambda signum, _: os._exit(128 + signum))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN)


def drop_unread() -> None:
    """Python flushes stdout as it exits, and prints an exception where its reader has left."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def end() -> None:
    """The script is ready to handle signals in its own way."""
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def done() -> None:
    """All is written: a signal while Python exits changes no status."""
    for signum in handlers:
        signal.signal(signum, signal.SIG_IGN)
