"""What the cells of colab.ipynb do: the scripts, with their output as it comes and their errors.

A script that fails ends its cell with its own sentence, where Python would show a page of
traceback. Knows notebooks, Drive folders and processes; the work is the scripts'.
"""

import contextlib
import ctypes
import functools
import html
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PR_SET_PDEATHSIG = 1  # of Linux's prctl
# For the report, the exports, and text from the hub, beside requirements.txt.
PACKAGES = ("matplotlib", "safetensors", "gguf", "huggingface_hub", "pyarrow")


class Stopped(Exception):
    """The end of a cell, in a sentence."""

    def _render_traceback_(self):
        """What IPython shows of it."""
        return [str(self)]


# -- the scripts -----------------------------------------------------------------------------------


def run(*words) -> None:
    """Run `python WORDS` and show what it prints. Raises Stopped with its error."""
    words = [str(word) for word in words]
    script = words[1] if words[0] == "-m" else words[0]
    print(f"$ python {shlex.join(words)}", flush=True)
    process = start(words)
    error = []
    while True:
        try:
            for line in process.stdout:
                if error or line.startswith((f"{script}: ", f"python -m {script}: ")):
                    error.append(line)
                else:
                    print(line, end="", flush=True)
            break
        except KeyboardInterrupt:  # the cell's stop button; training saves before it ends
            process.send_signal(signal.SIGINT)
    status = process.wait()
    if status:
        raise Stopped("".join(error) or f"{script} {what_happened(status)}")
    print("".join(error), end="")


def start(words: list[str]) -> subprocess.Popen:
    """Begin `python WORDS`, in a session of its own: so it hears of the stop button once.

    When the notebook's kernel dies, Linux sends it SIGTERM: training saves then.
    """
    ends_with_us = None
    if sys.platform == "linux":
        ends_with_us = functools.partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
        preexec_fn=ends_with_us,
    )


def what_happened(status: int) -> str:
    """An exit status in words, where the script had none itself."""
    if status == -signal.SIGKILL:
        return "was killed by the system, most likely for want of memory"
    if status in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        return "was stopped; run the cell again to go on"
    return f"ended with status {status}; what it printed last says why"


# -- cells -----------------------------------------------------------------------------------------


def install() -> None:
    """Install the packages that are missing, and no other version of those that are there."""
    needed = (ROOT / "requirements.txt").read_text().split("\n")
    names = [line for line in needed if line and not line.startswith("#")]
    missing = [name for name in (*names, *PACKAGES) if not importlib.util.find_spec(name)]
    if missing:
        run("-m", "pip", "install", "-q", *missing)


def prepare(home: Path, source: str, vocab_size: int, gigabytes: float) -> Path:
    """The data folder of a project, prepared unless it is there; returns it.

    home: the project's folder, on the Drive or not. source: upload, python_stdlib, or an INPUT of
    prepare_data.py. gigabytes: as --gigabytes; 0: all.

    The work is done on the machine's own disk, and copied when it is finished: what grows on a
    Drive is sent there again and again.
    """
    data = home / "data"
    if (data / "meta.json").exists():
        print(f"{data} is prepared; for other text give the project another name")
        return data
    inputs = [source]
    if source == "upload":
        inputs = [uploaded(home / "texts")]
    elif source == "python_stdlib":
        inputs = []
    words = ["--vocab_size", vocab_size]
    if gigabytes:
        words += ["--gigabytes", gigabytes]
    work = ROOT / "data" / home.name
    run("prepare_data.py", *inputs, *words, "--out", work)
    copy_data(work, data)
    return data


def uploaded(folder: Path) -> Path:
    """The folder of the uploaded texts; asks for them where there is none.

    It has its name once all files are in it: a Drive takes them one after the other.
    """
    if folder.exists() and any(folder.iterdir()):
        return folder
    try:
        from google.colab import files
    except ImportError:
        raise Stopped(f"only Colab uploads; copy the texts into {folder}") from None
    names = files.upload()
    if not names:
        raise Stopped("nothing was uploaded; run the cell again and choose files")
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an upload that was cut off
    partial.mkdir(parents=True)
    with room_needed(folder, "choose the files again"):
        for name in names:
            shutil.move(name, partial / name)
        os.replace(partial, folder)
    return folder


def copy_data(work: Path, data: Path) -> None:
    """Copy a prepared folder, meta.json last: its presence says that the folder is whole."""
    files = sorted(work.iterdir(), key=lambda path: path.name == "meta.json")
    with room_needed(data, "what is prepared stays on this machine"):
        data.mkdir(parents=True, exist_ok=True)
        for path in files:
            partial = data / f"{path.name}.partial"
            shutil.copyfile(path, partial)
            os.replace(partial, data / path.name)
    shutil.rmtree(work)


@contextlib.contextmanager
def room_needed(folder: Path, then: str) -> Iterator[None]:
    """A disk that fills up under it, or takes no files, ends the cell with a sentence.

    then: what is to be known when the cell runs again.
    """
    try:
        yield
    except OSError as error:
        raise Stopped(
            f"{folder}: {error.strerror}; make room there and run the cell again: {then}"
        ) from None


def show_report(folder: Path) -> None:
    """Draw a run's report.html, and show it in the cell's output."""
    from IPython.display import HTML, display

    run("-m", "tools.report", folder)
    page = (folder / "report.html").read_text(encoding="utf-8")
    frame = f'<iframe srcdoc="{html.escape(page)}" width="100%" height="900"></iframe>'
    display(HTML(frame))


def export(folder: Path, out: Path, gguf: bool) -> Path:
    """Export a run's best step under `out`, unless it is there; returns the folder.

    gguf: also as a file for llama.cpp and Ollama.
    """
    from formats import run_folder

    try:
        step = run_folder.find(folder)
    except run_folder.CheckpointError as error:
        raise Stopped(str(error)) from None
    exported = out / step.name
    file = out / f"{step.name}.gguf"
    targets = []
    if not exported.exists():
        targets += ["--out", exported]
    if gguf and not file.exists():
        file.with_suffix(".Modelfile").unlink(missing_ok=True)  # of a stopped export
        targets += ["--gguf", file]
    if targets:
        run("-m", "tools.export", step, *targets)
    print(f"exported to {exported}")
    return exported


def publish(exported: Path, repository: str, private: bool) -> None:
    """Put an exported folder on the Hugging Face hub, where a repository and a token are given."""
    token = hub_token()
    if not repository or not token:
        print(
            "not published: that takes a repository, YOU/NAME, and a token that may write: on Colab"
            " a secret HF_TOKEN (the key at the left), elsewhere a variable of that name"
        )
        return
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=exported)
    except Exception as error:  # the hub's own, and whatever the network stack raises
        reason = str(error).strip().split("\n")[0]
        raise Stopped(f"not published: {reason}") from None
    print(f"published: {api.endpoint}/{repository}")


def hub_token() -> str | None:
    """The token of Colab's secrets, or of the environment; None where there is none."""
    with contextlib.suppress(Exception):  # Colab's own: none there, or not granted
        from google.colab import userdata

        return userdata.get("HF_TOKEN")
    return os.environ.get("HF_TOKEN")
