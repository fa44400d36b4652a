"""Text of real models: chat templates, stop texts, streams of bytes, and logit processors named by requests."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")


from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.contract.events import (  # noqa: E402
    RequestArrived,
)
from lockstep.core.journal.reader import read_journal  # noqa: E402
from lockstep.core.journal.replay import fold  # noqa: E402
from lockstep.host.stop_texts import StopTexts  # noqa: E402
from lockstep.host.text import Text  # noqa: E402
from lockstep.runtime import (  # noqa: E402
    LLM,
    Params,
)
from tests.support import guide  # noqa: E402
from tests.support.small_llm import SMALL, TEXTS, run, write_model  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's settings and a tokenizer, without weights."""
    return write_model(tmp_path_factory.mktemp("model"))


# ----------------------------------------------------------------------------------------------------------------- text


def test_a_conversation_is_written_as_transformers_writes_it(folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference implementation is not installed")
    messages = [{"role": "user", "content": "the dog?"}, {"role": "assistant", "content": "sleeps"}]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    said = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert Text(folder).chat(messages) == said


def test_a_template_may_mark_what_the_model_reports(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference implementation is not installed")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% for message in messages %}\n{{ message.role }}: \n"
        "  {%- generation -%}  {{ message.content }}  {% endgeneration %}\n{% endfor %}"
    )
    messages = [{"role": "user", "content": "the dog?"}, {"role": "assistant", "content": "sleeps"}]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert Text(tmp_path).chat(messages) == theirs.apply_chat_template(messages, tokenize=False)


def test_a_template_cannot_reach_python(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    template = tmp_path / "chat_template.jinja"
    template.write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ConfigError, match=r"the chat template refuses the conversation: .*unsafe"):
        Text(tmp_path).chat([{"role": "user", "content": "x"}])
    template.write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ConfigError, match="roles must alternate"):
        Text(tmp_path).chat([])
    template.write_text("{{ messages | tojson }} {{ strftime_now('%Y') }}{% if tools %}!{% endif %}")
    text = Text(tmp_path)
    assert text.chat([{"role": "user", "content": "é"}], now=lambda: time.gmtime(0)) == (
        '[{"role": "user", "content": "é"}] 1970'
    )
    assert text.chat([], now=lambda: time.gmtime(2**30)) == "[] 2004", "each conversation has its own time"
    template.write_text("{{ 1 / 0 }}")
    with pytest.raises(ConfigError, match="the chat template refuses the conversation: division by zero"):
        Text(tmp_path).chat([])


def test_stop_texts_hold_back_what_may_begin_one(folder: Path) -> None:
    text = Text(folder)
    ids = text.encode(TEXTS[1])
    watch = StopTexts(text, [], ["🙂 tooth", "zz"])
    held = [watch.push(number, token) for number, token in enumerate(ids)]
    assert not any(stopped for stopped, _ in held)
    free = [number + 1 - behind for number, (_, behind) in enumerate(held)]
    assert free == sorted(free), "what was free stays free"
    first = len(text.encode(TEXTS[1].partition("🙂")[0]))
    assert free[-1] <= first
    again = StopTexts(text, [], ["and 🙂"])
    stopped = [again.push(number, token)[0] for number, token in enumerate(ids)]
    assert stopped.index(True) == max(i for i in range(len(ids)) if not text.decode(ids[:i]).count("and 🙂"))
    assert again.push(3, ids[3]) == (False, again.push(3, ids[3])[1]), "a number from before takes the text back"


def byte_fallback(folder: Path) -> Text:
    """A tokenizer like that of Llama 2: bytes stand for missing tokens, and the first space is stripped."""
    from tokenizers import Tokenizer, decoders, models

    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "é"]
    model = models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return Text(folder)


