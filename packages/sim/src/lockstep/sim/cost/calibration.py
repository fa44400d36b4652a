"""Calibrations: corrections of a cost model from measurements, in a file with its provenance.

calibration = Calibration.load("vllm-h100.json")
cost = calibration.cost_model(roofline_model(model, gpu))      # a CostModel: the roofline, corrected
calibration.factors(200, seed=7, model=model.name)       # 200 draws of (true time) / (predicted time)
calibration.interval("ttft", 0.9, model=model.name)      # the same ratio's central 90 %, for TTFT

Without a file `UNCALIBRATED` applies: no correction, and the uncertainty of the uncorrected roofline, measured on the
public serving points. docs/cost-models.md explains the correction, the residuals and the intervals.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from lockstep.sim.cost.cpu import CpuModel
from lockstep.sim.cost.errors import CalibrationError
from lockstep.sim.cost.model import BatchShape, ContextBends, CostModel, Duration, LastingSpread
from lockstep.sim.cost.multiplexing import MultiplexedModel
from lockstep.sim.cost.parallel import USUAL, Parallelism
from lockstep.sim.cost.stages import PipelineModel, StageModel
from lockstep.sim.cost.terms import ATTENTION_PREFILL, LAUNCH, new_tokens
from lockstep.sim.cost.two_batch import TwoBatchModel

Float64s = NDArray[np.float64]
Metric = Literal["time", "ttft"]
Population = Literal["seen", "unseen"]

FORMAT = "lockstep-calibration"
VERSION = 1
COVERAGE = 0.9  # default coverage of an interval: from the 5th to the 95th percentile
PROBABILITIES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975, 0.99)
LOWER_BOUND = "none: kernels without an engine, a lower bound"  # title without an engine and without a calibration
RATIOS_MIN = 3  # measured / predicted, from which quantiles are taken
KERNELS_MIN = 0.01  # least weight of kernels: more work must take longer
FEATURES = ("kernels", "collectives", "step_us", "row_us", "collective_us")
"""The parts of a batch's time that a correction has weights for, in the order of a row of `batch_features`."""
BATCH_FEATURES = (*FEATURES, "prompt_us", "kv_token_us", "attention_prefill")
"""The same for fits of single batches, which also show what a prompt costs besides its tokens, KV, and attention."""


class SplitCostModel(CostModel, Protocol):
    """A cost model that is a sum of terms and reports the time of collectives separately: `TermSum`."""

    collectives: int  # in one forward pass

    def collectives_us(self, tokens: int) -> float:
        """Return the part of `batch_us` that is collectives, for a batch of `tokens` new tokens."""
        ...

    def collective_terms_us(self, tokens: int) -> dict[str, float]:
        """Return the time of each of these collectives."""
        ...

    @property
    def collective_names(self) -> frozenset[str]:
        """The terms of these collectives."""
        ...

    def attention_prefill_us(self, shape: BatchShape) -> float:
        """Return the part of `batch_us` that is attention of extend rows."""
        ...

    def launched_us(self, shape: BatchShape, us: float) -> float:
        """Return the time of a batch with kernels that take `us`: at least the time of launching them."""
        ...

    def terms_us(self, shape: BatchShape) -> dict[str, float]:
        """Return the time of a batch by term; the values sum to `batch_us`."""
        ...


@dataclass(frozen=True, slots=True)
class Case:
    """What is simulated, as far as it decides whether the errors of a calibration are known for it."""

    model: str  # catalogue name
    gpu: str  # catalogue name
    split: Parallelism = USUAL
    weights_dtype: str = ""  # empty: not stated
    kv_dtype: str = ""  # empty: not stated
    prompt_tokens: float = 0.0  # mean over the requests; 0: not stated


