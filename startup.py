"""How a script begins and ends: before its slow imports, and from an error to an exit status.

PyTorch takes seconds to import. Knows nothing of what scripts do.
"""

from __future__ import annotations  # for an older Python, which is to reach begin()

import atexit
import contextlib
import importlib.util
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")  # on Linux; WSL2 has Windows' driver
PACKAGES = ("numpy", "tiktoken", "tokenizers", "tqdm")  # each script needs these
TORCH = (2, 7)  # the first whose torch.accelerator tells whether a GPU is available

# Turns for which PyTorch's threads (libgomp's) spin while they wait for each other. The default,
# 300,000, keeps them on the core that the thread they wait for needs: next to two busy programs a
# step takes four times as long. 20,000 cost 2 to 4% on a quiet machine.
SPIN = "20000"


def begin(*packages: str) -> None:
    """From here on Ctrl-C and SIGTERM end the script quietly, and its streams take all text.

    An older Python, a missing package, or an older PyTorch, ends it now.
    """
    set_up_streams()
    atexit.register(drop_unread)
    signal.signal(signal.SIGINT, leave)
    signal.signal(signal.SIGTERM, leave)
    script, version = Path(sys.argv[0]).name, ".".join(map(str, sys.version_info[:2]))
    if sys.version_info < (3, 11):  # noqa: UP036 - that a user may start it with
        print(
            f"{script}: this is Python {version}; 3.11 or newer is needed. Create the environment"
            " with a newer one, for example: python3.12 -m venv .venv",
            file=sys.stderr,
        )
        sys.exit(2)
    needed = [name for name in (*PACKAGES, *packages) if not importlib.util.find_spec(name)]
    if "torch" in packages and not needed:
        text = Path(importlib.util.find_spec("torch").origin).with_name("version.py").read_text()
        found = re.search(r"__version__ = '((\d+)\.(\d+).*)'", text)
        if found and (int(found[2]), int(found[3])) < TORCH:
            needed = [f"PyTorch {TORCH[0]}.{TORCH[1]} or newer, but {found[1]}"]
    if needed:
        place = "Scripts/python.exe" if os.name == "nt" else "bin/python"
        python = Path(__file__).parent / ".venv" / place
        from command_line import our_file, quote  # an older Python cannot read it

        advice = f"{quote(sys.executable)} -m pip install -r {our_file('requirements.txt')}"
        advice += f" -c {our_file('constraints.txt')}"
        if python.exists() and python.parent != Path(sys.executable).parent:
            advice += f"\nor use {python}, which may have them"
        print(
            f"{script}: {sys.executable} has no {', '.join(needed)}:\n  {advice}", file=sys.stderr
        )
        sys.exit(2)
    tune_environment()


def set_up_streams() -> None:
    """Files and pipes hold UTF-8; a terminal shows as escapes the characters that it cannot show.

    Whatever encoding the system has: Windows' cp1252 lacks most of the world's letters, and file
    names need not be UTF-8. A line is written at once, as a log is read while a run goes on. What
    was closed, as by `<&-`, is empty. Streams of another program, such as a notebook, which would
    end with the script, are an error.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name) or open(os.devnull, mode)  # noqa: SIM115 - to the end
        if not hasattr(stream, "reconfigure"):  # %run in a notebook, IDLE, Spyder
            script = sys.argv[0]
            print(
                f"{script} needs a process of its own: in a notebook write !python {script} ...,"
                " elsewhere use a terminal",
                file=sys.stderr,
            )
            sys.exit(2)
        if not stream.isatty():
            stream.reconfigure(encoding="utf-8")
        if mode == "w":
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
        setattr(sys, name, stream)


class Output:
    """stdout or stderr that drops what it cannot write: its terminal or log file may be gone."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text: str) -> None:
        """Write the text, or drop it if that fails."""
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(text)

    def flush(self) -> None:
        """Flush the stream; a disk that is full now may have room later."""
        with contextlib.suppress(OSError, ValueError):
            self.stream.flush()

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


def leave(signum: int, _) -> None:
    """End the process at once, with the status of a signal."""
    os._exit(128 + signum)


def tune_environment() -> None:
    """Set what PyTorch reads when it is imported, allocates or compiles.

    What the user has set stays.
    """
    # Large pages for tensors of megabytes on Linux: 5% off a CPU's step.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Compile for the instructions that the CPU lists, without building a program to test each one:
    # a quarter off the first compilation. A compiler that lacks them fails, and the run stays
    # uncompiled.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    # GCC 12 turns compiled copies of transposed 16-bit matrices into garbage on a CPU with AMX,
    # unless it leaves this optimization out, which costs no time. The value follows "-march=".
    # PyTorch before 2.13 ignores it.
    if sys.platform == "linux" and os.uname().machine == "x86_64":
        march = "native -fno-tree-slp-vectorize"
        os.environ.setdefault("TORCHINDUCTOR_CPP_MARCH", march)
    # GPU memory in segments that grow: a halved micro-batch leaves no fragments that fit nothing.
    # Only with NVIDIA's own driver: under WSL2 and ROCm the first allocation may fail or hang
    # (github.com/pytorch/pytorch/issues/192330, 192259). The second name is the older one.
    if NVIDIA_DRIVER.exists() and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN)
    # PyTorch's first step makes a folder in the temporary one. Python finds none on full disks, or
    # in a container whose disk is read-only; there Linux has one in memory.
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        place = os.environ.get("TEMP", "/tmp")
        tempfile.tempdir = place if os.access(place, os.W_OK) else "/dev/shm"


def drop_unread() -> None:
    """Python flushes stdout as it exits, and prints an exception if its reader has left."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def end() -> None:
    """The script is ready: from here on Ctrl-C raises KeyboardInterrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.getpid() != 1:  # a container's first process would not get it: it keeps leave()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run(
    name: str,
    main: Callable[[list[str]], int | None],
    explain: Callable[[BaseException], object] = lambda error: None,
    say: Callable[[str], None] = lambda sentence: print(sentence, file=sys.stderr),
) -> int:
    """Call main with the command line. Returns the exit status: what main returns, or 0 for None.

    A UserError is a sentence, which `say` prints in the script's name. explain: what another error
    means; the status is 1, with a traceback if it returns None. Ctrl-C is 130, without a sentence
    if explain has none. A handler of another signal raises KeyboardInterrupt(signum), for 128 +
    signum.
    """
    from command_line import UserError, without_credentials  # an older Python cannot read it

    def tell(sentence):
        say(f"{name}: {without_credentials(str(sentence))}")

    try:
        status = main([with_underscores(word) for word in sys.argv[1:]]) or 0
        sys.stdout.flush()
        return status
    except UserError as error:
        tell(error)
        return error.status
    except BrokenPipeError:  # as with `| head`
        return 0
    except KeyboardInterrupt as stop:
        sentence = explain(stop)
        if sentence is not None:
            tell(sentence)
        return 128 + (stop.args[0] if stop.args else signal.SIGINT)
    except Exception as error:
        if sentence := explain(error):
            tell(sentence)
        else:
            say(traceback.format_exc())
        return 1


def with_underscores(word: str) -> str:
    """--vocab-size and —vocab_size, as chats write --, as --vocab_size; any other word as it is."""
    name, equals, value = word.partition("=")
    option = re.fullmatch("(?:--|[–—])([a-z][a-z0-9_-]*)", name)
    if not option:
        return word
    return f"--{option[1].replace('-', '_')}{equals}{value}"
