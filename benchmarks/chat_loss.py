"""What `loss_on = "assistant"` gains: the loss on replies that were held back, with it and without.

    python -m benchmarks.chat_loss [--seeds 3] [--base_steps 200] [--steps 120]

The text is real: Python's standard library. A small model is trained on one half of its modules.
The functions of the other half become conversations: a system message names the module, the user
gives a signature and what its docstring says, the assistant the code, for up to three functions of
a module in turn. The model then goes on with config/chat.py on nine tenths of the conversations,
once with each loss and the same of everything else. Writes benchmarks/results/chat_loss_cpu.json.
"""

import argparse
import ast
import hashlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import argument_parser, loss_of, write
from benchmarks.prepare import run
from formats.data_folder import read_meta
from preparing.corpora import standard_library

LOSSES = ("all", "assistant")
FUNCTIONS = 3  # of a conversation, at most
SIZES = {"docstring": (40, 500), "code": (60, 800)}  # characters
SHAPE = {"n_layer": 3, "n_head": 4, "n_embd": 128, "block_size": 256}
GOES_ON = {"batch_size": 8, "learning_rate": 1e-3}
PLAIN = {"eval_interval": 0, "save_interval": 0, "report_minutes": 0, "compile": False}


def main(argv: list[str]) -> None:
    """The command line's work."""
    args = parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        texts, talked_about = halves()
        prepare(work / "base", texts, "txt", "--vocab_size=4096")
        talks = [json.dumps({"messages": talk}) for path in talked_about for talk in talks_of(path)]
        prepare(work / "chat", talks, "jsonl", f"--tokenizer={work / 'base'}")
        base = work / "base_run"
        settings = SHAPE | {"max_steps": args.base_steps}
        train("config/demo.py", work / "base", base, settings)
        meta = read_meta(work / "chat")
        result = {
            "conversations": len(talks),
            "tokens": meta.splits["train"].tokens,
            "in_replies": meta.splits["train"].mask.tokens,
            "held_back_in_replies": meta.splits["val"].mask.tokens,
            "base": loss_of(base, work / "chat", "assistant"),
            "steps": args.steps,
            "losses": {},
        }
        for seed in range(1, args.seeds + 1):
            for loss_on in LOSSES:
                folder = work / f"{loss_on}_{seed}"
                settings = GOES_ON | {"init_from": base, "seed": seed, "max_steps": args.steps}
                train("config/chat.py", work / "chat", folder, settings | {"loss_on": loss_on})
                loss = loss_of(folder, work / "chat", "assistant")
                print(f"seed {seed}, loss_on = {loss_on}: {loss}", flush=True)
                result["losses"].setdefault(loss_on, []).append(loss)
    pairs = zip(*(result["losses"][loss_on] for loss_on in LOSSES), strict=True)
    result["gain"] = round(statistics.mean(every - alone for every, alone in pairs), 4)
    print(json.dumps(result, indent=1))
    write("chat_loss", torch.device("cpu"), result)


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argument_parser("chat_loss", __doc__)
    parser.add_argument("--seeds", type=int, default=3, help="trainings with each loss")
    parser.add_argument("--base_steps", type=int, default=200, help="of the model to start from")
    parser.add_argument("--steps", type=int, default=120, help="of each training")
    return parser.parse_args(argv)


def halves() -> tuple[list[str], list[Path]]:
    """The texts of one half of the modules, and the paths of the other; a hash decides."""
    texts, others = [], []
    for path in map(Path, standard_library()):
        if hashlib.sha256(path.name.encode()).digest()[0] % 2:
            others.append(path)
        else:
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
    return texts, others


def talks_of(path: Path) -> Iterator[list[dict]]:
    """Conversations about the functions of a module, in the order of ast.walk: outer ones first."""
    source = path.read_text(encoding="utf-8", errors="replace")
    system = {"role": "system", "content": f"You write functions of the module {path.stem}."}
    said = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
            continue
        docstring = ast.get_docstring(node) or ""
        node.body = node.body[1:]
        code = ast.unparse(node)
        sizes = {"docstring": len(docstring), "code": len(code)}
        if any(not low <= sizes[part] <= high for part, (low, high) in SIZES.items()):
            continue
        question = f"Write {node.name}({ast.unparse(node.args)}).\n\n{docstring}"
        said.append({"role": "user", "content": question})
        said.append({"role": "assistant", "content": code})
    for at in range(0, len(said), 2 * FUNCTIONS):
        yield [system, *said[at : at + 2 * FUNCTIONS]]


def prepare(out: Path, texts: list[str], kind: str, *flags: str) -> None:
    """A prepared folder of some texts."""
    between = "\n" if kind == "jsonl" else "\n<|endoftext|>\n"
    path = out.with_suffix(f".{kind}")
    path.write_text(between.join(texts), encoding="utf-8", newline="\n")
    run(["prepare_data.py", str(path), *flags, "--out", str(out)])


def train(preset: str, data: Path, folder: Path, settings: dict) -> None:
    """A run of train.py with a preset."""
    settings = PLAIN | {"device": "cpu"} | settings | {"data_dir": data, "checkpoint_dir": folder}
    run(["train.py", preset, *(f"--{name}={value}" for name, value in settings.items())])


if __name__ == "__main__":
    main(sys.argv[1:])