class Gap(NamedTuple):
    """A respect in which a simulation goes beyond what was measured, and what follows from it."""

    clause: str  # such as `the calibration was made on H100-SXM, this is L40S`
    of_intervals: str  # what follows for a result with intervals
    of_times: str  # what follows for its times alone; empty: nothing

    def sentence(self, has_intervals: bool) -> str:
        follows = self.of_intervals if has_intervals else self.of_times
        if not follows:
            return self.clause
        return f"{self.clause}{'; ' if follows.startswith('intervals') else ': '}{follows}"


class Correction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Weights that correct the time of a batch. No weight is negative, so more work never takes less time.

    us = kernels * kernels' time + collectives * collectives' time
         + step_us + row_us * rows + collective_us * number of collectives
         + prompt_us * completed prompts + kv_token_us * KV tokens of decode rows
         + attention_prefill * kernels' time of attention of extend rows

    The first two summands together are at least `kernels` times the launching time.
    """

    kernels: float = 1.0
    collectives: float = 1.0
    step_us: float = 0.0  # per forward pass: work of the engine while the GPU is idle
    row_us: float = 0.0  # per row of a pass, extend or decode
    collective_us: float = 0.0  # per collective: the wait for the slowest rank
    frontend_us: float = 0.0  # per request, before it reaches the engine and after its first token; TTFT only
    # Of calibrations of single batches: per prompt that a batch completes, per KV token of decode rows, and what is
    # added to `kernels` for attention of extend rows. Else unset.
    prompt_us: float | msgspec.UnsetType = msgspec.UNSET
    kv_token_us: float | msgspec.UnsetType = msgspec.UNSET
    attention_prefill: float | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if value is msgspec.UNSET:
                continue
            least = KERNELS_MIN if field == "kernels" else 0.0
            if not least <= value < math.inf:
                raise CalibrationError(f"`correction.{field}` must be at least {least:g} and finite, got `{value}`")

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights in the order of FEATURES."""
        return tuple(getattr(self, field) for field in FEATURES)

    def of_rows_us(self, shape: BatchShape) -> dict[str, float]:
        """Return the time that rows of a batch add, by weight."""
        counts = {
            "row_us": shape.extend_rows + shape.decode_rows,
            "prompt_us": shape.completed_prompts,
            "kv_token_us": shape.decode_context_tokens,
        }
        return {name: self.weight(name) * count for name, count in counts.items()}

    def weight(self, name: str) -> float:
        """Return a weight by name; 0 if it is unset."""
        value: float | msgspec.UnsetType = getattr(self, name)
        return 0.0 if value is msgspec.UNSET else value

    def of_stage(self, share: float, step_share: float) -> Correction:
        """Return the part of the correction that a pipeline stage has; the times of all stages sum to the correction.

        `prompt_us` remains whole, because only the last stage completes prompts.
        Args:
            share: of the model's layers that the stage has.
            step_share: of `step_us`: `share`, or all of it on one stage if it is the CPU time of a scheduler.
        """
        parts = {name: share * self.weight(name) for name in ("row_us", "kv_token_us")}
        return msgspec.structs.replace(self, step_us=step_share * self.step_us, **parts)

    @property
    def is_identity(self) -> bool:
        return self == Correction()


