"""The demo model: the committed copy loads and writes text, and it can be made again."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="the GPU runtime is not installed")

from click.testing import CliRunner  # noqa: E402

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime.demo_model import copy_demo_model, demo_model_folder, read_made  # noqa: E402
from lockstep.runtime.demo_model.cli import demo_model  # noqa: E402
from lockstep.runtime.demo_model.corpus import Passage, passages  # noqa: E402
from lockstep.runtime.demo_model.head import train_head  # noqa: E402
from lockstep.runtime.demo_model.tokenizer import TURN_END, conversation, train_tokenizer  # noqa: E402
from lockstep.runtime.demo_model.train import Recipe, train_demo_model  # noqa: E402
from lockstep.runtime.models import Decoder, build_model  # noqa: E402
from tests.support.model_passes import Passes  # noqa: E402

FILES = "config.json generation_config.json made.json model.safetensors tokenizer.json tokenizer_config.json".split()
TINY = Recipe(vocab=270, hidden=16, intermediate=16, layers=1, heads=2, kv_heads=1, head_dim=8, window=8, steps=3)
WORDS = "Return the number of items in a list, or raise an error if the file cannot be opened for reading."
TEXTS = [Passage(f"{WORDS} {number} times") for number in range(20)]
TEXTS += [Passage(WORDS, "What does os.read do?")]


def load_tokenizer(folder: Path) -> Any:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def greedy(model: Decoder, tokens: list[int], count: int) -> list[int]:
    passes = Passes(model, rows=1, pages_each=40)
    written: list[int] = []
    new = tokens
    while len(written) < count:
        new = [int(passes.run({0: new})[0][-1].argmax())]
        written += new
    return written


@pytest.fixture(scope="module")
def committed() -> tuple[Decoder, Any]:
    return build_model(demo_model_folder(), torch.float32), load_tokenizer(demo_model_folder())


def test_the_committed_copy_is_whole_and_small() -> None:
    files = {path.name: path.stat().st_size for path in demo_model_folder().iterdir()}
    assert sorted(files) == FILES
    assert sum(files.values()) < 8e6


def test_the_committed_copy_was_made_by_this_recipe() -> None:
    made = read_made(demo_model_folder())
    assert made is not None
    assert made["recipe"] == asdict(Recipe())


def test_it_continues_with_words_of_its_text(committed: tuple[Decoder, Any]) -> None:
    model, tokenizer = committed
    known = set(re.findall(r"[a-z]{2,}", " ".join(passage.text for passage in passages()).lower()))
    for prompt in ("Return the", "If the file", "This module"):
        written = greedy(model, tokenizer.encode(prompt).ids, 32)
        text = tokenizer.decode(written, skip_special_tokens=True)
        words = re.findall(r"[a-z]{2,}", (prompt + text).lower())
        assert len(words) >= 8, text
        assert len(set(words)) >= 5, text
        # The last word may have been cut short.
        assert sum(word in known for word in words[:-1]) >= 0.9 * (len(words) - 1), text


def test_it_answers_a_question_and_ends_its_turn(committed: tuple[Decoder, Any]) -> None:
    model, tokenizer = committed
    question = conversation("What does os.path.join do?", "").partition(f"assistant\n{TURN_END}")[0] + "assistant\n"
    written = greedy(model, tokenizer.encode(question).ids, 120)
    assert tokenizer.token_to_id(TURN_END) in written, tokenizer.decode(written)


def test_its_text_is_predicted_far_better_than_by_chance(committed: tuple[Decoder, Any]) -> None:
    model, tokenizer = committed
    text = "Return True if the object is a class, False otherwise. If the argument is not a string, raise TypeError."
    ids = tokenizer.encode(text).ids
    logits = Passes(model, rows=1, pages_each=40).run({0: ids})[0]
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).item()
    assert loss < 4.0, "chance is ln 2048 = 7.6"


@pytest.mark.parametrize("text", ["", "naïve ✓ 漢字 🙂‍↔️", "\tif x:\r\n\n    y = 'z'\x00", "a" * 300, "<|im_start"])
def test_the_tokenizer_gives_any_text_back(text: str, committed: tuple[Decoder, Any]) -> None:
    tokenizer = committed[1]
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < committed[0].settings.vocab for token in ids)


def test_transformers_reads_the_folder_and_agrees(committed: tuple[Decoder, Any]) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference implementation is not installed")
    model, tokenizer = committed
    theirs = transformers.AutoModelForCausalLM.from_pretrained(demo_model_folder(), dtype=torch.float32).eval()
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model_folder())
    messages = [{"role": "user", "content": "What does len do?"}]
    text = their_tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nWhat does len do?<|im_end|>\n<|im_start|>assistant\n"
    ids = their_tokenizer(text)["input_ids"]
    assert ids == tokenizer.encode(text).ids
    assert their_tokenizer.eos_token_id == model.settings.end_tokens[0]
    with torch.no_grad():
        expected = theirs.generate(torch.tensor([ids]), max_new_tokens=24)[0, len(ids) :].tolist()
    assert greedy(model, ids, len(expected)) == expected


# ------------------------------------------------------------------------------------------------------- how it is made


def test_making_it_twice_gives_equal_bytes(tmp_path: Path) -> None:
    lines: list[str] = []
    for name in ("a", "b"):
        assert train_demo_model(tmp_path / name, TINY, texts=TEXTS, progress=lines.append)
    for file in FILES:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == FILES
    assert any("step 3 of 3: loss" in line for line in lines)
    assert build_model(tmp_path / "a").settings.vocab == 270


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    assert train_demo_model(tmp_path / "a", TINY, texts=TEXTS, progress=lambda line: None)
    before = (tmp_path / "a" / "made.json").stat().st_mtime_ns
    assert not train_demo_model(tmp_path / "a", TINY, texts=TEXTS, progress=lambda line: None)
    assert (tmp_path / "a" / "made.json").stat().st_mtime_ns == before
    assert train_demo_model(tmp_path / "a", TINY, texts=TEXTS[1:], progress=lambda line: None)


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    def loss(steps: int) -> float:
        train_demo_model(tmp_path / str(steps), replace(TINY, steps=steps), texts=TEXTS, progress=lambda line: None)
        made = read_made(tmp_path / str(steps))
        assert made is not None
        return float(made["loss"])

    assert loss(60) < loss(2) - 0.5


def test_a_trained_head_drafts_right_tokens_for_its_model(tmp_path: Path) -> None:
    """Loss falls, no token changes, and the head is refused where a folder holds something else."""
    quiet: list[str] = []
    model, head = tmp_path / "model", tmp_path / "head"
    train_demo_model(model, replace(TINY, steps=60, layers=2), texts=TEXTS, progress=quiet.append)
    recipe = replace(TINY, steps=40, layers=2)
    losses = [
        train_head(tmp_path / str(steps), replace(recipe, steps=steps), model_folder=model, texts=TEXTS,
                   progress=quiet.append)
        for steps in (1, 40)
    ]  # fmt: skip
    assert losses[1] < losses[0]
    (tmp_path / "40").rename(head)
    params = Params(max_new_tokens=30, ignore_eos=True)
    prompts = ["Go on until", "there is nowhere"]
    with LLM(model, device="cpu", dtype="float32") as llm:
        expected = [one.token_ids for one in llm.generate(prompts, params)]
    trees: dict[str, Any] = {"speculative_topk": 2, "num_speculative_tokens": 4}
    with LLM(model, device="cpu", dtype="float32", draft_model=head, **trees) as llm:
        assert [one.token_ids for one in llm.generate(prompts, params)] == expected
        assert llm.stats().drafts.accepted_length_mean > 1.2
    with pytest.raises(ConfigError, match="is not empty"):
        train_head(head, recipe, model_folder=model, texts=TEXTS)


def test_the_command_copies_once(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "model"
    first = CliRunner().invoke(demo_model, [str(folder)])
    assert (first.exit_code, first.stdout) == (0, f"{folder}\n")
    assert sorted(path.name for path in folder.iterdir()) == FILES
    again = CliRunner().invoke(demo_model, [str(folder)])
    assert (again.exit_code, again.stdout) == (0, f"{folder} (was there already)\n")
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(ConfigError, match="does not hold a demo model"):
        copy_demo_model(tmp_path)
    with pytest.raises(ConfigError, match="does not hold a demo model"):
        train_demo_model(tmp_path, TINY, texts=TEXTS)
    assert (tmp_path / "thesis.txt").read_text() == "irreplaceable"


def test_a_demo_model_of_another_make_is_replaced(tmp_path: Path) -> None:
    train_demo_model(tmp_path / "model", TINY, texts=TEXTS, progress=lambda line: None)
    assert copy_demo_model(tmp_path / "model")
    assert read_made(tmp_path / "model") == read_made(demo_model_folder())


def test_the_text_is_that_of_the_folder_in_a_fixed_order(tmp_path: Path) -> None:
    go = "Go on until there is nowhere left to go to."
    (tmp_path / "b.py").write_text(
        '"""Module b."""\n\ndef go():\n    """Go on until there is nowhere left to go to."""\n'
    )
    (tmp_path / "a.py").write_text("x = 'no documentation'\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "c.py").write_text('"""Left out."""\n')
    (tmp_path / "LICENSE.txt").write_text("Do as you like.\n")
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text("topics = {'if': '  If.\\n  Else.', 'and': 'And.'}\n")
    texts = passages(tmp_path)
    assert [passage.text for passage in texts] == ["Module b.", go, go, "And.", "If.\nElse.", "Do as you like."]
    (question,) = [passage.question for passage in texts if passage.question]
    assert "b.go" in question


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path))):
        passages(tmp_path)


def test_a_vocabulary_that_the_text_cannot_fill_is_refused() -> None:
    with pytest.raises(ValueError, match="wanted 5000"):
        train_tokenizer(["too little"], 5000)
