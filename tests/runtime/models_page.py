"""Writes docs/models.md: every architecture of `tests.support.architectures` through the engine, beside transformers.

python -m tests.runtime.models_page               some two minutes
python -m tests.runtime.models_page --processes   two ranks as processes of an engine: a quarter of an hour
python -m tests.runtime.models_page --only NAME   one row, printed
python -m tests.runtime.models_page --again A B   these rows; the others stay as they are on the page
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from lockstep.core.contract.errors import ConfigError
from lockstep.runtime import LLM
from lockstep.runtime.attention.rules import names_of
from lockstep.runtime.checkpoint import read_config
from lockstep.runtime.models import build_model, read_settings
from lockstep.runtime.page_bytes import sliding_layers
from tests.runtime.test_models import Ranks
from tests.support.architectures import (
    ARCHITECTURES,
    CHUNK,
    HYBRIDS,
    REFUSED,
    REQUESTS,
    SMALL,
    TRACK_INTERVAL,
    WINDOW_SHARE,
    greedy_answers,
    mixed_prompts,
    save_architecture,
    serve,
)
from tests.support.model_passes import Passes
from tests.support.omni import CLIPS_MAX, OMNI_FAMILIES, greedy_omni, omni_conversations, save_thinker
from tests.support.pictures import FAMILIES, conversations, greedy_pictures, save_family, serve_pictures
from tests.support.sounds import SOUND_FAMILIES, greedy_sounds, save_sound_family, sound_conversations
from tests.support.videos import VIDEO_FAMILIES, greedy_videos, save_video_family, video_conversations

PAGE = Path(__file__).parents[2] / "docs/models.md"
VIDEO_NAMES = {f"{name}, videos": name for name in (*VIDEO_FAMILIES, *OMNI_FAMILIES)}
SOUND_NAMES = (*SOUND_FAMILIES, *OMNI_FAMILIES)
YES, NO = "equal", "**different**"
HEAD = f"""# Models

`--model-backend` of `serve` and `generate`, `model_backend` of `LLM`, selects the code that runs a model: `native` is
our own, for the architectures of [runtime.md](runtime.md), "Models"; `transformers` is the modelling code of that
library with our attention, KV pool and batches; `auto`, the default, is native for the architectures that have it, and
transformers for the others. A model whose settings our own code refuses by name may run with `transformers`. How that
works: [runtime.md](runtime.md), "Models of transformers".

The tables are written by `python -m tests.runtime.models_page`, with transformers {transformers.__version__}. A small
random model of each architecture answers {REQUESTS} prompts of 1 to 70 tokens, some of which begin alike, and its
greedy tokens are compared with those of `transformers.generate`, one prompt at a time, in float32 on a CPU. The engine
computes prompts in chunks of {CHUNK}, finds prefixes in its cache, retracts a request every few decodes, and verifies
every KV slot before it is read (`debug`). Columns: the overlap depth; the logits of two ranks (with `--processes` the
tokens of an engine of two processes); a run with a smaller pool of pages for layers with windows
(`swa_full_tokens_ratio`), for models with windows in some layers; and whether our own code runs the same model.
Attention beyond "all positions, scores times 1/sqrt(head dim)" is named.

## What runs by transformers' code

| model | class | attention | overlap 0 | overlap 1 | two ranks | window pages | native too |
|---|---|---|---|---|---|---|---|
"""
STATES_HEAD = f"""
Two ranks follow the library's own plan of the model. "no plan": `tp` is refused by name, as are numbers of ranks that
do not divide the heads. On a CPU DeepSeek's latent attention has a compressed cache; on a GPU, whose kernels have no
heads of its width, and with KV in fp8, it has keys and values of every head, padded to one width.

## Models with states

Layers with linear attention, state space layers and short convolutions keep a state of fixed size for each request.
Prefixes from the cache continue from checkpoints, here every {TRACK_INTERVAL} tokens (`mamba_track_interval`), and the
state with which each row begins is verified, too. "drafts": n-grams, with a state behind each draft.