class Residuals(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The errors of predictions: quantiles of measured / predicted."""

    metric: Metric  # "time": times of batches, and so TPOT, end-to-end time and throughput; "ttft": TTFT
    population: Population  # predictions for models of the fit's data ("seen"), or for other models ("unseen")
    method: str  # such as "leave one row out"
    count: int  # number of predictions
    probabilities: tuple[float, ...]
    ratios: tuple[float, ...]

    def __post_init__(self) -> None:
        where = f"`residuals` of {self.metric}, {self.population}"
        if len(self.probabilities) != len(self.ratios) or len(self.ratios) < 2:
            raise CalibrationError(f"{where}: as many `ratios` as `probabilities`, at least 2; got {len(self.ratios)}")
        if not all(0.0 < p < 1.0 for p in self.probabilities) or not _ascending(self.probabilities, strict=True):
            raise CalibrationError(f"{where}: `probabilities` must ascend between 0 and 1, got {self.probabilities}")
        if not all(0.0 < r < math.inf for r in self.ratios) or not _ascending(self.ratios, strict=False):
            raise CalibrationError(f"{where}: `ratios` must be above 0 and never fall, got {self.ratios}")

    @classmethod
    def of(
        cls, ratios: Sequence[float] | Float64s, *, metric: Metric, population: Population, method: str
    ) -> Residuals:
        """Summarise the ratios measured / predicted of at least three predictions made without their own measurement.

        The i-th of n sorted ratios has probability i / (n + 1). Beyond the outermost ratios the logarithm is
        extrapolated as a normal distribution with the standard deviation of the logarithms, so that few points do not
        give narrow intervals.
        Raises: CalibrationError if there are fewer than RATIOS_MIN ratios.
        """
        if len(ratios) < RATIOS_MIN:
            raise CalibrationError(f"residuals of {metric} need at least {RATIOS_MIN} predictions, got {len(ratios)}")
        logs = np.sort(np.log(np.asarray(ratios, np.float64)))
        n = len(logs)
        normal = NormalDist()
        scores = np.array([normal.inv_cdf(i / (n + 1)) for i in range(1, n + 1)])
        spread = float(logs.std(ddof=1))
        wanted = np.array([normal.inv_cdf(p) for p in PROBABILITIES])
        found = np.interp(wanted, scores, logs)
        found = np.where(wanted < scores[0], logs[0] + spread * (wanted - scores[0]), found)
        found = np.where(wanted > scores[-1], logs[-1] + spread * (wanted - scores[-1]), found)
        return cls(
            metric=metric,
            population=population,
            method=method,
            count=n,
            probabilities=PROBABILITIES,
            ratios=tuple(round(float(ratio), 5) for ratio in np.exp(found)),
        )

    def at(self, probabilities: Sequence[float] | Float64s) -> Float64s:
        """Return the ratios at these probabilities; a probability outside the table gets the outermost ratio."""
        normal = NormalDist()
        scores = [normal.inv_cdf(p) for p in self.probabilities]
        wanted = [normal.inv_cdf(p) for p in probabilities]
        logs: Float64s = np.interp(wanted, scores, np.log(self.ratios))
        return np.exp(logs)


class CalibrationSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file that a calibration was fitted to."""

    kind: Literal["serving_points", "operator_tables", "journal", "batch_times", "requests"]
    file: str  # name without the folder
    sha256: str
    rows_used: int
    rows_left_out: int = 0
    why_left_out: str = ""


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A correction, the errors that remain with it, and the sources of both."""

    format: str = FORMAT
    version: int = VERSION
    engine: str  # the engine that was measured, such as "vllm"; "none" for no calibration
    engine_version: str = ""
    gpu: str = ""  # catalogue name of the GPU it was measured on
    models: tuple[str, ...] = ()  # catalogue names of the models in the fit's data
    date: str = ""  # set by the caller, such as "2026-11-22"
    base: str = "roofline"  # kind of the cost model that is corrected
    cpu: Literal["separate", "included"] = "separate"  # included: the correction contains the engine's CPU time
    lane: CpuModel | msgspec.UnsetType = msgspec.UNSET  # measured times of the CPU lane; unset: those of CpuModel
    correction: Correction = Correction()
    spread: float = 0.0  # standard deviation of single batches around the systematic error, as a share of the mean
    prompt_spread: float | msgspec.UnsetType = msgspec.UNSET  # that of batches with prompts; unset: `spread`
    lasting_spread: LastingSpread | msgspec.UnsetType = msgspec.UNSET  # part that batches have in common; unset: none
    residuals: tuple[Residuals, ...]
    sources: tuple[CalibrationSource, ...] = ()
    notes: tuple[str, ...] = ()  # limits of its use, one sentence each
    # What was measured: layouts, such as `tp 2`, and pairs of the types of weights and KV. Unset: not stated.
    layouts: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    dtypes: tuple[tuple[str, str], ...] | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise CalibrationError(f"`format` must be {FORMAT}, got `{self.format}`")
        if self.version != VERSION:
            raise CalibrationError(
                f"`version` {self.version} is not one this release reads, which is {VERSION}\n"
                "hint: make it again with `lockstep calibrate`"
            )
        if self.engine == "none" and not self.correction.is_identity:
            raise CalibrationError(
                "`engine` is none, which is kernels without an engine, and `correction` is that of one\n"
                "hint: --engine vllm, or another name"
            )
        if self.lane is not msgspec.UNSET and self.cpu == "included":
            raise CalibrationError("`lane` is given, but `cpu` is included: the correction has the time of the lane")
        for name, spread in (("spread", self.spread), ("prompt_spread", self.spread_with_prompts)):
            if not 0.0 <= spread < 1.0:
                raise CalibrationError(f"`{name}` must be at least 0 and below 1, got `{spread}`")
        found = [(r.metric, r.population) for r in self.residuals]
        if ("time", "seen") not in found or len(set(found)) != len(found):
            raise CalibrationError("`residuals` must have time of seen models, and each metric and population once")

    # --- files --------------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a file written by `save` or `lockstep calibrate`. Raises CalibrationError with file and field."""
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise CalibrationError(
                f"{path}: {error.strerror or error}\nhint: `lockstep calibrate` makes a calibration file"
            ) from error
        return cls.from_bytes(data, str(path))

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Calibration:
        """Parse the bytes of a calibration file. Raises CalibrationError, which names `path`."""
        try:
            return msgspec.json.decode(data, type=cls, strict=True)
        except CalibrationError as error:
            raise CalibrationError(f"{path}: {error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CalibrationError(
                f"{path}: not a calibration file: {error}\nhint: `lockstep calibrate` makes one"
            ) from error

    def to_json(self) -> str:
        """Return the text of the calibration file: equal calibrations give equal bytes."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode() + "\n"

    def save(self, path: str | Path) -> None:
        """Write the calibration file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @property
    def digest(self) -> str:
        """SHA-256 of `to_json`, hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def spread_with_prompts(self) -> float:
        """Standard deviation of single batches with prompts, as a share of the mean."""
        return self.spread if self.prompt_spread is msgspec.UNSET else self.prompt_spread

    @property
    def draws(self) -> bool:
        """Whether durations are drawn, because batches have a spread."""
        return self.spread > 0.0 or self.spread_with_prompts > 0.0

    # --- use of a calibration -----------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """Engine, GPU, date and digest in one line; LOWER_BOUND for no calibration."""
        if self.engine == "none":
            return LOWER_BOUND
        version = f" {self.engine_version}" if self.engine_version else ""
        return f"{self.engine}{version} on {self.gpu}, {self.date}, {self.digest[:12]}"

    def cost_model(self, base: CostModel, factor: float = 1.0) -> CostModel:
        """Return `base` with the correction applied and every time multiplied by `factor`, such as one of `factors`.

        Each stage of a pipeline has its part of the correction: `Correction.of_stage`.
        Raises: CalibrationError if `base` is of another kind than the calibrated model or reports no collectives.
        """
        if not 0.0 < factor < math.inf:
            raise CalibrationError(f"`factor` must be above 0 and finite, got `{factor}`")
        if self.correction.is_identity and not self.draws and factor == 1.0:
            return base
        if isinstance(base, TwoBatchModel):
            return TwoBatchModel(self.cost_model(base.base, factor))  # type: ignore[arg-type]  # a correction keeps its terms apart
        if isinstance(base, MultiplexedModel):
            return base.mapped(lambda part: self.cost_model(part, factor))
        if isinstance(base, PipelineModel):
            if self.correction.is_identity and not self.draws:
                return base.scaled(factor)
            layers = base.model.layers
            return base.mapped(lambda stage, number: self._stage_model(stage, number, layers)).scaled(factor)
        self._check_base(base)
        return CalibratedModel(base, self, factor)

    def _stage_model(self, stage: StageModel, number: int, layers: int) -> CalibratedStage:
        """Return a stage of a model of `layers` layers, corrected by its part."""
        self._check_base(stage)
        share = stage.model.layers / layers
        step_share = float(number == 0) if self.cpu == "included" else share
        return CalibratedStage(stage, self, self.correction.of_stage(share, step_share))

    def _check_base(self, base: CostModel) -> None:
        kind = str(base.describe()["kind"])
        if self.engine != "none" and kind != self.base:
            raise CalibrationError(
                f"this calibration corrects the cost model `{self.base}`, got `{kind}`\n"
                f"hint: calibrate again on `{kind}`, or simulate with `{self.base}`"
            )
        if not hasattr(base, "collectives_us") or not hasattr(base, "collectives"):
            raise CalibrationError(f"the cost model `{kind}` has no `collectives_us`: see SplitCostModel")

    def covers(self, case: Case) -> bool:
        """Return whether the coverage of intervals was counted on predictions like those of a simulation.

        It was for the model, GPU, layout and data types of a calibration from serving points or from requests, whose
        points or blocks were left out in turn. It was not for other ones, for batches of one run, or for results that
        are too few for errors of their own. Kernels without an engine have fewer points in their interval than it
        states: 75 % of TPOT and 49 % of TTFT (docs/validation.md, section 10).
        """
        if self.engine == "none" or self.gaps(case):
            return False
        if self.residuals_of("time", case.model).method == _LEFT_OUT:
            return False
        return any(source.kind in ("serving_points", "requests") for source in self.sources)

    @property
    def line(self) -> str:
        """The title with its kind, as commands print it."""
        return f"{'engine' if self.engine == 'none' else 'calibration'}: {self.title}"

    def cpu_model(self, cpu: CpuModel) -> CpuModel:
        """Return the cost of the CPU lane: zero if the correction contains it, else as measured, otherwise `cpu`."""
        if self.cpu == "separate":
            return cpu if self.lane is msgspec.UNSET else self.lane
        return CpuModel(plan_fixed_us=0.0, plan_row_us=0.0, result_fixed_us=0.0, result_row_us=0.0, arrival_us=0.0)

    def residuals_of(self, metric: Metric, model: str | None = None) -> Residuals:
        """Return the residuals of a metric, for `model`.

        Residuals of unseen models are preferred if `models` is not empty and lacks `model`. Residuals of `time`
        replace missing residuals of `ttft`.
        Args:
            model: catalogue name; None is a model outside the fit's data.
        """
        seen = not self.models or (model is not None and model in self.models)
        wanted = [(m, p) for m in (metric, "time") for p in (("seen",) if seen else ("unseen", "seen"))]
        by_key = {(r.metric, r.population): r for r in self.residuals}
        return next(by_key[key] for key in wanted if key in by_key)  # time of seen models is always there

    def factors(self, n: int, seed: int, model: str | None = None) -> Float64s:
        """Return `n` draws of (true time) / (predicted time), one per replication of a simulation.

        `cost_model(base, factor)` multiplies a cost model by one draw. Draws are stratified: one from each n-th of the
        distribution, in random order, so that few replications cover it. Equal arguments give equal draws.
        Args:
            model: catalogue name of the simulated model; None is a model outside the fit's data.
        """
        if n < 1:
            raise CalibrationError(f"`n` must be at least 1, got `{n}`")
        rng = np.random.Generator(np.random.Philox(seed))
        probabilities = (rng.permutation(n) + rng.uniform(0.0, 1.0, n)) / n
        return self.residuals_of("time", model).at(np.clip(probabilities, 1e-9, 1.0 - 1e-9))

    def interval(self, metric: Metric, coverage: float = COVERAGE, model: str | None = None) -> tuple[float, float]:
        """Return the central `coverage` of (true value) / (predicted value)."""
        if not 0.0 < coverage < 1.0:
            raise CalibrationError(f"`coverage` must be between 0 and 1, got `{coverage}`")
        low, high = self.residuals_of(metric, model).at([(1.0 - coverage) / 2.0, (1.0 + coverage) / 2.0])
        return float(low), float(high)

    def gaps(self, case: Case) -> list[Gap]:
        """Return the respects in which a simulation goes beyond the measurements; none for kernels alone."""
        if self.engine == "none":
            return []
        found = []
        correction, intervals = "its correction does not cover that", "its intervals do not cover that"
        split, layouts = str(case.split), () if self.layouts is msgspec.UNSET else self.layouts
        if not case.split.is_plain:
            if split not in layouts and not any(f"{split}:" in note for note in self.notes):
                clause = f"the calibration was made without {', '.join(case.split.describe())}"
                found.append(Gap(clause, "its correction and intervals do not cover that", correction))
        elif layouts and split not in layouts:
            clause = f"the calibration was made on {' and '.join(layouts)}, this is {split}"
            found.append(Gap(clause, intervals, correction))
        if self.gpu != case.gpu:
            clause = f"the calibration was made on {self.gpu}, this is {case.gpu}"
            found.append(Gap(clause, intervals, correction))
        dtypes = case.weights_dtype, case.kv_dtype
        if self.dtypes is not msgspec.UNSET and case.weights_dtype and dtypes not in self.dtypes:
            made = " and ".join(_dtypes_text(*pair) for pair in self.dtypes)
            clause = f"the calibration was made with {made}, this is {_dtypes_text(*dtypes)}"
            found.append(Gap(clause, intervals, correction))
        if self.models and case.model not in self.models:
            clause = f"the calibration has not seen {case.model}"
            found.append(Gap(clause, "intervals are those of models it had not seen", ""))
        return found

    def doubts(self, case: Case, overlap_depth: int, *, has_intervals: bool = True) -> list[str]:
        """Return the respects in which a simulation goes beyond the measurements, one sentence each.

        Args:
            has_intervals: whether results have intervals; if not, the sentences do not mention them.
        """
        if self.engine == "none":
            beyond = [name for name in case.split.describe() if name not in ("ep", "expert_cv")]
            if beyond and has_intervals:
                return [f"intervals are those of engines without {', '.join(beyond)}: they do not cover that"]
            return []
        lines = [gap.sentence(has_intervals) for gap in self.gaps(case)]
        if self.cpu == "included" and overlap_depth != 1:
            lines.append(
                f"the calibration has CPU time in its batches: what overlap_depth {overlap_depth} does is not seen"
            )
        return lines

    def describe(self) -> dict[str, Any]:
        """Return all fields with title and digest, for metrics.json."""
        described: dict[str, Any] = msgspec.to_builtins(self)
        return {"title": self.title, "digest": self.digest, **described}


def _dtypes_text(weights_dtype: str, kv_dtype: str) -> str:
    return f"{weights_dtype} weights and {kv_dtype} KV"


class CalibratedModel:
    """A cost model with a correction. It adds one look-up to its base: values per number of tokens are cached."""

    def __init__(
        self, base: Any, calibration: Calibration, factor: float = 1.0, correction: Correction | None = None
    ) -> None:
        """Correct `base` by `correction`: that of the calibration, or the part of it that a pipeline stage has."""
        self.base: SplitCostModel = base
        self.calibration = calibration
        self.factor = factor
        self.correction = calibration.correction if correction is None else correction
        self.collectives = self.base.collectives
        self.shards = int(getattr(base, "shards", 1))
        c = self.correction
        self._kernels = c.kernels * factor
        self._collectives = c.collectives * factor
        # With this, corrected times can fall below the launching time, although the base's times do not.
        self._may_undercut = c.collectives < c.kernels
        self._row_us = c.row_us * factor
        self._prompt_us = c.weight("prompt_us") * factor
        self._kv_token_us = c.weight("kv_token_us") * factor
        self._attention_prefill = c.weight("attention_prefill") * factor
        self._fixed_us = (c.step_us + c.collective_us * self.collectives) * factor
        self._spread, self._prompt_spread = calibration.spread, calibration.spread_with_prompts
        self._lasting = None if calibration.lasting_spread is msgspec.UNSET else calibration.lasting_spread
        self._tokens_us: dict[int, float] = {}

    def batch_us(self, shape: BatchShape) -> Duration:
        """Return the corrected time. Its spread is that of single batches, without the systematic error."""
        decode_rows = shape.decode_rows
        tokens = shape.extend_tokens + decode_rows + shape.draft_tokens
        if not tokens:
            return Duration(0.0)
        more_us = self._tokens_us.get(tokens)
        if more_us is None:
            collectives_us = self.base.collectives_us(tokens)
            more_us = self._tokens_us[tokens] = (self._collectives - self._kernels) * collectives_us
        base = self.base.batch_us(shape)
        us = self._kernels * base.mean_us + more_us
        if self._may_undercut:
            us = max(us, self._kernels * self.base.launched_us(shape, 0.0))
        us += self._fixed_us + self._row_us * (shape.extend_rows + decode_rows)
        us += self._prompt_us * shape.completed_prompts + self._kv_token_us * shape.decode_context_tokens
        if self._attention_prefill:
            us += self._attention_prefill * self.base.attention_prefill_us(shape)
        spread_us = (self._prompt_spread if shape.extend_rows else self._spread) * us
        if base.spread_us:
            spread_us = math.hypot(spread_us, self._kernels * base.spread_us)
        return Duration(us, spread_us, self._lasting)

    def decode_bends(self, rows: int) -> tuple[int, ...] | None:
        """Return the contexts between which the corrected time of a batch of decodes is convex, see `ContextBends`."""
        known = self._base_with_bends()
        return None if known is None else known.decode_bends(rows)

    def chunk_bends(self, tokens: int) -> tuple[int, ...] | None:
        """Return the contexts between which the corrected time of an extend is convex, see `ContextBends`."""
        known = self._base_with_bends()
        return None if known is None else known.chunk_bends(tokens)

    def _base_with_bends(self) -> ContextBends | None:
        """Return the base if its bends are those of the corrected time; None: they are not known."""
        base: object = self.base
        return base if isinstance(base, ContextBends) and not self.calibration.draws else None

    def terms_us(self, shape: BatchShape) -> dict[str, float]:
        """Return the corrected time by term: the scaled terms of the base, and the terms that the correction adds.

        Collectives are scaled for an even spread of tokens over shards, as in `collectives_us`.
        """
        tokens = new_tokens(shape)
        if not tokens:
            return {}
        c = self.correction
        terms = {name: self._kernels * us for name, us in self.base.terms_us(shape).items()}
        for name, us in self.base.collective_terms_us(tokens).items():
            terms[name] += (self._collectives - self._kernels) * us
        if self._may_undercut:
            least_us = self._kernels * self.base.launched_us(shape, 0.0)
            terms[LAUNCH] += max(0.0, least_us - sum(terms.values()))
        if self._attention_prefill and ATTENTION_PREFILL in terms:
            terms[ATTENTION_PREFILL] += self._attention_prefill * self.base.attention_prefill_us(shape)
        added_us = {
            "step_us": c.step_us,
            **c.of_rows_us(shape),
            "collective_us": c.collective_us * self.collectives,
        }
        return terms | {name: us * self.factor for name, us in added_us.items() if us}

    @property
    def collective_names(self) -> frozenset[str]:
        """The terms that are collectives."""
        return self.base.collective_names

    def collective_terms_us(self, tokens: int) -> dict[str, float]:
        """Return the corrected time of each collective, without the wait for the slowest rank."""
        return {name: self._collectives * us for name, us in self.base.collective_terms_us(tokens).items()}

    def collectives_us(self, tokens: int) -> float:
        """Return the corrected time of collectives, for a batch of `tokens` new tokens."""
        waiting_us: float = self.correction.collective_us * self.factor * self.collectives
        corrected_us: float = self._collectives * self.base.collectives_us(tokens)
        return corrected_us + waiting_us

    def describe(self) -> dict[str, Any]:
        """Return the description of the base, with correction, spread and factor."""
        return {
            **self.base.describe(),
            "kind": f"{self.base.describe()['kind']}, calibrated",
            "correction": msgspec.to_builtins(self.calibration.correction),
            "spread": self.calibration.spread,
            "prompt_spread": self.calibration.spread_with_prompts,
            "lasting_spread": None if self._lasting is None else msgspec.to_builtins(self._lasting),
            "factor": self.factor,
        }


class CalibratedStage(CalibratedModel):
    """A pipeline stage with its part of a correction."""

    def __init__(self, base: StageModel, calibration: Calibration, correction: Correction) -> None:
        super().__init__(base, calibration, correction=correction)
        self.model, self.lora = base.model, base.lora


def batch_features(base: SplitCostModel, shape: BatchShape) -> tuple[float, float, float, float, float]:
    """Return the features of a batch, in the order of FEATURES; their weighted sum is the corrected time.

    The lower bound by launching (see `Correction`) is not part of a fit.
    """
    tokens = new_tokens(shape)
    collectives_us = base.collectives_us(tokens)
    kernels_us = base.batch_us(shape).mean_us - collectives_us
    return kernels_us, collectives_us, 1.0, float(shape.extend_rows + shape.decode_rows), float(base.collectives)


def _ascending(values: Sequence[float], *, strict: bool) -> bool:
    return all(a < b if strict else a <= b for a, b in pairwise(values))


_LEFT_OUT = "one model left out, of vLLM and TensorRT-LLM (docs/validation.md)"
_LEFT_OUT_TTFT = "one model left out, of vLLM (docs/validation.md)"
_ROOFLINE = "uncorrected roofline against vLLM, SGLang and TensorRT-LLM (docs/validation.md)"
_ROOFLINE_TTFT = "uncorrected roofline against vLLM and SGLang (docs/validation.md)"

UNSEEN_MODELS = (
    Residuals(
        metric="time", population="unseen", method=_LEFT_OUT, count=116, probabilities=PROBABILITIES,
        ratios=(0.7384, 0.7791, 0.7906, 0.816, 0.8753, 0.989, 1.073, 1.121, 1.164, 1.183, 1.196),
    ),
    Residuals(
        metric="ttft", population="unseen", method=_LEFT_OUT_TTFT, count=64, probabilities=PROBABILITIES,
        ratios=(0.5692, 0.6096, 0.6332, 0.6926, 0.7919, 1.115, 1.241, 1.303, 1.382, 1.4, 1.422),
    ),
)  # fmt: skip
"""Residuals for calibrations fitted to fewer than three models: errors of other engines' fits on a left-out model."""

UNCALIBRATED = Calibration(
    engine="none",
    residuals=(
        Residuals(
            metric="time", population="seen", method=_ROOFLINE, count=125, probabilities=PROBABILITIES,
            ratios=(0.922, 1.004, 1.036, 1.065, 1.13, 1.231, 1.359, 1.482, 1.579, 1.68, 1.886),
        ),
        Residuals(
            metric="ttft", population="seen", method=_ROOFLINE_TTFT, count=73, probabilities=PROBABILITIES,
            ratios=(0.9419, 0.9607, 0.9832, 1.004, 1.115, 1.388, 1.664, 1.814, 1.883, 1.96, 2.335),
        ),
    ),
)  # fmt: skip
"""The calibration that applies without a file: residuals are ratios of measured times to those of the roofline.

A test keeps them equal to benchmarks/results/serving_points.json.
"""