def test_no_sequence_of_tokens_is_too_odd_for_a_stream_of_text(tmp_path: Path) -> None:
    """Bytes that formed a character may form none with the bytes behind them: streams of tokenizers fail there."""
    text = byte_fallback(tmp_path)
    for seed in range(40):
        rng = random.Random(seed)
        watch = StopTexts(text, [rng.randrange(262) for _ in range(seed % 5)], ["no such text"])
        for number in range(60):
            watch.push(number, rng.randrange(262))
    plain = [text.tokenizer.token_to_id(word) for word in ("▁a", "b", "<0xC3>", "<0xA9>", "▁a", "▁", "a")]
    step = text.stream([text.tokenizer.token_to_id("b")])
    assert "".join(map(step, plain)) == " abé a a"


# ---------------------------------------------------------------------------------------------------- logit processors

SAMPLING_PAGE = Path(__file__).resolve().parents[2] / "docs" / "sampling.md"


@pytest.fixture
def band(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor that docs/sampling.md shows, installed."""
    guide.install(tmp_path / "site", page=SAMPLING_PAGE)
    monkeypatch.syspath_prepend(tmp_path / "site")


@pytest.mark.usefixtures("band")
def test_a_request_names_processors_with_arguments(folder: Path, tmp_path: Path) -> None:
    """The example of docs/sampling.md, with retractions, through journal and replay."""
    narrow, wide = {"band": {"first": 20, "stop": 25}}, {"band": {"first": 100, "stop": 200}}
    common: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    stirred = {**SMALL, "overlap_depth": 2, "retract_every": 2}
    with LLM(folder, random_weights=3, journal=tmp_path / "run", logit_processors=["band"], **stirred) as llm:
        inside, outside, free = llm.generate(
            [[5, 6], [5, 6, 7], [8]],
            [Params(**common, logit_processors=narrow), Params(**common, logit_processors=wide), Params(**common)],
        )
        refusals: dict[str, str] = {
            "bond": "names `bond`, which is not enabled here; enabled: band",
            "band": "refuses its arguments: `first` and `stop` must be token ids up to 300, got {}",
        }
        for name, said in refusals.items():
            (refused,) = llm.generate([[5]], Params(logit_processors={name: {}}))
            assert refused.finish_reason == "bad_request"
            assert refused.error.startswith("`logit_processors`")
            assert refused.error.endswith(said)
        with pytest.raises(
            ConfigError, match=r"the arguments of `band` must be a JSON object: .*not JSON serializable"
        ):
            llm.generate([[5]], Params(logit_processors={"band": {"first": {1, 2}}}))
        with pytest.raises(ConfigError, match=r"`logit_processors` is \{'band': 5\}: expected `object`"):
            llm.generate([[5]], Params(logit_processors={"band": 5}))  # type: ignore[dict-item]
    assert set(inside.token_ids) <= set(range(20, 25))
    assert set(outside.token_ids) <= set(range(100, 200))
    assert not set(free.token_ids) <= set(range(100, 200))
    journal = read_journal(tmp_path / "run")
    assert journal.header.host["logit_processors"] == "band (lockstep-band 1.0)"
    asked = [event.sampling for event, _ in fold(tmp_path / "run") if isinstance(event, RequestArrived)]
    assert next(one.logit_processors for one in asked if one is not None) == (("band", '{"first": 20, "stop": 25}'),)


@pytest.mark.usefixtures("band")
def test_a_line_names_processors_that_the_operator_enabled(folder: Path) -> None:
    line = json.dumps({"prompt": "the dog", "logit_processors": {"band": {"first": 20, "stop": 25}}})
    result = run(folder, "-", "--show-token-ids", "--max-new-tokens", "6", "--logit-processor", "band", stdin=line)
    assert result.return_value == 0
    assert set(json.loads(result.stdout)["token_ids"]) <= set(range(20, 25))
    assert "names `band`, which is not enabled here; enabled: none" in run(folder, "-", stdin=line).stdout
    assert "got `bond`; installed: band" in str(run(folder, "-", "--logit-processor", "bond", stdin=line).exception)
