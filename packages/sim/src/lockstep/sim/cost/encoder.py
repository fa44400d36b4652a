"""Encoders of media: the prompt tokens of an image, a video or a sound, and the time to encode it.

    encoders = load_encoders("qwen2.5-vl-7b")              # lockstep.sim.catalogue
    image = encoders.image(1024, 768)                      # 999 tokens, of 3,996 patches
    cost = EncoderCost(encoders, load_gpu("h100"), tp=4, mode="data")
    cost.group_us([image] * 8)                             # two images on each GPU

    picture --resized to whole patches--> positions --tower--> positions --merger, or pooling--> tokens of the prompt

A tower is a transformer without a KV cache: every position attends to all positions of its segment (an image, two
frames of a video, 30 s of sound), or of its window. Fields are those of the checkpoint's config.json. PROCESSORS has
the bounds by which pictures are resized before, with sources.

On several GPUs an encoder is either split like the language model (`weights`: two all-reduces per layer), or each GPU
has the whole encoder and encodes other contents (`data`: one all-gather of the embeddings). The names are vLLM's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from lockstep.host.media.division import divided
from lockstep.sim.cost.errors import CapacityError, CatalogueError
from lockstep.sim.cost.hardware import Constant, GpuSpec, achieved, all_gather_of, all_reduce_of
from lockstep.sim.cost.models import ACTIVATION_BYTES, ceil_div

MediaKind = Literal["image", "video", "audio"]
KINDS: tuple[MediaKind, ...] = ("image", "video", "audio")

EncoderTpMode = Literal["weights", "data"]

EAGER_KERNEL_US = Constant(5.0, "estimate: CPU time to launch one kernel; encoders are rarely captured as CUDA graphs")
GEMMS_PER_LAYER = 4  # qkv, out, up (and gate), down
SMALL_KERNELS_PER_LAYER = 4  # two norms with residual, rope or position, activation
ALL_REDUCES_PER_LAYER = 2


class MediaContent(NamedTuple):
    """One image, video or sound as the input of an encoder."""

    kind: MediaKind
    tokens: int  # placeholder tokens in the prompt
    segments: int = 1  # parts without attention to each other: pairs of frames, pieces of sound


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """One encoder. Widths and counts are those of its config."""

    hidden: int
    layers: int
    heads: int
    ffn: int
    gated: bool = False  # a third matrix in the feed-forward
    window: int = 0  # positions that a position attends to in a windowed layer; 0: no windowed layers
    full_layers: int  # layers without a window
    inputs: int  # numbers that the stem reads per position, all its convolutions together
    merge: int  # positions that become one token
    merger: int  # parameters of the layers that merge positions into tokens, each used once per token
    out: int  # numbers in the embedding of a token, those for deeper layers of the language model included
    vectors: int  # parameters outside matrices: norms, biases, positions

    @property
    def layer_params(self) -> int:
        """Parameters of the matrices of one layer."""
        return 4 * self.hidden * self.hidden + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def params(self) -> int:
        return self.layers * self.layer_params + self.inputs * self.hidden + self.merger + self.vectors


class Pixels(NamedTuple):
    """Bounds of the pixels of a picture: a processor scales pictures outside them, keeping their aspect ratio."""

    least: int
    most: int
    source: str


class Frames(NamedTuple):
    """The sampling of a video by a processor: frames per second, with bounds of frames and pixels."""

    per_second: float
    least: int
    most: int
    pixels: Pixels  # bounds of one frame; with `together`, of all frames in sum
    together: bool
    source: str


class Processor(NamedTuple):
    image: Pixels
    video: Frames


_QWEN_FRAMES = "transformers, Qwen2VLVideoProcessor and Qwen3VLVideoProcessor: fps 2, 4 to 768 frames"
PROCESSORS: dict[str, Processor] = {
    "qwen2_5_vl": Processor(
        Pixels(3_136, 12_845_056, "Qwen/Qwen2.5-VL-7B-Instruct, preprocessor_config.json: min_pixels, max_pixels"),
        Frames(
            2.0, 4, 768,
            Pixels(128 * 28 * 28, 768 * 28 * 28, "transformers, Qwen2VLVideoProcessor: size of a frame, 128 to 768 "
                   "tokens of 28 x 28"),
            False,
            _QWEN_FRAMES,
        ),
    ),
    "qwen3_vl": Processor(
        Pixels(65_536, 16_777_216, "Qwen/Qwen3-VL-8B-Instruct, preprocessor_config.json: size"),
        Frames(
            2.0, 4, 768,
            Pixels(4_096, 25_165_824, "Qwen/Qwen3-VL-8B-Instruct, video_preprocessor_config.json: size, of all frames"),
            True,
            _QWEN_FRAMES,
        ),
    ),
}  # fmt: skip
"""Processors by model family. They also apply to a checkpoint of the family with other bounds in its own files."""

ASPECT_MAX = 200  # ratio of the sides of a picture; processors of these families refuse more
AUDIO_SECONDS_MAX = 30.0  # Whisper's encoder takes pieces of 30 s, and Qwen2-Audio passes it one piece per sound
MEL_FRAMES_PER_SECOND = 100  # hops of 10 ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoders:
    """The media encoders of a model."""

    model: str
    source: str
    vision: Tower | None = None
    audio: Tower | None = None
    processor: Processor | None = None  # None: pictures have one size, and `image_tokens` tokens each
    image_tokens: int = 0
    patch: int = 0  # side of a patch, in pixels
    side: int = 1  # side of the square of patches that becomes one token, in patches
    frames: int = 1  # frames of a video in one patch

    def kinds(self) -> tuple[MediaKind, ...]:
        """Return the kinds of media that the model accepts."""
        seen: tuple[MediaKind, ...] = (
            () if self.vision is None else ("image", "video") if self.processor else ("image",)
        )
        return (*seen, "audio") if self.audio is not None else seen

    def tower(self, kind: MediaKind) -> Tower:
        """Return the tower that encodes this kind. Raises CatalogueError if the model does not accept it."""
        found = self.audio if kind == "audio" else self.vision
        if found is None or kind not in self.kinds():
            raise CatalogueError(
                f"{self.model} takes no {kind}, but {' and '.join(self.kinds())}\n"
                "hint: leave it out, or choose another --model"
            )
        return found

    @property
    def params(self) -> int:
        """Parameters of all encoders."""
        return sum(tower.params for tower in (self.vision, self.audio) if tower is not None)

    @property
    def weights_bytes(self) -> int:
        """Bytes of all encoders' weights. They are bf16 for any `weights_dtype` of the language model."""
        return self.params * ACTIVATION_BYTES

    @property
    def embedding_bytes(self) -> int:
        """Bytes of one token in the encoder cache."""
        return ACTIVATION_BYTES * max((t.out for t in (self.vision, self.audio) if t is not None), default=0)

    def image(self, width: int, height: int) -> MediaContent:
        """Return the content of an image, with sides in pixels. Raises CatalogueError if the processor refuses it."""
        self.tower("image")
        if self.processor is None:
            return MediaContent("image", self.image_tokens)
        rows, columns = self._grid(width, height, self.processor.image)
        return MediaContent("image", rows * columns)

    def video(self, width: int, height: int, seconds: float) -> MediaContent:
        """Return the content of a video, with sides in pixels. Raises CatalogueError if the processor refuses it."""
        self.tower("video")
        assert self.processor is not None
        sampling = self.processor.video
        sampled = min(max(int(seconds * sampling.per_second), sampling.least), sampling.most)
        pairs = max(sampled // self.frames, 1)
        pixels = sampling.pixels
        if sampling.together:
            frames = pairs * self.frames
            pixels = Pixels(ceil_div(pixels.least, frames), max(pixels.most // frames, 1), pixels.source)
        rows, columns = self._grid(width, height, pixels)
        return MediaContent("video", pairs * rows * columns, pairs)

    def sound(self, seconds: float) -> MediaContent:
        """Return the content of a sound. Raises CatalogueError if it is longer than AUDIO_SECONDS_MAX."""
        self.tower("audio")
        if not 0.0 < seconds <= AUDIO_SECONDS_MAX:
            raise CatalogueError(
                f"{self.model} takes sounds of up to {AUDIO_SECONDS_MAX:g} s, got `{seconds:g}s`\nhint: cut them"
            )
        positions = (int(seconds * MEL_FRAMES_PER_SECOND) - 1) // 2 + 1  # the second convolution has stride 2
        return MediaContent("audio", max((positions - 2) // 2 + 1, 1))

    def _grid(self, width: int, height: int, pixels: Pixels) -> tuple[int, int]:
        """Return the rows and columns of tokens of a picture scaled into the bounds, with about the same aspect ratio.

        Raises: CatalogueError for an aspect ratio above ASPECT_MAX.
        """
        if max(width, height) > ASPECT_MAX * min(width, height):
            raise CatalogueError(
                f"a picture of {width}x{height} is more than {ASPECT_MAX} times as long as wide\nhint: crop it"
            )
        square = self.patch * self.side
        rows, columns = max(round(height / square), 1), max(round(width / square), 1)
        area = rows * columns * square * square
        if area > pixels.most:
            shrink = math.sqrt(height * width / pixels.most)
            rows, columns = (max(1, math.floor(length / shrink / square)) for length in (height, width))
        elif area < pixels.least:
            stretch = math.sqrt(pixels.least / (height * width))
            rows, columns = (math.ceil(length * stretch / square) for length in (height, width))
        return rows, columns

    def positions(self, content: MediaContent) -> int:
        """Return the positions that a tower computes for a content. Sound is padded to AUDIO_SECONDS_MAX."""
        if content.kind == "audio":
            return round(AUDIO_SECONDS_MAX * MEL_FRAMES_PER_SECOND) // 2
        return content.tokens * self.tower(content.kind).merge

    def describe(self) -> dict[str, Any]:
        """Return every figure, for metrics.json."""
        towers = {"vision": self.vision, "audio": self.audio}
        return {
            "source": self.source,
            "params": self.params,
            **{name: asdict(tower) for name, tower in towers.items() if tower is not None},
            **({} if self.processor is None else {"processor": _spelt(self.processor)}),
        }


def _spelt(processor: Processor) -> dict[str, Any]:
    image, video = processor
    return {"image": image._asdict(), "video": {**video._asdict(), "pixels": video.pixels._asdict()}}


# --- how long it takes ------------------------------------------------------------------------------------------------


class EncoderCost:
    """Time to encode contents together: a pure function that uses the roofline's rates of a GPU."""

    def __init__(self, encoders: Encoders, gpu: GpuSpec, tp: int, mode: EncoderTpMode, factor: float = 1.0) -> None:
        """Set up the constants. `factor` multiplies every time.

        Raises: CapacityError if the encoder cannot be split over `tp` GPUs.
        """
        self.encoders, self.gpu, self.tp, self.mode, self.factor = encoders, gpu, tp, mode, factor
        if mode == "weights":
            for tower in (encoders.vision, encoders.audio):
                if tower is not None and tower.heads % tp:
                    raise CapacityError(
                        f"tp {tp} does not divide the {tower.heads} heads of the encoder of {encoders.model}\n"
                        "hint: --mm-encoder-tp-mode data has it whole on each GPU"
                    )
        self.constants: dict[str, Constant] = {"eager_kernel_us": EAGER_KERNEL_US}
        self._flops_us = self._rate("bf16_gemm_tflops") * 1e6
        self._attention_us = self._rate("attention_prefill_tflops") * 1e6
        self._extra_keys = self._rate("attention_prefill_extra_keys")
        self._byte_us = 1.0 / (self._rate("weight_read_gbs") * 1e3)
        self._gemm_latency_us = self._rate("bf16_gemm_latency_us")
        self._attention_latency_us = self._rate("attention_prefill_latency_us")
        self._small_us = self._rate("small_kernel_us")
        self._all_reduce = all_reduce_of(gpu, tp) if tp > 1 and mode == "weights" else None
        self._all_gather = all_gather_of(gpu, tp) if tp > 1 and mode == "data" else None

    def _rate(self, name: str) -> float:
        self.constants[name] = achieved(self.gpu, name)
        return self.constants[name].value

    # mechanism: encoder-division (simulated)
    def group_us(self, contents: Sequence[MediaContent]) -> float:
        """Return the time of contents that start together on all GPUs; in mode `data` one GPU encodes each content."""
        if not contents:
            return 0.0
        if self.mode == "weights" or self.tp == 1:
            return self.factor * self._pass_us(contents, self.tp)
        ranks: list[list[MediaContent]] = [[] for _ in range(self.tp)]
        owners = divided([self.encoders.positions(content) for content in contents], self.tp)
        for owner, content in zip(owners, contents, strict=True):
            ranks[owner].append(content)
        gathered = sum(content.tokens for content in contents) * self.encoders.embedding_bytes
        return self.factor * (max(self._pass_us(rank, 1) for rank in ranks) + self._gather_us(gathered))

    def single_us(self, content: MediaContent) -> float:
        """Return the time of one content on one GPU that has the whole encoder."""
        return self.factor * self._pass_us([content], 1)

    def weights_bytes(self) -> int:
        """Return the bytes of encoder weights on each GPU."""
        return self.encoders.weights_bytes if self.mode == "data" else ceil_div(self.encoders.weights_bytes, self.tp)

    def _pass_us(self, contents: Sequence[MediaContent], tp: int) -> float:
        """Return the time of one pass of each tower that the contents need, each split over `tp` GPUs."""
        seen = [content for content in contents if content.kind != "audio"]
        heard = [content for content in contents if content.kind == "audio"]
        return sum(self._tower_us(part, tp) for part in (seen, heard) if part)

    def _tower_us(self, contents: Sequence[MediaContent], tp: int) -> float:
        """Return the time of one pass of a tower over contents laid end to end. All contents are of this tower."""
        tower = self.encoders.tower(contents[0].kind)
        lengths = [(self.encoders.positions(content), content.segments) for content in contents]
        positions = sum(length for length, _ in lengths)
        tokens = sum(content.tokens for content in contents)
        layers = tower.layers
        matrices = self._gemm_us(layers * tower.layer_params, positions, tp)
        matrices += self._gemm_us(tower.inputs * tower.hidden, positions, tp) + self._gemm_us(tower.merger, tokens, tp)
        full = sum(length * length / segments for length, segments in lengths)
        near = positions * tower.window
        pairs = tower.full_layers * full + (layers - tower.full_layers) * near + layers * self._extra_keys * positions
        attention = layers * self._attention_latency_us + 4.0 * tower.hidden / tp * pairs / self._attention_us
        moved = 2 * positions * tower.hidden * ACTIVATION_BYTES * self._byte_us
        small = SMALL_KERNELS_PER_LAYER * layers * (self._small_us + moved)
        us = layers * GEMMS_PER_LAYER * self._gemm_latency_us + matrices + attention + small
        kernels = layers * (GEMMS_PER_LAYER + SMALL_KERNELS_PER_LAYER + 1)
        if tp > 1:
            calls = ALL_REDUCES_PER_LAYER * layers
            us += calls * self._reduce_us(positions * tower.hidden * ACTIVATION_BYTES, tp)
            us += self._reduce_us(tokens * tower.out * ACTIVATION_BYTES, tp)
            kernels += calls + 1
        return max(us, kernels * EAGER_KERNEL_US.value)

    def _gemm_us(self, params: int, rows: int, tp: int) -> float:
        """Return the time on one of `tp` GPUs to multiply `rows` rows by matrices of `params` numbers in all."""
        return max(2.0 * params * rows / self._flops_us, params * ACTIVATION_BYTES * self._byte_us) / tp

    def _reduce_us(self, size: int, tp: int) -> float:
        line = self._all_reduce
        assert line is not None
        moved = 2.0 * (tp - 1) / tp * size
        return min(
            line.direct_latency_us + moved / (line.direct_gbs * 1e3),
            line.ring_latency_us + moved / (line.ring_gbs * 1e3),
        )

    def _gather_us(self, size: int) -> float:
        line = self._all_gather
        if line is None:
            return 0.0
        return line.latency_us + (self.tp - 1) / self.tp * size / (line.gbs * 1e3)

    def describe(self) -> dict[str, Any]:
        """Return settings, encoders and every constant with its source, for metrics.json."""
        return {
            "encoders": self.encoders.describe(),
            "tp": self.tp,
            "mode": self.mode,
            "weights_bytes_per_gpu": self.weights_bytes(),
            "constants": {name: asdict(constant) for name, constant in sorted(self.constants.items())},
        }


# --- reading a config.json --------------------------------------------------------------------------------------------


def encoders_from_config(config: Mapping[str, Any], name: str, where: str) -> Encoders | None:
    """Build the encoders of a model from its config.json; None if it has no encoders.

    Raises: CatalogueError for a field that is missing, and for an encoder that is not modelled.
    """
    vision, audio = config.get("vision_config"), config.get("audio_config")
    if not isinstance(vision, dict) and not isinstance(audio, dict):
        return None
    family = str(config.get("model_type", ""))
    source = str(config.get("_source", where))
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    if family == "qwen2_5_vl":
        return _qwen(name, source, _EncoderFields(where, "vision_config", vision), "qwen2_5_vl")
    if family.startswith(("qwen3_vl", "qwen3_5")):
        return _qwen(name, source, _EncoderFields(where, "vision_config", vision), "qwen3_vl")
    if family == "gemma3":
        fields = _EncoderFields(where, "vision_config", vision)
        return _siglip(
            name, source, fields, _EncoderFields(where, "", config), _EncoderFields(where, "text_config", text)
        )
    if family == "qwen2_audio":
        audio_fields = _EncoderFields(where, "audio_config", audio)
        return _whisper(name, source, audio_fields, _EncoderFields(where, "text_config", text).whole("hidden_size"))
    raise CatalogueError(
        f"{where}: the encoder of `model_type` `{family}` is not modelled\n"
        "hint: qwen2_5_vl, qwen3_vl, qwen3_vl_moe, qwen3_5, qwen3_5_moe, gemma3 and qwen2_audio are"
    )


class _EncoderFields(NamedTuple):
    where: str
    section: str
    data: Any

    def whole(self, field: str, least: int = 1) -> int:
        value = self.data.get(field) if isinstance(self.data, dict) else None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            named = f"{self.section}.{field}" if self.section else field
            raise CatalogueError(
                f"{self.where}: `{named}` must be a whole number of at least {least}, got `{value}`\n"
                "hint: it is needed for media"
            )
        return value

    def count(self, field: str) -> int:
        """Return the number of entries of a list."""
        value = self.data.get(field)
        if not isinstance(value, list):
            raise CatalogueError(f"{self.where}: `{self.section}.{field}` must be a list of layers, got `{value}`")
        return len(value)


def _qwen(name: str, source: str, f: _EncoderFields, kind: str) -> Encoders:
    """Build the encoder of Qwen2.5-VL or Qwen3-VL.

    Qwen2.5-VL has gated feed-forwards, windowed layers and RMS norms. Qwen3-VL has plain feed-forwards, full attention,
    layer norms, and embeddings for several layers of the language model.
    """
    hidden, layers, ffn, out = (
        f.whole(field) for field in ("hidden_size", "depth", "intermediate_size", "out_hidden_size")
    )
    patch, side, frames = (f.whole(field) for field in ("patch_size", "spatial_merge_size", "temporal_patch_size"))
    old = kind == "qwen2_5_vl"
    inputs = f.whole("in_chans" if old else "in_channels") * frames * patch * patch
    wide = hidden * side * side
    merger = wide * wide + wide * out
    biases = 4 * hidden + (2 if old else 1) * ffn + hidden  # qkv and out; the feed-forward
    if old:
        deep, windowed = 0, layers - f.count("fullatt_block_indexes")
        vectors = layers * (biases + 2 * hidden) + hidden + wide + out
    else:
        deep, windowed = f.count("deepstack_visual_indexes"), 0
        vectors = layers * (biases + 4 * hidden) + hidden * (1 + f.whole("num_position_embeddings"))
        vectors += 2 * hidden + wide + out + deep * (2 * wide + wide + out)  # mergers; deep mergers have wider norms
    tower = Tower(
        hidden=hidden,
        layers=layers,
        heads=f.whole("num_heads"),
        ffn=ffn,
        gated=old,
        window=(f.whole("window_size") // patch) ** 2 if windowed else 0,
        full_layers=layers - windowed,
        inputs=inputs,
        merge=side * side,
        merger=merger * (1 + deep),
        out=out * (1 + deep),
        vectors=vectors,
    )
    return Encoders(
        model=name, source=source, vision=tower, processor=PROCESSORS[kind], patch=patch, side=side, frames=frames
    )


def _siglip(name: str, source: str, f: _EncoderFields, config: _EncoderFields, text: _EncoderFields) -> Encoders:
    """Build the encoder of Gemma 3: SigLIP on pictures of one size, pooling, and a matrix to the language model."""
    hidden, layers, ffn = (f.whole(field) for field in ("hidden_size", "num_hidden_layers", "intermediate_size"))
    patch, tokens, out = f.whole("patch_size"), config.whole("mm_tokens_per_image"), text.whole("hidden_size")
    positions = (f.whole("image_size") // patch) ** 2
    if positions % tokens:
        raise CatalogueError(
            f"{f.where}: `mm_tokens_per_image` must divide the {positions} patches of an image, got `{tokens}`"
        )
    tower = Tower(
        hidden=hidden,
        layers=layers,
        heads=f.whole("num_attention_heads"),
        ffn=ffn,
        full_layers=layers,
        inputs=3 * patch * patch,
        merge=positions // tokens,
        merger=hidden * out,
        out=out,
        vectors=layers * (4 * hidden + ffn + hidden + 4 * hidden) + hidden * (1 + positions) + 2 * hidden + hidden,
    )
    return Encoders(model=name, source=source, vision=tower, image_tokens=tokens, patch=patch)


def _whisper(name: str, source: str, f: _EncoderFields, out: int) -> Encoders:
    """Build the encoder of Qwen2-Audio: Whisper's encoder, pooling by two, and a matrix to the language model."""
    hidden, layers, ffn = (f.whole(field) for field in ("d_model", "encoder_layers", "encoder_ffn_dim"))
    # Both convolutions span three frames: the first reads mel bins, the second the output of the first.
    inputs = 3 * f.whole("num_mel_bins") + 3 * hidden
    vectors = layers * (3 * hidden + ffn + hidden + 4 * hidden)  # biases (keys have none); two norms
    vectors += 2 * hidden + hidden * f.whole("max_source_positions") + 2 * hidden + out
    tower = Tower(
        hidden=hidden,
        layers=layers,
        heads=f.whole("encoder_attention_heads"),
        ffn=ffn,
        full_layers=layers,
        inputs=inputs,
        merge=2,
        merger=hidden * out,
        out=out,
        vectors=vectors,
    )
    return Encoders(model=name, source=source, audio=tower)