| model | class | layers that attend / with states | overlap 0 | overlap 1 | drafts | two ranks |
|---|---|---|---|---|---|---|
"""
BEHIND = """
A later chunk of a prompt is computed token by token in Jamba, whose code ignores the state in front of several tokens.
The MTP layers of Qwen3-Next and Qwen3.5 draft, with pictures, too (`speculative_method` `mtp`):
`tests/runtime/test_mtp.py` compares every draft with the library's own layer. Adapters change linear layers outside of
the layers with states.
"""
PICTURES_HEAD = f"""
## Models with pictures

A small random model of each family, with its processor, answers {REQUESTS} conversations with 0 to 3 pictures of four
shapes, and its greedy tokens are compared with those of `transformers.generate`. Chunks of {CHUNK} tokens end inside
of pictures, too; prefixes with pictures are found in the cache, requests are retracted. "little room": the encoder's
cache holds no more than the largest request needs, and the encoder is given 16 tokens at once. LLaVA-OneVision takes
one picture at most: of several the library makes other features than of one. How it works:
[runtime.md](runtime.md), "Pictures, sound and video".

| model | class | positions | overlap 0 | overlap 1 | little room | drafts |
|---|---|---|---|---|---|---|
"""
NO_PICTURES = """
Other models of the library with `get_image_features` are tried, and were not compared. Refused by name: pictures whose
tokens attend to later ones (Gemma 3, PaliGemma), pictures with a draft model or a head of EAGLE-3, or with prefill and
decode engines. With `--tp` every rank has the whole encoder and encodes every picture; transformers must have a plan to
split the text, which its dense Qwen3-VL lacks. Qwen2.5-VL, Qwen3-VL MoE, both Qwen3.5, LLaVA-1.5 and Idefics 3 were
compared on two ranks, and Qwen2-Audio and Qwen2.5-Omni with sound. Without torchvision the processors of transformers
take pictures by Pillow, that of Pixtral and Mistral 3 included, which transformers itself refuses without it.
"""
SOUND_HEAD = f"""
## Models with sound

In the same way, {REQUESTS} conversations with 0 to 2 audio clips of five lengths, rates and formats, which transformers
loads by itself (`load_audio`). Those for Qwen-Omni have up to three clips and pictures, in any order.

| model | class | overlap 0 | overlap 1 | little room | drafts |
|---|---|---|---|---|---|
"""
OTHER_SOUNDS = """
Of Qwen2.5-Omni and Qwen3-Omni the thinker is served, which answers in text, from its own folder or that of the whole
model; the sound of a video is left out, and `use_audio_in_video` is refused by name. Of a clip under a second beside a
longer one transformers' Qwen3-Omni makes other features than of the clip alone, because it pads it; here they are
those of the clip alone, and conversations of its rows have one clip at most. Other models of the library with sound are
tried, and were not compared. Refused by name: sound along three axes of positions that are counted in another way,
sound with an adapter for prompts that have any (Granite Speech), and what is refused for pictures.
"""
VIDEO_HEAD = f"""
## Models with videos

{REQUESTS} conversations with 0 to 2 films and pictures, of five sizes, lengths and rates; for Qwen-Omni 0 to 3 films,
clips and pictures. Frames are those that transformers reads by PyAV, and patches are Lockstep's in both
(`host/media/frames.py`); `tests/runtime/test_videos.py` compares these with transformers'.

| model | class | positions | overlap 0 | overlap 1 | little room | drafts |
|---|---|---|---|---|---|---|
"""
NO_VIDEOS = """
Videos of other models are refused by name, if their encoder takes no `video_grid_thw`, and without torchvision if their
processor is none of those of Qwen-VL.
"""
REFUSED_HEAD = """
## What is refused

Each is one error at start, before weights are read if config.json shows it, and otherwise after one small pass:

