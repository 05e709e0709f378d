"""Hostile and unlucky input, some hundred files and values, for each of the programs.

    python -m tests.hostile [--only WORD] [--every N]

A program has to answer with a right result, or a sentence and status 1 or 2: never with a
traceback, and in bounded time and memory. Each case is the program itself, in a fork of this
process, which has imported all of them. Prints the cases that fail.
"""

import argparse
import gzip
import importlib
import json
import math
import os
import re
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from formats import files, run_folder

ROOT = Path(__file__).parent.parent
# What the programs import, much of it late.
IMPORTED = ["train", "generate", "prepare_data", "tools.evaluate", "tools.export", "tools.charts"]
IMPORTED += ["tools.report", "safetensors.torch", "torch._dynamo", "gigatoken", "pyarrow.parquet"]
SECONDS = 30  # of the processor that a case may take; most take less than one
PATIENCE = 300  # seconds until a case that hangs is ended
MEMORY = 1 << 30  # bytes beyond those of this process
TINY = ["--n_layer=1", "--n_head=1", "--n_embd=16", "--block_size=16", "--batch_size=4"]
TINY += ["--max_steps=1", "--eval_batches=1", "--compile=False", "--device=cpu"]
SHORT = ["--prompt", "The", "--max_new_tokens", "2", "--device", "cpu"]
# What takes the place of a value in JSON.
ODD = ["x", -1, 10**30, None, [], {}, 1.5, math.nan, True, "\ud800", 10**9, [[]], {"a": {}}, ""]
DEEP = "[" * 200_000
Case = tuple[str, list]  # a name, and a command line


# -- running ---------------------------------------------------------------------------------------


def outcome(command: list, folder: Path) -> str:
    """What is wrong with how a program ends; "" where nothing is."""
    output = folder / "output.txt"
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        become(list(map(str, command)), output)
    deadline = time.monotonic() + PATIENCE
    while True:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.wait4(pid, 0)
            return f"not done after {PATIENCE} s"
        time.sleep(0.005)
    text = output.read_bytes().decode(errors="replace").strip()
    code = os.waitstatus_to_exitcode(status)
    grown = usage.ru_maxrss - resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = re.search("Traceback|Exception ignored|out of memory|Segmentation", text)
    if found:
        return f"status {code}, {text[found.start() :][:100]!r} ... {text[-300:]!r}"
    if code not in (0, 1, 2) or (code and not text):
        return f"status {code}: {text[-300:]!r}"
    if usage.ru_utime + usage.ru_stime > SECONDS:
        return f"{usage.ru_utime + usage.ru_stime:.0f} s of the processor"
    if 1024 * grown > MEMORY:
        return f"{grown / 1024:,.0f} MB of memory"
    return ""


def become(command: list[str], output: Path) -> None:
    """End this process as the program that a command line names."""
    os.setsid()
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 8 * MEMORY,) * 2)
    sys.argv = command
    status = 70
    try:
        if command[0].endswith(".py"):
            runpy.run_path(str(ROOT / command[0]), run_name="__main__")
        else:
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


# -- damage ----------------------------------------------------------------------------------------


def altered(value, name: str = "", count: int = 2) -> Iterator[tuple[str, object]]:
    """A JSON value with one of the values in it replaced or missing: what was done, and it."""
    if not isinstance(value, dict):
        return
    for n, (key, inner) in enumerate(value.items()):
        here = f"{name}.{key}"
        yield f"{here} missing", {k: v for k, v in value.items() if k != key}
        for i in range(count):
            odd = ODD[(5 * n + 3 * i + len(name)) % len(ODD)]
            yield f"{here} = {odd!r}", value | {key: odd}
        for what, changed in altered(inner, here, count):
            yield what, value | {key: changed}


