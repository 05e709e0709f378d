"""Real weights, SmolLM2's: read, evaluated, tuned and exported as those of any user."""

import math

import pytest
import torch
from tokenizers import Tokenizer as HFTokenizer

import config
from formats import gguf, pretrained
from generating import decode
from generating.text import Conversation, complete
from tests.conftest import llama_cpp, prepare, prose
from tests.test_tokenizer import ids_agree
from tokenizer_bpe import ALPHABET
from train import training_step
from training.setup import build

TEXT = (
    "The moon goes around the earth once in about four weeks. Half of it is always lit by the sun,"
    " and how much of that half we see depends on where it is: at new moon none, at full moon all"
    " of it. In 1969, two astronauts of Apollo 11 walked on it for two and a half hours.\n"
)


@pytest.fixture(scope="module")
def source(smollm2):
    """The weights and their tokenizer."""
    return pretrained.load(smollm2)


@pytest.fixture(scope="module")
def model(source):
    """The model with these weights; it shares their memory."""
    return source.model().eval()


@pytest.fixture(scope="module")
def text_logits(source, model):
    """Token ids of TEXT after an end of text, [1, T], and our logits of what follows each."""
    ids = torch.tensor([[source.tokenizer.eot_id, *source.tokenizer.encode(TEXT).tolist()]])
    with torch.inference_mode():
        return ids, model(ids)


def test_ids_are_those_of_tokenizers(source):
    tokenizer = source.tokenizer
    lacking = [byte for byte, char in ALPHABET.items() if char in tokenizer.lacking]
    controls = [chr(byte) for byte in lacking if byte < 0x80]
    assert controls == list("\x04\x06\x13\x14\x16\x1d")  # no text has the others
    written = HFTokenizer.from_str(tokenizer.to_json())
    ids_agree(tokenizer, written, without=[*tokenizer.specials, *controls])
    assert tokenizer.encode(prose()).tolist() == written.encode(prose()).ids


def test_logits_are_those_of_transformers(smollm2, text_logits):
    from transformers import AutoModelForCausalLM

    ids, logits = text_logits
    theirs = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    with torch.inference_mode():
        exact = theirs(ids).logits
    assert (logits - exact).abs().max() < 1e-4 * exact.abs().max()


def test_a_text_has_the_bits_per_byte_of_a_trained_model(text_logits):
    ids, logits = text_logits
    nats = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")
    bits = nats.item() / math.log(2) / len(TEXT.encode())
    assert bits == pytest.approx(1.0915, abs=0.002)


def test_a_chat_has_an_english_reply_that_ends(source, model):
    assert source.chats
    conversation = Conversation(model, source.tokenizer)
    prompt = conversation.prompt("What is the capital of France?")
    ends = {"stop": conversation.form.stop, "end_ids": source.end_ids}
    *_, (reply,) = complete(model, source.tokenizer, [prompt], 30, temperature=0, **ends)
    assert reply.text == "The capital of France is Paris."


def test_ten_steps_lower_the_loss(smollm2, tmp_path):
    (tmp_path / "little.txt").write_text(prose()[:1500], "utf-8")
    data = prepare(
        tmp_path / "little.txt", tmp_path / "data", "--tokenizer", smollm2, "--val_fraction=0.3"
    )
    flags = [f"--init_from={smollm2}", f"--data_dir={data}", f"--checkpoint_dir={tmp_path / 'run'}"]
    flags += ["--block_size=32", "--batch_size=2", "--learning_rate=3e-4", "--warmup_steps=0"]
    flags += ["--max_steps=10", "--dtype=float32", "--compile=False", "--device=cpu"]
    run = build(config.load(["config/finetune.py", *flags]))
    losses = []
    for _ in range(10):
        training_step(run)
        losses.append(run.loss_sums.pop()["loss"])
    assert losses[0] < 5  # with dropout it would be 10
    assert losses[-1] < losses[0] - 1


def test_llama_cpp_writes_the_same(source, model, tmp_path):
    gguf.write(tmp_path / "smollm2.gguf", source, None)
    prompt = "In 1969, the capital of France was"
    theirs = llama_cpp(tmp_path / "smollm2.gguf", prompt, 24)
    ids = source.tokenizer.encode(prompt).tolist()
    assert theirs["prompt"] == ids
    ours = [i for (i,) in decode.generate(model, [ids], 24, temperature=0)]
    assert theirs["ids"] == ours
    assert " Paris" in theirs["text"]