| model | error |
|---|---|
"""
LIMITS = """
Also refused by this backend: quantised weights, by the name of the method; models with code in their folder
(`auto_map`), which is never run; `longrope` positions beyond the original context, which is the limit of such a model;
`fp8_activations on`. Adapters may change linear layers, and none of the experts. CUDA graphs are captured for models
that the library declares free of decisions on the host; for the others the log has the reason.
"""


def main(arguments: list[str]) -> int:
    """Run the architectures, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only")
    parser.add_argument("--again", nargs="+", default=[])
    parser.add_argument("--processes", action="store_true")
    given = parser.parse_args(arguments)
    only = given.only
    torch.set_num_threads(1)
    there = PAGE.read_text(encoding="utf-8").splitlines() if given.again else []
    rows: dict[str, str] = {}
    for name in (*ARCHITECTURES, *HYBRIDS, *FAMILIES, *SOUND_NAMES, *VIDEO_NAMES):
        if only is None or name == only:
            began, kept = time.perf_counter(), next((one for one in there if one.startswith(f"| {name} | `")), None)
            made = row if name in ARCHITECTURES else row_with_states if name in HYBRIDS else row_with_media
            again = name in given.again or kept is None
            rows[name] = made(name, processes=given.processes) if again else str(kept)
            if again:
                print(rows[name], f"{time.perf_counter() - began:.0f} s", flush=True)
    refused = [f"| {name} | {refusal(name)} |" for name in REFUSED if only is None or name == only]
    print("\n".join(refused))
    if only is None:
        plain, states, pictures, sounds, videos = (
            "".join(f"{rows[name]}\n" for name in names)
            for names in (ARCHITECTURES, HYBRIDS, FAMILIES, SOUND_NAMES, VIDEO_NAMES)
        )
        text = HEAD + plain + STATES_HEAD + states + BEHIND + PICTURES_HEAD + pictures + NO_PICTURES
        text += SOUND_HEAD + sounds + OTHER_SOUNDS + VIDEO_HEAD + videos + NO_VIDEOS
        text += REFUSED_HEAD + "\n".join(refused) + "\n" + LIMITS
        PAGE.write_text(text, encoding="utf-8")
    return int(any(NO in one for one in rows.values()))


def row(name: str, *, processes: bool) -> str:
    """Return the row of one architecture."""
    with tempfile.TemporaryDirectory() as folder:
        model = save_architecture(Path(folder), name)
        answers = greedy_answers(model)
        kind = type(model).__name__
        built = build_model(folder, torch.float32, backend="transformers")
        rules, sliding = names_of(built.rules), len(sliding_layers(built))

        equal, split = comparisons(Path(folder), model, answers, processes=processes)
        cells = [equal(overlap_depth=0), equal(overlap_depth=1), or_reason(split)]
        some = 0 < sliding < built.layers
        cells.append(equal(overlap_depth=1, swa_full_tokens_ratio=WINDOW_SHARE) if some else "")
        own = or_reason(lambda: "yes" if read_settings(folder, backend="native") else "")
    return "| " + " | ".join([name, f"`{kind}`", ", ".join(rules), *cells, own]) + " |"


def comparisons(
    folder: Path, model: Any, answers: Any, *, processes: bool, **settings: Any
) -> tuple[Callable[..., str], Callable[[], str]]:
    """Return a function that compares the answers served under options, and one that compares two ranks."""

    def equal(**options: Any) -> str:
        served = serve(folder, model_backend="transformers", **settings, **options)
        assert served.cached_tokens
        assert served.retractions
        return YES if served.answers == answers else NO

    def split() -> str:
        if processes:
            return equal(tp=2, device="cpu")
        return YES if split_logits_are_equal(folder, model) else NO

    return equal, split


def row_with_states(name: str, *, processes: bool) -> str:
    """Return the row of one architecture with layers that keep states."""
    with tempfile.TemporaryDirectory() as folder:
        model = save_architecture(Path(folder), name)
        answers = greedy_answers(model)
        built = build_model(folder, torch.float32, backend="transformers")
        layers = f"{built.layers} / {len({part.layer for part in built.states})}"

        settings = {"mamba_track_interval": TRACK_INTERVAL}
        equal, split = comparisons(Path(folder), model, answers, processes=processes, **settings)
        drafts = equal(overlap_depth=1, speculative_method="ngram", num_speculative_tokens=2)
        cells = [equal(overlap_depth=0), equal(overlap_depth=1), drafts, or_reason(split)]
    return "| " + " | ".join([name, f"`{type(model).__name__}`", layers, *cells]) + " |"


