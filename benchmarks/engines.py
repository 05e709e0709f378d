"""Speed of generation compared with llama.cpp and CTranslate2, which run our own exports.

    make .venv/llama_cpp
    python -m benchmarks.engines [--rounds 5]

GPT-2 Small's shape with a vocabulary of 32,000, untrained, on a CPU. Each engine runs in a process
of its own with as many threads, in turn: one sequence, greedily, from 16 tokens and at 400 tokens
of context. A speed counts the tokens after the first. Processes of the lowest priority keep the
cores awake: Node sleeps between two tokens, and the cores of a virtual machine are slow to wake,
which halves llama.cpp's speed.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks import (
    ROOT,
    argument_parser,
    in_turn,
    median_ratio,
    medians,
    run_apart,
    run_main,
    write,
)
from benchmarks.generate import speed
from formats import run_folder
from generating import decode
from generating.cpu_kernels import pack
from generating.load import load_model
from tools.command import count, table

LENGTHS = {"short": (16, 100), "at 400": (400, 50)}  # tokens of the prompt, and new ones
LLAMA_CPP = ROOT / ".venv" / "llama_cpp"
GGUF_TYPES = ("f16", "q8_0")
COMPUTE_TYPES = ("float32", "int8")  # of CTranslate2


def export(folder: Path) -> None:
    """A checkpoint in `folder`, and what tools.export makes of it, by the user's commands."""
    run, hf = folder / "run", folder / "hf"
    train = ["train.py", "config/gpt2_small.py", f"--data_dir={folder}/data"]
    small = ["--max_steps=1", "--batch_size=1", "--eval_batches=1", "--sample_prompts=[]"]
    commands = [
        ["prepare_data.py", "--out", folder / "data"],
        [*train, *small, "--compile=False", f"--checkpoint_dir={run}"],
        ["-m", "tools.export", run, "--out", hf],
    ]
    for kind in GGUF_TYPES:
        gguf = folder / f"{kind}.gguf"
        commands.append(["-m", "tools.export", run, "--gguf", gguf, "--gguf_type", kind])
    for words in commands:
        words = [sys.executable, *map(str, words)]
        subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    from ctranslate2.converters import TransformersConverter

    for kind in COMPUTE_TYPES:
        TransformersConverter(str(hf)).convert(str(folder / kind), quantization=kind)


# -- engines: tokens/s from a folder, the prompt's tokens, new tokens, threads ---------------------


def ours(folder: Path, dtype: str, prompt: int, new: int, threads: int) -> float:
    torch.set_num_threads(threads)
    step, *_ = run_folder.latest(folder / "run")
    model, *_ = load_model(step, torch.device("cpu"))
    pack(model, dtype)
    for _ in range(2):  # the first warms up
        written = decode.generate(model, [list(range(1, prompt + 1))], new, temperature=0)
        stamps = [time.perf_counter() for _ in written]
    return speed(stamps, 1)


def ctranslate2(folder: Path, kind: str, prompt: int, new: int, threads: int) -> float:
    import ctranslate2

    generator = ctranslate2.Generator(
        str(folder / kind), compute_type=kind, inter_threads=1, intra_threads=threads
    )
    vocabulary = (folder / kind / "vocabulary.json").read_text(encoding="utf-8")
    tokens = json.loads(vocabulary)[1 : prompt + 1]
    for _ in range(2):
        written = generator.generate_tokens(tokens, max_length=new, sampling_topk=1, end_token=[])
        stamps = [time.perf_counter() for _ in written]
    return speed(stamps, 1)


def llama_cpp(folder: Path, kind: str, prompt: int, new: int, threads: int) -> float:
    script = shutil.copy(Path(__file__).with_suffix(".mjs"), LLAMA_CPP)
    words = ["node", script, folder / f"{kind}.gguf", prompt, new, threads]
    process = subprocess.run([str(word) for word in words], check=True, stdout=subprocess.PIPE)
    return float(process.stdout)


def main(argv):
    parser = argument_parser("engines", __doc__)
    parser.add_argument("--rounds", type=count, default=5)
    args = parser.parse_args(argv)
    if not LLAMA_CPP.exists():
        parser.error(f"{LLAMA_CPP} is missing: make .venv/llama_cpp")
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        export(folder)
        engines = {"ours": partial(ours, folder, "auto")}
        engines["ours, float32"] = partial(ours, folder, "float32")
        for kind in GGUF_TYPES:
            engines[f"llama.cpp, {kind}"] = partial(llama_cpp, folder, kind)
        for kind in COMPUTE_TYPES:
            engines[f"CTranslate2, {kind}"] = partial(ctranslate2, folder, kind)
        contenders = {
            f"{engine} {length}": partial(run_apart, run, *tokens, threads)
            for engine, run in engines.items()
            for length, tokens in LENGTHS.items()
        }
        busy = ["nice", "-n", "19", sys.executable, "-c", "while True: pass"]
        awake = [subprocess.Popen(busy) for _ in range(threads)]
        try:
            rounds = in_turn(contenders, args.rounds, lambda value: f"{value:.1f} tokens/s")
        finally:
            for process in awake:
                process.kill()
    found = medians(rounds)
    rows = []
    for engine in engines:
        row = [engine]
        for length in LENGTHS:
            ratio = median_ratio(rounds, f"ours {length}", f"{engine} {length}")
            row += [f"{found[f'{engine} {length}']:.1f}", f"{ratio:.2f}"]
        rows.append(row)
    print(table(["", "tokens/s", "ours is", "at 400", "ours is"], rows))
    write("engines", {"threads": threads, "rounds": rounds, "median": found}, torch.device("cpu"))


if __name__ == "__main__":
    run_main(main)