def damaged(data: bytes) -> Iterator[tuple[str, bytes]]:
    """The bytes of a file, damaged as disks and people do."""
    yield "empty", b""
    yield "half", data[: len(data) // 2]
    yield "garbage", bytes(range(256)) * 4
    yield "deep", DEEP.encode()
    yield "another type", b"[1]"
    yield "one byte", data[: len(data) // 3] + b"\xff" + data[len(data) // 3 + 1 :]


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


class Copy:
    """A folder to damage: links to the files of another, but for those that are written."""

    def __init__(self, source: Path, folder: Path):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        self.folder = folder

    def each(self, name: str, contents) -> Iterator[str]:
        """Write each of (what, bytes or JSON value) to a file in turn, and then what was there."""
        path = self.folder / name
        before = path.read_bytes()
        for what, content in contents:
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                write_json(path, content)
            yield f"{name} {what}"
        path.write_bytes(before)

    def read(self, name: str) -> dict:
        return json.loads((self.folder / name).read_text(encoding="utf-8"))


# -- cases -----------------------------------------------------------------------------------------


def texts(folder: Path) -> Iterator[Case]:
    """Files for prepare_data.py."""
    good = "A line of text, and one more.\n" * 200
    lines = {
        "empty.txt": b"",
        "blank.txt": b" \n\t\n" * 50,
        "nul.txt": b"\0" * 5000,
        "latin-1.txt": "Tür und Tor\n".encode("latin-1") * 50,
        "utf-16.txt": good.encode("utf-16"),
        "bom.txt": b"\xef\xbb\xbf" + good.encode(),
        "half a character.txt": good.encode() + "☃".encode()[:2],
        "markers.txt": b"<|endoftext|>" * 5000,
        "only markers.txt": b"<|endoftext|>\n" * 5000,
        "carriage returns.txt": good.replace("\n", "\r").encode(),
        "one word.txt": b"a" * 300_000,
        "blanks.txt": good.encode() + b" " * 1_100_000 + good.encode(),
        "combining.txt": good.encode() + "e\u0301".encode() * 20_000,
        "truncated.txt.gz": gzip.compress(good.encode())[:-20],
        "no.txt.gz": good.encode(),
        "bomb.txt.gz": gzip.compress((b"x" * 99 + b"\n") * 200_000),
        "no.txt.zst": good.encode(),
        "empty.txt.zst": b"",
        "no.parquet": good.encode(),
        "empty.parquet": b"",
        "magic.parquet": b"PAR1" + b"\xff" * 100 + b"PAR1",
        "deep.jsonl": DEEP.encode(),
        "empty.jsonl": b"",
        "array.jsonl": b"[]\n",
        "numbers.jsonl": b"1\n2\n",
        "null.jsonl": b'{"text": null}\n',
        "number.jsonl": b'{"text": 5}\n',
        "huge number.jsonl": b'{"text": ' + b"9" * 6000 + b"}\n",
        "surrogate.jsonl": b'{"text": "\\ud800 lone"}\n',
        "nul.jsonl": b'{"text": "\\u0000"}\n' * 500,
        "half.jsonl": b'{"text": "half',
        "twice.jsonl": b'{"text": "a", "text": 3}\n',
        "no text.jsonl": b'{"body": "a"}\n',
        "deep inside.jsonl": b'{"text": "a", "more": ' + DEEP.encode() + b"}\n",
        "not UTF-8.jsonl": b'{"text": "\xff\xfe"}\n',
        "messages null.jsonl": b'{"messages": null}\n',
        "messages list.jsonl": b'{"messages": [1, 2]}\n',
        "messages empty.jsonl": b'{"messages": []}\n',
        "message no role.jsonl": b'{"messages": [{"content": "a"}]}\n',
        "message odd role.jsonl": b'{"messages": [{"role": {}, "content": "a"}]}\n',
        "message odd content.jsonl": b'{"messages": [{"role": "user", "content": [{}]}]}\n',
    }
    for name, data in lines.items():
        path = folder / name
        path.write_bytes(data)
        for more in ([], ["--on_error", "skip"], ["--tokenizer", "char"]):
            size = [] if "--tokenizer" in more else ["--vocab_size", "300"]
            out = folder / "out"
            shutil.rmtree(out, ignore_errors=True)
            yield f"prepare {name} {more}", ["prepare_data.py", path, *size, *more, "--out", out]
    shutil.rmtree(folder / "out", ignore_errors=True)

    (folder / "text.txt").write_text(good)
    odd = folder / "odd"
    odd.mkdir()
    os.mkfifo(odd / "pipe.txt")
    (odd / "folder.txt").mkdir()
    (odd / "loop.txt").symlink_to("loop.txt")
    (odd / "dangling.txt").symlink_to("nowhere")
    (odd / "up").symlink_to("..")
    for name in ("line\nbreak.txt", "\x1b]0;title\x07.txt", "-.txt", os.fsdecode(b"\xff\xfe.txt")):
        (odd / name).write_text(good)
    for path in [odd, *sorted(odd.iterdir()), "/dev/zero", "/dev/null", "/proc/self/mem", "", "~"]:
        out = ["--out", folder / "odd_out", "--overwrite", "--vocab_size", "300"]
        yield f"prepare {os.fsencode(path)}", ["prepare_data.py", path, *out]
    text = folder / "text.txt"
    values = {
        "--vocab_size": ["0", "-5", "256", "257", "1e9", "10000000000", "x"],
        "--val_fraction": ["0", "1", "-1", "nan", "inf", "0.999999", "1e-300"],
        "--workers": ["0", "-1", "x", "1e3"],
        "--gigabytes": ["0", "-1", "nan", "inf", "1e-300", "1e300"],
        "--encoding": ["none", "", "rot13", "utf-16", "idna", "base64"],
        "--tokenizer": ["nowhere", "", "/dev/null", text, folder],
        "--text_field": ["", "x"],
        "--min_chars": ["-1", "x", "1e9"],
        "--out": ["", text, "/proc/none", "/dev/null/x", "x" * 300],
        "--verify": ["", "/", text, "/dev/null"],
        "--sample_bytes": ["0", "-1", "1e30"],
    }
    for option, odd_values in values.items():
        for value in odd_values:
            shutil.rmtree(folder / "out", ignore_errors=True)
            out = [] if option in ("--out", "--verify") else ["--out", folder / "out"]
            size = [] if option in ("--vocab_size", "--tokenizer") else ["--vocab_size", "300"]
            inputs = [] if option == "--verify" else [text]
            yield (
                f"prepare {option} {value}",
                ["prepare_data.py", *inputs, *size, *out, option, value],
            )


def tokenizers(data: Path, folder: Path) -> Iterator[Case]:
    """A tokenizer.json that somebody made, in a folder for prepare_data.py."""
    (folder / "text.txt").write_text("A line of text, and one more.\n" * 200)
    copy = Copy(data, folder / "tokenizer")
    good = copy.read("tokenizer.json")
    whole = (data / "tokenizer.json").read_bytes()
    inner = good | {"model": good["model"] | {"vocab": {}}}
    for contents in (damaged(whole), altered(good | {"model": 1}), altered(inner)):
        for what in copy.each("tokenizer.json", contents):
            out = ["--out", folder / "of_tokenizer", "--overwrite"]
            command = ["prepare_data.py", folder / "text.txt", "--tokenizer", copy.folder, *out]
            yield f"prepare {what}", command


def data_folders(data: Path, folder: Path) -> Iterator[Case]:
    """Prepared folders for train.py and for prepare_data.py --verify."""
    copy = Copy(data, folder / "data")
    whole = (data / "meta.json").read_bytes()
    good = copy.read("meta.json")
    for n, contents in enumerate((damaged(whole), altered(good, count=1))):
        for what in copy.each("meta.json", contents):
            where = [f"--data_dir={copy.folder}", f"--checkpoint_dir={folder / 'of_data'}"]
            shutil.rmtree(folder / "of_data", ignore_errors=True)
            yield f"train {what}", ["train.py", *where, *TINY]
            if n == 0 or "splits" in what:
                yield f"verify {what}", ["prepare_data.py", "--verify", copy.folder]
    for name in ("train.bin", "val.bin", "tokenizer.json"):
        for what in copy.each(name, damaged((data / name).read_bytes())):
            shutil.rmtree(folder / "of_data", ignore_errors=True)
            where = [f"--data_dir={copy.folder}", f"--checkpoint_dir={folder / 'of_data'}"]
            yield f"train {what}", ["train.py", *where, *TINY]


def runs(run: Path, folder: Path) -> Iterator[Case]:
    """Checkpoints for generate.py, train.py and the tools."""
    step = run_folder.find(run)
    copy = Copy(run, folder / "run")
    name = f"{step.name}/state.json"
    good = copy.read(name)

    def signed(contents):
        for what, state in contents:
            if "sha256" in state:
                state = state | {"sha256": run_folder.fingerprint(state)}
            yield what, state

    contents = [*damaged(step.joinpath("state.json").read_bytes())]
    contents += signed(altered(good | {"settings": {"data_dir": "x"}}, count=1))
    for n, what in enumerate(copy.each(name, contents)):
        yield f"generate {what}", ["generate.py", "--checkpoint", copy.folder, *SHORT]
        where = [f"--data_dir={good['settings']['data_dir']}", f"--checkpoint_dir={copy.folder}"]
        tool = ["tools.evaluate", "tools.export"][n % 2]
        target = ["--out", folder / f"exported_{n}"] if tool == "tools.export" else []
        yield f"{tool} {what}", [tool, copy.folder, *target]
        if n % 3 == 0:
            again = Copy(copy.folder, folder / "resumed").folder
            where = [f"--data_dir={good['settings']['data_dir']}", f"--checkpoint_dir={again}"]
            yield f"train on {what}", ["train.py", *where, *TINY]
    for file in ("model.pt", "optimizer.pt", "tokenizer.json"):
        path = f"{step.name}/{file}"
        for what in copy.each(path, damaged((step / file).read_bytes())):
            files_now = good["files"] | {file: described(copy.folder / path)}
            state = good | {"files": files_now}
            write_json(copy.folder / name, state | {"sha256": run_folder.fingerprint(state)})
            yield f"generate {what}", ["generate.py", "--checkpoint", copy.folder, *SHORT]
            again = Copy(copy.folder, folder / "resumed").folder
            where = [f"--data_dir={good['settings']['data_dir']}", f"--checkpoint_dir={again}"]
            yield f"train on {what}", ["train.py", *where, *TINY]
    write_json(copy.folder / name, good)
    for file in ("config.json", "best.json"):
        contents = [*damaged((run / file).read_bytes()), *altered(copy.read(file), count=1)]
        for what in copy.each(file, contents):
            yield f"report {what}", ["tools.report", copy.folder]
    lines = (run / "log.jsonl").read_bytes().splitlines()
    odd = [*damaged(b"\n".join(lines))]
    for n, line in enumerate(lines[:3]):
        for what, value in altered(json.loads(line), count=1):
            changed = [*lines[:n], json.dumps(value).encode(), *lines[n + 1 :]]
            odd.append((f"line {n} {what}", b"\n".join(changed)))
    for what in copy.each("log.jsonl", odd):
        yield f"report {what}", ["tools.report", copy.folder]


def described(path: Path) -> dict:
    return {"bytes": path.stat().st_size, "sha256": files.sha256(path)}


def weights(exported: Path, data: Path, folder: Path) -> Iterator[Case]:
    """Folders in Hugging Face's format, for init_from."""
    copy = Copy(exported, folder / "hf")
    shape = [s for s in TINY if not s.startswith(("--n_", "--block"))]
    where = [f"--data_dir={data}", f"--checkpoint_dir={folder / 'of_weights'}"]
    for name in ("config.json", "model.safetensors"):
        contents = [*damaged((exported / name).read_bytes())]
        if name == "config.json":
            contents += altered(copy.read(name))
        else:
            contents += headers((exported / name).read_bytes())
        for what in copy.each(name, contents):
            shutil.rmtree(folder / "of_weights", ignore_errors=True)
            yield f"init_from {what}", ["train.py", *where, *shape, f"--init_from={copy.folder}"]


def headers(data: bytes) -> Iterator[tuple[str, bytes]]:
    """A safetensors file whose header lies."""
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    first, second = [name for name in header if name != "__metadata__"][:2]
    lies = [{"shape": [-1, -1]}, {"data_offsets": [0, 10**18]}, {"data_offsets": [-8, 0]}]
    lies += [{"dtype": "F99"}, {"shape": [2**62, 2**62]}, {"shape": None}, header[second]]
    for lie in lies:
        changed = json.dumps(header | {first: header[first] | lie}).encode()
        yield str(lie), len(changed).to_bytes(8, "little") + changed + rest
    yield "length", (2**63).to_bytes(8, "little") + data[8:]


def command_lines(data: Path, run: Path, folder: Path) -> Iterator[Case]:
    """Values of settings and options, presets and prompts."""
    values = ["0", "-1", "nan", "inf", "1e300", "10000000000", "x", "", "None", "[1]", "True"]
    names = ["n_layer", "n_embd", "batch_size", "block_size", "learning_rate", "warmup_steps"]
    names += ["max_steps", "seed", "dropout", "eval_batches", "keep_last", "init_from", "dtype"]
    where = [f"--data_dir={data}", f"--checkpoint_dir={folder / 'of_values'}"]
    for name in names:
        for value in values:
            if name == "max_steps" and value in ("10000000000", "None", "1e300"):
                continue  # a long run is right
            shutil.rmtree(folder / "of_values", ignore_errors=True)
            yield f"train --{name}={value}", ["train.py", *where, *TINY, f"--{name}={value}"]
    presets = {
        "not UTF-8": b"n_layer = 1 # \xff",
        "BOM": b"\xef\xbb\xbfn_layer = 1\n",
        "UTF-16": "n_layer = 1\n".encode("utf-16"),
        "syntax": b"n_layer = = 1\n",
        "nul": b"n_layer = 1\0\n",
        "deep": b"n_layer = " + DEEP.encode(),
        "raises": b"1 / 0\n",
        "odd": b"n_layer = object()\nbatch_size = {}\n",
    }
    for what, content in presets.items():
        (folder / "preset.py").write_bytes(content)
        yield f"train preset {what}", ["train.py", folder / "preset.py", *where, *TINY]
    for path in ("", "/", "/dev/null", "/proc/self/mem", folder / "preset.py", "x" * 5000):
        yield f"train data_dir {str(path)[:20]}", ["train.py", *TINY, f"--data_dir={path}"]
        target = ["train.py", where[0], *TINY, f"--checkpoint_dir={path or folder / 'preset.py'}"]
        yield f"train checkpoint_dir {str(path)[:20]}", target
        for program in ("generate.py", "tools.report", "tools.evaluate", "tools.export"):
            words = ["--checkpoint", path, *SHORT] if program == "generate.py" else [path]
            words += ["--out", folder / "no_export"] if program == "tools.export" else []
            yield f"{program} {str(path)[:20]}", [program, *words]
    options = ["max_new_tokens", "temperature", "top_k", "top_p", "seed", "num_samples", "stop"]
    for name in options:
        for value in values:
            if name in ("max_new_tokens", "num_samples") and value == "10000000000":
                continue  # a long text is right
            words = ["--checkpoint", run, *SHORT, f"--{name}={value}"]
            yield f"generate --{name}={value}", ["generate.py", *words]
    prompts = {"not UTF-8": b"\xff", "nul": b"\0", "blanks": b" " * 1_100_000, "long": b"a" * 10**6}
    prompts["control"] = b"\x1b]0;title\x07"
    for what, content in prompts.items():
        (folder / "prompt").write_bytes(content)
        words = ["--checkpoint", run, "--prompt_file", folder / "prompt", *SHORT[2:]]
        yield f"generate prompt {what}", ["generate.py", *words]
    yield "generate surrogate", ["generate.py", "--checkpoint", run, "--prompt", "\udcff", *SHORT]


def base(folder: Path) -> tuple[Path, Path, Path]:
    """A prepared folder, a run and its export, all well. Raises AssertionError where one is not."""
    (folder / "text.txt").write_text("\n".join(f"The line {n} of some text." for n in range(3000)))
    data, run, exported = folder / "good", folder / "good_run", folder / "good_export"
    text = folder / "text.txt"
    steps = [
        ["prepare_data.py", text, "--vocab_size", "300", "--out", data],
        ["train.py", f"--data_dir={data}", f"--checkpoint_dir={run}", *TINY, "--log_interval=1"],
        ["tools.export", run, "--out", exported],
    ]
    for command in steps:
        problem = outcome(command, folder)
        assert not problem, problem
    return data, run, exported


def hostile(folder: Path, only: str = "", every: int = 1) -> tuple[int, list[str]]:
    """Try every Nth of the cases that have a word in their name.

    Returns how many there are, and those that fail.
    """
    for name in IMPORTED:
        importlib.import_module(name)
    data, run, exported = base(folder)
    (folder / "work").mkdir()
    rooms = [
        texts(folder / "work"),
        tokenizers(data, folder),
        data_folders(data, folder),
        runs(run, folder),
        weights(exported, data, folder),
        command_lines(data, run, folder),
    ]
    count, failures = 0, []
    for room in rooms:
        for name, command in room:
            if only in name:
                count += 1
                problem = "" if count % every else outcome(command, folder)
                if problem:
                    failures.append(f"{name}: {problem}")
    return count, failures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name has it")
    parser.add_argument("--every", default=1, type=int, metavar="N", help="every Nth of them")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, str(ROOT))
        count, failures = hostile(Path(folder), args.only, args.every)
    print(*failures, f"{count} cases; {len(failures)} fail", sep="\n")
    sys.exit(bool(failures))
