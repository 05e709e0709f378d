"""What a script does before its slow imports: PyTorch takes seconds to import.

Knows neither PyTorch nor what the scripts do.
"""

import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

# Turns for which PyTorch's threads (libgomp's, on Linux) spin while they wait for each other,
# before they sleep. With its default of 300,000 a step beside busy programs takes several times as
# long: they spin on the core that the thread they wait for could have. 20,000 cost 2 to 4% where
# all is quiet, no turns a sixth, and beside busy programs these are faster (docs/results.md).
SPIN, SPIN_SHARED = 20_000, 1_000

PACKAGES = ("numpy", "tiktoken", "tokenizers", "tqdm")  # that each script needs
ROOT = Path(__file__).parent

before = {}  # what was called at each signal
chosen = {}  # what was decided for the threads of this process


def begin(*packages: str) -> None:
    """Ctrl-C and SIGTERM end the script quietly from here on, and threads wait as suits the load.

    packages: what it needs beside PACKAGES; a missing one ends it with a sentence.

    libgomp reads its variables once, when it is loaded. What a user has chosen counts more.
    """
    require([*PACKAGES, *packages])
    for signum in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(signum) != signal.SIG_IGN:  # as in the background of a shell
            before[signum] = signal.signal(signum, leave)
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        chosen["asleep"] = shared()
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_SHARED if chosen["asleep"] else SPIN)


def require(packages: list[str]) -> None:
    """Ends the script with a sentence where one of them is not installed."""
    missing = [name for name in packages if not importlib.util.find_spec(name)]
    if not missing:
        return
    print(
        f"{Path(sys.argv[0]).name}: {sys.executable} has no {', '.join(missing)}; install what is"
        " missing:\n  pip install -r requirements.txt -c constraints.txt",
        file=sys.stderr,
    )
    filled = [path for path in ROOT.glob(".venv/*/python*") if path.stem == "python"]
    if filled:
        print(
            f"or use {filled[0].relative_to(ROOT)}, which has what make installed", file=sys.stderr
        )
    sys.exit(2)


def waits_asleep() -> bool:
    """Whether threads soon sleep while they wait, because other programs kept the CPU busy."""
    return chosen.get("asleep", False)


def end() -> None:
    """The script is ready to handle signals in its own way."""
    for signum, handler in before.items():
        signal.signal(signum, handler)


def done() -> None:
    """All is written: a signal in the moments that Python takes to end does not change the status.

    Python would give signals back to the system there, which ends the process by them.
    """
    for signum in before:
        signal.signal(signum, signal.SIG_IGN)


def leave(signum, frame):
    """End with the status that the scripts have for the signal later; there is nothing to save."""
    os._exit(128 + signum)


def shared() -> bool:
    """Whether other programs want so many cores all the time that too few are left for ours.

    Looks for a twentieth of a second. False where the system does not tell, as outside of Linux.
    """
    try:
        ours = len(os.sched_getaffinity(0))
        others = []
        for _ in range(10):
            runnable = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
            others.append(int(runnable) - 1)  # this process runs as well
            time.sleep(0.005)
    except (OSError, AttributeError):
        return False
    return min(others) + ours > os.cpu_count()
