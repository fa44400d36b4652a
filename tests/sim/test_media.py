"""Media in the simulator: tokens and times of encoders, turns with media, and the requests that wait."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from lockstep.core.contract.commands import EncodeMedia
from lockstep.core.contract.errors import ConfigError
from lockstep.core.journal.reader import read_journal
from lockstep.host.media.content import content_of
from lockstep.host.media.division import divided, encoder_positions
from lockstep.sim.catalogue import load_encoders, load_gpu
from lockstep.sim.cli.plan import plan
from lockstep.sim.cluster.scenario import ClusterScenario, EngineGroup
from lockstep.sim.cluster.setup import assemble_cluster
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.cost import CapacityError, CatalogueError
from lockstep.sim.cost.encoder import AUDIO_SECONDS_MAX, EncoderCost, Encoders, MediaContent
from lockstep.sim.host.encoder_lane import EncoderLane
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.plan.question import Question
from lockstep.sim.plan.trial import Trial
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.run_folder import write_run
from lockstep.sim.run.simulate import Run, simulate
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.workload.media import MediaSpec, parse_media, with_media
from lockstep.sim.workload.token_runs import cut_runs
from lockstep.sim.workload.workload import SourceReading, WorkloadError, open_workload, workload_digest

SMALL = "gen:n=40,rate=20,input=fixed:64,output=fixed:6"
IMAGES = "image=0.5x1..3:640x480/6"


def encoders(name: str) -> Encoders:
    found = load_encoders(name)
    assert found is not None
    return found


def ran(media: str | None = IMAGES, folder: Path | None = None, **fields: Any) -> Run:
    asked = {"model": "qwen2.5-vl-7b", "gpu": "h100", "workload": SMALL, "media": media, **fields}
    return simulate(assemble(Scenario(**asked), {}), folder=folder)


# ------------------------------------------------------------------------------------------------------------ encoders


@pytest.mark.parametrize(
    ("model", "params", "kinds"),
    [
        # 8.29 billion in total, 7.62 of them the language model's; 8.77 billion and 8.19 of Qwen3-VL.
        ("qwen2.5-vl-7b", 676_550_144, ("image", "video")),
        ("qwen3-vl-8b", 576_388_336, ("image", "video")),
        # SigLIP-So400m, 417 million, and the matrix behind it; Whisper large-v3's encoder, 637 million, likewise.
        ("gemma-3-27b", 416_866_032 + 1152 * 5376 + 1152, ("image",)),
        ("qwen2-audio-7b", 636_968_960 + 1280 * 4096 + 4096, ("audio",)),
    ],
)
def test_encoders_are_as_large_as_they_are(model: str, params: int, kinds: tuple[str, ...]) -> None:
    found = encoders(model)
    assert found.params == params
    assert found.kinds() == kinds
    assert found.describe()["source"]


def test_a_model_of_text_has_no_encoder() -> None:
    assert load_encoders("qwen3-8b") is None


def test_an_image_is_whole_squares_of_patches_within_the_bounds() -> None:
    qwen25, qwen3, gemma = encoders("qwen2.5-vl-7b"), encoders("qwen3-vl-8b"), encoders("gemma-3-27b")
    assert qwen25.image(1024, 768).tokens == 27 * 37  # of 28 x 28 pixels
    assert qwen3.image(1024, 768).tokens == 24 * 32  # of 32 x 32
    assert gemma.image(1024, 768).tokens == gemma.image(64, 64).tokens == 256
    assert qwen25.image(8, 8).tokens == 4, "at least 3,136 pixels"
    assert qwen25.image(10_000, 10_000).tokens <= 12_845_056 // 28**2
    assert qwen25.positions(qwen25.image(1024, 768)) == 4 * 27 * 37
    with pytest.raises(CatalogueError, match=r"a picture of 4000x10 is more than 200 times as long as wide"):
        qwen25.image(4000, 10)


@pytest.mark.parametrize(
    ("model", "tokens"), [("qwen2.5-vl-7b", (33, 4, 16_302, 256, 432)), ("qwen3-vl-8b", (80, 64, 16_302, 196, 310))]
)
def test_images_have_the_tokens_that_the_public_processors_give_them(model: str, tokens: tuple[int, ...]) -> None:
    # By `smart_resize` of transformers 5, with the bounds of each checkpoint's preprocessor_config.json.
    sizes = ((37, 911), (3, 3), (5000, 4000), (448, 448), (333, 1001))
    assert tuple(encoders(model).image(*size).tokens for size in sizes) == tokens


def test_a_video_is_pairs_of_frames_and_a_sound_a_token_for_40_ms() -> None:
    video = encoders("qwen2.5-vl-7b").video(1280, 720, 10)
    assert video.segments == 10  # 2 frames a second, 2 in a patch
    assert video.tokens == 10 * 720 <= 10 * 768
    short = encoders("qwen3-vl-8b").video(640, 360, 0.5)
    assert short.segments == 2, "at least 4 frames"
    heard = encoders("qwen2-audio-7b")
    assert heard.sound(30).tokens == 750
    assert heard.sound(12).tokens == 300
    assert heard.positions(heard.sound(1)) == 1500, "whatever its length, it is padded to 30 s"
    with pytest.raises(CatalogueError, match=rf"takes sounds of up to {AUDIO_SECONDS_MAX:g} s, got `31s`"):
        heard.sound(31)
    with pytest.raises(CatalogueError, match="qwen2-audio-7b takes no image, but audio"):
        heard.image(64, 64)
    with pytest.raises(CatalogueError, match="gemma-3-27b takes no video, but image"):
        encoders("gemma-3-27b").video(64, 64, 1)


def test_encoding_takes_at_least_what_its_products_take() -> None:
    found, gpu = encoders("qwen2.5-vl-7b"), load_gpu("h100")
    image = found.image(1024, 768)
    cost = EncoderCost(found, gpu, 1, "weights")
    assert found.vision is not None
    floor_us = 2.0 * found.vision.layers * found.vision.layer_params * found.positions(image) / 989e6
    assert floor_us < cost.single_us(image) < 3 * floor_us
    assert cost.group_us([image, image]) < 2 * cost.single_us(image), "latencies are there once"
    assert cost.group_us([]) == 0.0
    slower = EncoderCost(found, gpu, 1, "weights", 2.0)
    assert slower.single_us(image) == 2 * cost.single_us(image)


def test_whole_on_each_gpu_several_images_are_encoded_side_by_side() -> None:
    found, gpu = encoders("qwen2.5-vl-7b"), load_gpu("h100")
    image = found.image(1024, 768)
    split, whole = EncoderCost(found, gpu, 4, "weights"), EncoderCost(found, gpu, 4, "data")
    assert whole.group_us([image] * 4) < 0.5 * split.group_us([image] * 4)
    assert split.group_us([image]) < whole.group_us([image]), "one alone is faster split"
    assert whole.group_us([image] * 5) > 1.5 * whole.group_us([image] * 4), "the fifth is on a GPU that has one"
    alone = EncoderCost(found, gpu, 1, "data").group_us([image])
    assert alone < whole.group_us([image] * 4) < 1.1 * alone, "what is added is the all-gather"
    assert whole.weights_bytes() == found.weights_bytes
    assert split.weights_bytes() == math.ceil(found.weights_bytes / 4)


def test_contents_are_divided_as_the_ranks_of_the_runtime_divide_them() -> None:
    """By one function, over the positions that both count alike."""
    found, gpu = encoders("qwen2.5-vl-7b"), load_gpu("h100")
    sizes = ((1024, 768), (300, 200), (2048, 1536), (640, 480), (1280, 960), (64, 64))
    contents = [found.image(*size) for size in sizes]
    costs = [found.positions(content) for content in contents]
    grid = content_of([7] * contents[0].tokens, {"image_grid_thw": [[1, 54, 74]]})
    assert encoder_positions(grid) == costs[0]
    owners, alone = divided(costs, 2), EncoderCost(found, gpu, 1, "data")
    shares = [[one for one, owner in zip(contents, owners, strict=True) if owner == rank] for rank in (0, 1)]
    longest = max(alone.group_us(share) for share in shares)
    assert longest < EncoderCost(found, gpu, 2, "data").group_us(contents) < 1.05 * longest
    assert 1.2 * longest < alone.group_us(contents)


def test_heads_that_cannot_be_split_are_refused_with_the_way_out() -> None:
    found = encoders("qwen2-audio-7b")
    with pytest.raises(CapacityError, match=r"tp 8 does not divide the 20 heads .*\n.*--mm-encoder-tp-mode data"):
        EncoderCost(found, load_gpu("h100"), 8, "weights")
    assert EncoderCost(found, load_gpu("h100"), 8, "data").single_us(found.sound(5)) > 0


# ------------------------------------------------------------------------------------------------- turns with media


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("picture=0.3:10x10", "expected KIND=SHARE"),
        ("image=0.3", "pictures have a size in pixels"),
        ("image=0:10x10", "the share of turns is above 0 and at most 1"),
        ("image=1.5:10x10", "the share of turns is above 0 and at most 1"),
        ("image=0.3x4..2:10x10", "a turn has 1 to 1,000 of them"),
        ("image=0.3:10x10:5s", "videos and sounds last some time, images none"),
        ("video=0.3:10x10", "videos and sounds last some time, images none"),
        ("audio=0.3:10x10:5s", "pictures have a size in pixels, sounds have none"),
        ("audio=0.3:5", "expected KIND=SHARE"),
        ("image=0.3:0x10", "sides have 1 to 32,768 pixels"),
        ("image=0.3:10x10/0", "there are 1 to 1,000,000 different contents"),
        ("image=0.3:10x10/1000001", "there are 1 to 1,000,000 different contents"),
        ("image=0.5:640x480/99999999999", "there are 1 to 1,000,000 different contents"),
        (f"image=0.3:10x10/{'9' * 5000}", "4300 digits"),
        (f"image=0.3x{'9' * 5000}:10x10", "4300 digits"),
        ("image=0.3:10x10/5:zipf:99", "the exponent is at most 10"),
    ],
)
def test_media_that_cannot_be_read_are_refused_with_an_example(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        parse_media(text)
    assert f"`media` cannot be `{text}`" in str(refused.value)
    assert "hint: such as --media" in str(refused.value)


@pytest.mark.parametrize("text", ["image=0.5:64x64;recorded", "recorded;recorded", "recorded; audio=0.1:2s"])
def test_recorded_media_stand_alone(text: str) -> None:
    problem = f"`media` cannot be `{text}`: recorded excludes other media, as it means all media of the workload"
    with pytest.raises(ConfigError, match=problem):
        parse_media(text)
    assert parse_media("recorded") == ()


def test_media_are_read_word_for_word() -> None:
    assert parse_media("image=0.3x1..4:1024x768/200:zipf:1.2;audio=0.1:12s") == (
        MediaSpec("image", 0.3, 1, 4, 1024, 768, 0.0, 200, 1.2),
        MediaSpec("audio", 0.1, 1, 1, 0, 0, 12.0),
    )
    assert parse_media("video=0.05x2:640x360:500ms") == (MediaSpec("video", 0.05, 2, 2, 640, 360, 0.5),)


def test_prompts_grow_by_their_media_which_stand_in_front_of_the_last_text() -> None:
    found = encoders("qwen2.5-vl-7b")
    text = open_workload("gen:n=200,input=fixed:100", seed=3).turns
    turns = with_media(text, parse_media("image=0.5x2:640x480"), found, seed=3)
    size = found.image(640, 480).tokens
    having = [turn for turn in turns if turn.media]
    assert 70 < len(having) < 130
    for turn, before in zip(turns, text, strict=True):
        assert turn.prompt_tokens == before.prompt_tokens + size * len(turn.media) == sum(turn.prompt[1::2])
        assert [media.start for media in turn.media] == [68, 68 + size][: len(turn.media)]
        if not turn.media:
            assert turn == before
    assert len({media.digest for turn in having for media in turn.media}) == 2 * len(having), "no two are equal"


def test_a_session_keeps_its_media_where_they_stood() -> None:
    text = open_workload("gen:sessions=30,turns=fixed:3,input=fixed:50,output=fixed:20", seed=5).turns
    turns = with_media(text, parse_media("image=0.6:640x480"), encoders("qwen2.5-vl-7b"), seed=5)
    kept = 0
    for turn in turns:
        if turn.after is None:
            continue
        before = turns[turn.after]
        assert turn.media[: len(before.media)] == before.media
        assert cut_runs(turn.prompt, before.prompt_tokens) == list(before.prompt), "it begins with the one before"
        kept += bool(before.media)
    assert kept > 10


def test_equal_contents_are_drawn_from_as_many_as_there_are() -> None:
    text = open_workload("gen:n=400", seed=1).turns
    turns = with_media(text, parse_media("image=1:64x64/20:zipf"), encoders("qwen2.5-vl-7b"), seed=1)
    counts = np.unique([turn.media[0].digest for turn in turns], return_counts=True)[1]
    assert len(counts) <= 20
    assert counts.max() > 3 * counts.min(), "the first is drawn most"
    other = with_media(text, parse_media("image=1:64x64/20:zipf"), encoders("qwen3-vl-8b"), seed=1)
    assert [t.media[0].digest for t in other] == [t.media[0].digest for t in turns], "whatever the model"


@pytest.mark.parametrize(
    ("spec", "digest"),
    [
        ("image=0.8x1..3:64x64/20:zipf", "941d5b21d183c5aeb74a451d9202efd8"),
        ("image=0.8x1..3:64x64/20:zipf:1.7;video=0.3:64x64:1s/7", "289c591165be6fcd8f2ece428d00c81c"),
        ("image=1:64x64/50000", "b05ee88bd7fece27661e3cbd9af7066a"),
        ("image=1:64x64/50000:zipf:0.3", "e0d05978fc6ca70e99ea40a57194831c"),
    ],
)
def test_what_was_drawn_is_drawn_again(spec: str, digest: str) -> None:
    text = open_workload("gen:n=300", seed=1).turns
    assert workload_digest(with_media(text, parse_media(spec), encoders("qwen2.5-vl-7b"), seed=1)) == digest


def test_digest_names_the_media() -> None:
    text = open_workload("gen:n=20", seed=1).turns
    found = encoders("qwen2.5-vl-7b")
    digests = {
        workload_digest(with_media(text, parse_media(spec), found, seed=1))
        for spec in ("image=1:64x64", "image=1:64x64/2", "image=1:64x64/3", "video=1:64x64:1s")
    }
    assert len(digests) == 4
    assert workload_digest(replace(text, media=None)) == workload_digest(text) not in digests


# ------------------------------------------------------------------------------------------------------------- the lane


class Told:
    def __init__(self) -> None:
        self.intervals: list[tuple[int, ...]] = []

    def encoder_interval(self, *interval: int) -> None:
        self.intervals.append(interval)

    def media_wait(self, request_id: int, waited_us: int) -> None: ...


def lane(gpus: int) -> tuple[EncoderLane, Told, list[EncodeMedia], EncoderCost]:
    found = encoders("qwen2.5-vl-7b")
    cost, told = EncoderCost(found, load_gpu("h100"), 1, "weights"), Told()
    contents = {bytes([i]): found.image(640, 480) for i in range(5)}
    orders = [EncodeMedia(digest, content.tokens) for digest, content in contents.items()]
    return EncoderLane(cost, contents, gpus, told), told, orders, cost


def test_on_the_engines_gpus_a_group_waits_for_what_runs_and_batches_for_the_group() -> None:
    encoder, told, (a, b, c, *_), cost = lane(0)
    encoder.begin(a)
    encoder.begin(b)
    took_us = round(cost.group_us([MediaContent("image", a.encoder_tokens)] * 2))
    assert encoder.start(100, 900) == 900 + took_us == encoder.next_us
    encoder.begin(c)
    assert encoder.start(1_000, 900 + took_us) == 0, "c is of the next group"
    assert [encoder.take(encoder.next_us).digest for _ in range(2)] == [a.digest, b.digest]
    assert encoder.start(900 + took_us, 0) > 900 + took_us
    assert told.intervals[0] == (900, 900 + took_us, 2, 2 * a.encoder_tokens, 0)


def test_gpus_of_its_own_take_what_comes_next_and_delay_no_pass() -> None:
    encoder, told, (a, b, c, *_), cost = lane(2)
    for order in (a, b, c):
        encoder.begin(order)
    assert encoder.start(100, 900) == 0
    took_us = round(cost.single_us(MediaContent("image", a.encoder_tokens)))
    assert [interval[:2] for interval in told.intervals] == [
        (100, 100 + took_us), (100, 100 + took_us), (100 + took_us, 100 + 2 * took_us)
    ]  # fmt: skip
    assert encoder.next_us > 100 + took_us, "what came out has to come over"


# --------------------------------------------------------------------------------------------------------------- runs


def test_a_run_with_media_counts_what_is_encoded_and_what_is_not() -> None:
    run = ran()
    media = run.data.summary["media"]
    spans = [turn.media for turn in run.setup.workload.turns if turn.media]
    assert media["requests"] == len(spans)
    assert media["contents"] == sum(len({item.digest for item in one}) for one in spans)
    assert media["prompt_tokens"] == sum(item.tokens for one in spans for item in one)
    assert media["encoded"] == len({item.digest for one in spans for item in one}) == 6, "all fit the cache"
    assert media["reused"] == media["contents"] - 6
    assert media["embeddings_evicted"] == 0
    assert run.data.encoder is not None
    assert media["encoder_busy_us"] == int((run.data.encoder[:, 1] - run.data.encoder[:, 0]).sum()) > 0
    assert 0 < media["requests_waited"] < len(spans)
    assert any("uncalibrated" in line for line in run.remarks())
    assert run.data.summary["requests"]["completed"] == 40


def test_batches_and_the_encoder_share_the_gpu_one_after_the_other() -> None:
    run = ran()
    batches = run.data.batches
    assert run.data.encoder is not None
    for start_us, stop_us, *_ in run.data.encoder.tolist():
        assert not ((batches.started_us < stop_us) & (batches.finished_us > start_us)).any()


def test_encoder_gpus_leave_the_gpu_to_the_batches() -> None:
    shared, apart = ran("image=0.5x4:1280x960"), ran("image=0.5x4:1280x960", encoder_gpus=4)
    assert apart.data.summary["device"]["bubble_us"] < shared.data.summary["device"]["bubble_us"]
    assert apart.data.summary["media"]["encoder_gpus"] == 4
    assert apart.setup.kv is not None
    assert shared.setup.kv is not None
    freed = shared.setup.kv.weights_bytes - apart.setup.kv.weights_bytes
    assert freed == encoders("qwen2.5-vl-7b").weights_bytes


def test_a_small_cache_evicts_and_encodes_again() -> None:
    tokens = encoders("qwen2.5-vl-7b").image(640, 480).tokens
    media = ran(settings={"encoder_cache_tokens": 3 * tokens}).data.summary["media"]
    assert media["encoded"] > 6
    assert media["embeddings_evicted"] >= media["encoded"] - 3


def test_a_budget_makes_groups_smaller() -> None:
    tokens = encoders("qwen2.5-vl-7b").image(640, 480).tokens
    many = "image=1x4:640x480"
    wide, narrow = ran(many), ran(many, settings={"encoder_budget_tokens": 2 * tokens})
    assert wide.data.encoder is not None
    assert narrow.data.encoder is not None
    assert int(wide.data.encoder[:, 2].max()) > 2 == int(narrow.data.encoder[:, 2].max())
    assert narrow.data.summary["media"]["encoded"] == wide.data.summary["media"]["encoded"] == 160


@pytest.mark.parametrize("gpus", [0, 1])
def test_uniform_stretches_of_decodes_change_nothing(gpus: int) -> None:
    """With a check, which never comes due, every decode is a step of its own."""
    workload = "gen:n=25,rate=15,input=fixed:64,output=fixed:60"
    setup = assemble(
        Scenario(model="qwen2.5-vl-7b", gpu="h100", workload=workload, media=IMAGES, encoder_gpus=gpus), {}
    )
    assert simulate(setup).data.summary == simulate(setup, check_every=10**9).data.summary


def test_report_shows_what_was_encoded(tmp_path: Path) -> None:
    run = ran()
    write_run(tmp_path, run, requests=False, trace=False)
    page = (tmp_path / "report.html").read_text()
    assert "Media encoded" in page
    assert "Waited for media" in page


def test_equal_runs_write_equal_journals_and_a_trace_shows_the_encoder(tmp_path: Path) -> None:
    import gzip

    for name in ("one", "two"):
        write_run(tmp_path / name, ran(folder=tmp_path / name), report=False)
    journals = [next((tmp_path / name / "journal").glob("*.log")).read_bytes() for name in ("one", "two")]
    assert journals[0] == journals[1]
    assert read_journal(tmp_path / "one").header.host["media"] == IMAGES
    trace = gzip.decompress((tmp_path / "one" / "trace.json.gz").read_bytes()).decode()
    assert '"name":"encode"' in trace
    assert '"args":{"name":"encoder"}' in trace


def test_a_prompt_that_is_too_long_only_with_its_media_is_refused_once_and_clearly() -> None:
    run = ran("image=1x2:640x480", settings={"context_tokens_max": 600})
    assert run.rejected == {"too_long": 40}
    assert "media" not in run.data.summary, "nothing of it was encoded"


def test_a_cluster_adds_up_what_its_engines_did() -> None:
    base = Scenario(model="qwen2.5-vl-7b", gpu="h100", workload=SMALL, media=IMAGES)
    setup = assemble_cluster(ClusterScenario(base=base, replicas=2), {})
    summary = simulate_cluster(setup).data.summary
    alone = ran().data.summary["media"]
    assert summary["requests"]["completed"] == 40
    assert summary["media"]["contents"] == alone["contents"]
    assert 6 < summary["media"]["encoded"] <= 12, "each engine has a cache of its own"
    assert summary["media"]["encoder_busy_us"] > alone["encoder_busy_us"]


def test_a_plan_has_media_and_reports_that_they_are_simulated_only() -> None:
    words = "--model qwen2.5-vl-7b --gpus h100 --slo ttft_p99=2s --rate 2 --quick --requests 20 --jobs 1".split()
    words += ["--workload", "gen:input=fixed:64,output=fixed:4", "--media", "image=1:640x480/4"]
    done = CliRunner().invoke(plan, words)
    assert done.exit_code == 0, done.output
    assert "its times are uncalibrated" in done.output
    refused = CliRunner().invoke(plan, [*words[:-2], "--mm-encoder-tp-mode", "data"])
    assert refused.exit_code
    assert "`mm_encoder_tp_mode` is about media, and there are none" in refused.output


def test_the_command_runs_it_again() -> None:
    run = ran(encoder_gpus=2)
    command = run.setup.scenario.command()
    assert f"--media {IMAGES}" in command
    assert "--encoder-gpus 2" in command
    assert "--media" not in Scenario(model="m", gpu="g", workload="w").command()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"model": "qwen3-8b"}, "`media` is `.*`, but qwen3-8b takes text alone"),
        ({"media": "audio=0.5:3s"}, "qwen2.5-vl-7b takes no audio, but image and video"),
        ({"media": None, "encoder_gpus": 2}, "`encoder_gpus` is about media, and there are none"),
        ({"media": None, "mm_encoder_tp_mode": "data"}, "`mm_encoder_tp_mode` is about media"),
        ({"media": None, "settings": {"encoder_budget_tokens": 4}}, "`encoder_budget_tokens` is about media"),
        ({"media": None, "settings": {"encoder_cache_tokens": 5}}, "`encoder_cache_tokens` is about media, .* got `5`"),
        ({"media": None, "settings": {"encoder_cache_tokens": None}}, "is about media, and there are none, got `none`"),
        ({"mm_encoder_tp_mode": "data"}, "`mm_encoder_tp_mode` is data, .*, but `tp` is 1\nhint: --tp 2 or more"),
        ({"mm_encoder_tp_mode": "both"}, "`mm_encoder_tp_mode` must be weights or data, got `both`"),
        ({"mm_encoder_tp_mode": "data", "encoder_gpus": 1}, "leave out one of the two"),
        ({"encoder_gpus": -1}, "`encoder_gpus` must be from 0"),
        ({"settings": {"role": "prefill"}}, "`role` is prefill, but there is one engine"),
        ({"media": "recorded"}, "this workload does not separate media from text"),
        ({"settings": {"encoder_cache_tokens": 20_000_000}}, "its encoder takes 1.4 GB of them"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises((ConfigError, CatalogueError, CapacityError, WorkloadError), match=problem):
        ran(**fields)


def test_where_some_engines_have_one_gpu_the_others_may_have_the_encoder_whole_on_each() -> None:
    base = Scenario(model="qwen2.5-vl-7b", gpu="h100", workload=SMALL, media=IMAGES, mm_encoder_tp_mode="data")
    groups = (EngineGroup(count=1, gpu="h100"), EngineGroup(count=1, gpu="h100", tp=2))
    setup = assemble_cluster(ClusterScenario(base=base, engines=groups), {})
    modes = [engine.encoding.cost.mode for engine in setup.engines if engine.encoding is not None]
    assert modes == ["weights", "data"]
    with pytest.raises(ConfigError, match="`mm_encoder_tp_mode` is data"):
        assemble_cluster(ClusterScenario(base=base, replicas=2), {})
    one = Scenario(model="m", gpu="g", workload="w", media=IMAGES, mm_encoder_tp_mode="data")
    trials = {tp: Trial(base=replace(one, tp=tp), replicas=1) for tp in (1, 2)}
    of_tp = {tp: trial.scenario().base.mm_encoder_tp_mode for tp, trial in trials.items()}
    assert of_tp == {1: "weights", 2: "data"}
    common = {"media": IMAGES, "mm_encoder_tp_mode": "data"}
    asked: dict[str, Any] = {"model": "m", "gpus": ("g",), "workload": "w", "slos": (Slo.parse("ttft_p99=1s"),)}
    assert len(Question(**asked, common=common, search=(("tp", (1, 2)),)).configurations()) == 2
    with pytest.raises(ConfigError, match="hint: --search tp=1,2,4, or leave it out"):
        Question(**asked, common=common)


def test_recorded_media_change_neither_lengths_nor_times(tmp_path: Path) -> None:
    (tmp_path / "chunk-0-trace.csv").write_text("0,2,1,Gamma,1,0.5\n")
    lengths = '"text_tokens": "{20: 0.5, 300: 0.5}", "image_tokens": "{0: 0.2, 700: 0.4, 1001: 0.4}"'
    lengths += ', "audio_tokens": "{0: 1.0}", "image_count": "{1: 0.5, 3: 0.5}", "output_tokens": "{5: 1.0}"'
    (tmp_path / "chunk-0-dataset.json").write_text(f'{{"0": {{{lengths}}}}}')
    text, media = open_workload(str(tmp_path), seed=2).turns, SourceReading(recorded_media=True)
    turns = open_workload(str(tmp_path), seed=2, reading=media, time_window="60..300", limit=150).turns
    whole = open_workload(str(tmp_path), seed=2, reading=media).turns
    assert np.array_equal(whole.prompt_tokens, text.prompt_tokens)
    assert np.array_equal(whole.arrival_us, text.arrival_us)
    assert len(turns) == 150
    kinds: dict[tuple[int, ...], int] = {}
    for turn in (*whole, *turns):
        sizes = tuple(media.tokens for media in turn.media)
        kinds[sizes] = kinds.get(sizes, 0) + 1
        at = turn.media[0].start if turn.media else 0
        assert at == max(turn.prompt_tokens - sum(sizes) - 32, 0) * bool(turn.media)
        for media, behind in zip(turn.media, turn.media[1:], strict=False):
            assert media.start + media.tokens == behind.start
    assert set(kinds) == {(), (700,), (1001,), (233, 233, 234), (333, 334, 334)}
    run = ran("recorded", workload=str(tmp_path), time_window="60..100", seed=2)
    assert run.data.summary["media"]["encoded"] == run.data.summary["media"]["contents"], "no two are known to be equal"