def row_with_media(name: str, *, processes: bool) -> str:
    """Return the row of one family with pictures, sound or videos."""
    filmed = VIDEO_NAMES.get(name)
    family = FAMILIES.get(filmed or name)
    settings: dict[str, Any] = {"pages": 1200, **({} if family is None else family.settings)}
    with tempfile.TemporaryDirectory() as folder:
        if (thinker := filmed or name) in OMNI_FAMILIES:
            model, processor = save_thinker(Path(folder), thinker)
            kinds = ("audio", "image", "video") if filmed else ("audio", "image")
            asked = omni_conversations(REQUESTS, kinds, CLIPS_MAX[thinker])
            answers = greedy_omni(Path(folder), model, processor, asked)
        elif filmed is not None:
            model, processor = save_video_family(Path(folder), filmed)
            asked = video_conversations(REQUESTS)
            answers = greedy_videos(Path(folder), model, processor, asked)
        elif family is None:
            model, processor = save_sound_family(Path(folder), name)
            asked = sound_conversations(REQUESTS)
            answers = greedy_sounds(Path(folder), model, processor, asked)
        else:
            model, processor = save_family(Path(folder), name)
            asked = conversations(REQUESTS, family.pictures_max)
            answers = greedy_pictures(Path(folder), model, processor, asked)

        def equal(**options: Any) -> str:
            served = serve_pictures(Path(folder), asked, **settings, **options)
            assert served.cached_tokens
            assert served.retractions
            return YES if served.answers == answers else NO

        axes = "time, height, width" if hasattr(model.model, "get_rope_index") else ""
        cells = [] if name in SOUND_NAMES else [axes]
        cells += [equal(overlap_depth=0), equal(overlap_depth=1)]
        cells.append(equal(encoder_cache_tokens=room(Path(folder), asked), encoder_budget_tokens=16))
        cells.append(equal(overlap_depth=1, speculative_method="ngram", num_speculative_tokens=2))
    return "| " + " | ".join([name, f"`{type(model).__name__}`", *cells]) + " |"


def room(folder: Path, asked: Any) -> int:
    """Return the tokens of encoder output that the conversation with the most needs."""
    with LLM(folder, device="cpu") as llm:
        prompts = [llm.chat_prompt(messages) for messages, _, _ in asked]
    return max(sum(one.positions for one in prompt.contents) for prompt in prompts if not isinstance(prompt, list))


def split_logits_are_equal(folder: Path, model: Any) -> bool:
    """Compare the logits of two ranks, which are threads here, with those of transformers; in two chunks."""
    prompt, _ = max(mixed_prompts(), key=lambda pair: len(pair[0]))
    prompt, meeting = prompt[:30], Ranks(2)

    def run(rank: int) -> Any:
        part = build_model(folder, torch.float32, parallel=meeting.parallel(rank), backend="transformers")
        passes = Passes(part)
        return torch.cat([passes.run({0: chunk})[0] for chunk in (prompt[:17], prompt[17:])])

    read_settings(folder, 2, "transformers")  # raises before threads wait for each other
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(2)))
    with torch.inference_mode():
        want = model(torch.tensor([prompt]), use_cache=False).logits[0].float()
    return all(bool((one - want).abs().max() <= 1e-4 * want.abs().max()) for one in found)


def or_reason(run: Callable[[], str]) -> str:
    """Return a result, or why it is refused in a few words; nothing if our own code lacks the architecture."""
    try:
        return run()
    except ConfigError as error:
        text = str(error)
        if "has no plan" in text:
            return "no plan"
        lacking = "`architectures` of config.json must begin with" in text
        return "" if lacking else " ".join(text.splitlines()[-1].split())


def refusal(name: str) -> str:
    """Return the error for a model that cannot run, in one line."""
    config_class, special = REFUSED[name]
    config = getattr(transformers, config_class)(**(SMALL | special))
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__ if known else f"{name}ForConditionalGeneration"
        try:
            build_model(
                read_config(Path(folder)) | {"architectures": [kind]}, random_weights_seed=0, backend="transformers"
            )
        except ConfigError as error:
            text = str(error).partition("\nhint")[0]
            first, _, rest = text.partition("cannot run by transformers' code here:")
            reasons = (rest or first).strip().splitlines()
            return "; ".join(reason.strip() for reason in reasons)
    return NO


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
