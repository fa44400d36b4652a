"""The question of a plan, and the configurations that it spans: each GPU with each combination of searched values."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lockstep.core.cluster.router import ROUTER_POLICIES, RouterConfig
from lockstep.core.contract.config import TRANSFER_SETTINGS
from lockstep.core.contract.errors import ConfigError
from lockstep.host.options import options_of
from lockstep.sim.cluster.scenario import PLACEMENTS, ClusterScenario, parse_scaling
from lockstep.sim.cost import GpuSpec
from lockstep.sim.cost.hardware import PRICE_KINDS
from lockstep.sim.host.closed_loop import CONCURRENCY_MAX
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.plan.split import AUTO, MIXED, PREFILL_DECODE, RoleSplit, all_splits, parse_split
from lockstep.sim.run.encoding import gpus_of_a_scheduler
from lockstep.sim.scenario.scenario import Scenario, names_where
from lockstep.sim.scenario.settings import field_of, parse_setting, parse_tier
from lockstep.sim.scenario.tier_options import TIER_KEYS
from lockstep.sim.workload.generate import PREFIX
from lockstep.sim.workload.mix import MIX_PREFIX, parse_mix
from lockstep.sim.workload.workload import STRICT, SourceReading, Workload, open_workload

CONFIGURATIONS_MAX = 2_000
OWN_KEYS = (*names_where("searched"), "router", "autoscale", PREFILL_DECODE, "placement")
"""Names that can be searched besides the scheduler's settings."""

LINK_KEYS = ("link_gbs", "link_latency_us", "placement")
"""Options of the ways between prefill and decode engines."""

YES_NO = {"yes": True, "no": False, "true": True, "false": False}


class Length(NamedTuple):
    """Length of one simulation: enough requests, over enough time, within a bound."""

    requests_min: int
    requests_max: int
    seconds: float

    def requests_at(self, requests_per_s: float, seconds_min: float) -> int:
        """Return the requests to simulate at a rate.

        Args:
            seconds_min: the time that the workload needs to reach a steady state.
        """
        wanted = math.ceil(requests_per_s * max(self.seconds, seconds_min))
        return min(max(wanted, self.requests_min), self.requests_max)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is simulated for an answer."""

    long: Length
    short: Length  # of simulations that narrow the range of loads
    precision: float  # relative precision of a largest rate
    replications_min: int
    replications_max: int
    per_session: int = 20  # requests of a long closed-loop simulation per session in progress, at least


FULL = Effort(
    long=Length(3_000, 20_000, 120.0),
    short=Length(400, 1_500, 15.0),
    precision=0.05,
    replications_min=3,
    replications_max=10,
)
QUICK = Effort(
    long=Length(800, 2_500, 40.0),
    short=Length(250, 600, 10.0),
    precision=0.15,
    replications_min=3,
    replications_max=5,
    per_session=10,
)
# unmeasured first requests of a closed-loop simulation, per session, because its caches begin empty
WARM_UP_PER_SESSION = 3
SHORT_SHARE = 4  # ratio of the requests per session in a long and in a short closed-loop simulation
LIVES = 3.0  # durations of a session after which ending and beginning sessions are in balance


Load = Literal["rate", "sessions"]
"""Unit of the load: arrivals per second in an open loop; sessions in progress at any time in a closed loop."""

LOADS: Mapping[str, str] = {"rate": "arrivals per second", "sessions": "sessions at a time"}


@dataclass(frozen=True, kw_only=True)
class Question:
    """Everything that determines the answer."""

    model: str
    gpus: tuple[str, ...]
    workload: str
    slos: tuple[Slo, ...]
    load: Load = "rate"  # the load that is varied; see `Load`
    rate: float | None = None  # requests per s to be served; None: find the largest load
    sessions: int | None = None  # the same for a closed loop, in sessions
    gpus_max: int | None = None  # GPUs of all replicas of one configuration, if the largest load is searched
    search: tuple[tuple[str, tuple[Any, ...]], ...] = ()  # in the order given
    common: Mapping[str, Any] = field(default_factory=dict)  # fields of Trial that are not searched
    settings: Mapping[str, Any] = field(default_factory=dict)  # scheduler settings that are not searched
    router: RouterConfig = field(default_factory=RouterConfig)
    hop_us: int = 0
    seed: int = 7
    confidence: float = 0.95
    effort: Effort = FULL
    prices: Mapping[str, float] = field(default_factory=dict)  # USD per GPU-hour, by GPU as written in `gpus`
    price_kind: str = PRICE_KINDS[0]
    confirm_all: bool = False  # confirm also configurations that short runs show to be worse

    def __post_init__(self) -> None:
        if not self.slos:
            raise ConfigError("a plan needs at least one SLO\nhint: such as --slo ttft_p99=500ms --slo tpot_p99=40ms")
        if len(set(self.slos)) < len(self.slos):
            raise ConfigError(f"`slo` is given twice: {', '.join(map(str, self.slos))}\nhint: leave one of them out")
        if not self.gpus or not all(self.gpus):
            raise ConfigError(f"`gpus` has an empty name: `{','.join(self.gpus)}`\nhint: such as --gpus h100,h200")
        if len(set(self.gpus)) < len(self.gpus):
            raise ConfigError(f"`gpus` names one twice: {','.join(self.gpus)}")
        if self.load not in LOADS:
            raise ConfigError(f"`load` must be one of {', '.join(LOADS)}, got `{self.load}`")
        for load, name in (("sessions", "rate"), ("rate", "sessions")):
            if self.load == load and getattr(self, name) is not None:
                raise ConfigError(
                    f"`{name}` is not what the load of this plan is counted in, which is {LOADS[self.load]}\n"
                    f"hint: leave out --{name}, or add --load {name}"
                )
        if self.sessions is not None and not 1 <= self.sessions <= CONCURRENCY_MAX:
            raise ConfigError(f"`sessions` must be from 1 to {CONCURRENCY_MAX:,}, got `{self.sessions}`")
        if self.wanted is not None and self.gpus_max is not None:
            raise ConfigError(f"`{self.load}` and `max_gpus` are two questions\nhint: leave one of them out")
        if self.rate is not None and not (math.isfinite(self.rate) and self.rate >= 1e-6):
            raise ConfigError(f"`rate` must be requests per second, at least 1e-6, got `{self.rate}`")
        if self.gpus_max is not None and self.gpus_max < 1:
            raise ConfigError(f"`max_gpus` must be at least 1, got `{self.gpus_max}`")
        if not 0.5 <= self.confidence <= 0.999:
            raise ConfigError(f"`confidence` must be from 0.5 to 0.999, got `{self.confidence}`\nhint: 0.95 is usual")
        if self.price_kind not in PRICE_KINDS:
            raise ConfigError(f"`price_kind` must be one of {', '.join(PRICE_KINDS)}, got `{self.price_kind}`")
        self._check_engine()
        self._check_splits()
        for gpu in self.prices:
            if gpu not in self.gpus:
                raise ConfigError(f"`price` names `{gpu}`, which is not among the GPUs {', '.join(self.gpus)}")
        if len(self.configurations()) > CONFIGURATIONS_MAX:
            raise ConfigError(
                f"the search spans {len(self.configurations()):,} configurations, the most is {CONFIGURATIONS_MAX:,}\n"
                "hint: fewer values, or one search after another"
            )

    def _check_engine(self) -> None:
        """Raise ConfigError for values that are invalid on any GPU. A configuration that does not fit is no error."""
        searched = dict(self.search)
        tps = searched.get("tp", (self.common.get("tp", 1),))
        for tp in tps:
            if tp < 1:
                raise ConfigError(f"`tp` must be a whole number of at least 1, got `{tp}`")
        by_rank = bool(self.common.get("rank_schedulers"))
        shards = searched.get("attention_dp", (self.common.get("attention_dp", 1),))
        splits = [parse_split(word) for word in self.split_words if word != AUTO]
        own = [side.tp for split in splits if split is not None for side in split.sides.values() if side.tp is not None]
        several = any(gpus_of_a_scheduler(tp, dp, rank_schedulers=by_rank) > 1 for tp in (*tps, *own) for dp in shards)
        if "media" in self.common and self.common.get("mm_encoder_tp_mode") == "data" and not several:
            why = "a rank has one" if max(tps) > 1 else "`tp` is 1"
            raise ConfigError(
                f"`mm_encoder_tp_mode` is data, the encoder whole on each of several GPUs, but {why}\n"
                "hint: --search tp=1,2,4, or leave it out"
            )
        for fraction in searched.get("mem_fraction", (self.common.get("mem_fraction", 0.9),)):
            if not 0.0 < fraction <= 1.0:
                raise ConfigError(
                    f"`mem_fraction` must be above 0 and at most 1, got `{shown(fraction)}`\nhint: 0.9 is usual"
                )

    def _check_splits(self) -> None:
        """Raise ConfigError if splits lack an option, or if an option requires splits and there are none."""
        words = self.split_words
        if AUTO in words and self.gpus_max is None:
            raise ConfigError(
                f"`{PREFILL_DECODE}` {AUTO} divides the GPUs of `max_gpus`, which is not given\n"
                f"hint: --max-gpus 16, or name the splits: --search {PREFILL_DECODE}={MIXED},1:3,1:1,3:1"
            )
        if not self.splits:
            for name in LINK_KEYS:
                if name in self.common or name in dict(self.search):
                    raise ConfigError(
                        f"`{name}` applies to prefill and decode engines, and there are none\n"
                        f"hint: --search {PREFILL_DECODE}={MIXED},1:1, or leave it out"
                    )
            return
        if self.common.get("autoscale", "none") != "none" or "autoscale" in dict(self.search):
            raise ConfigError(
                f"`autoscale` supports engines with equal roles only, not yet `{PREFILL_DECODE}`\n"
                "hint: leave one of them out"
            )
        if "role" in self.settings or "role" in dict(self.search):
            raise ConfigError(f"`role` follows from `{PREFILL_DECODE}`\nhint: leave it out")

    @property
    def split_words(self) -> tuple[str, ...]:
        """The given values of `prefill_decode`."""
        return dict(self.search).get(PREFILL_DECODE, (self.common.get(PREFILL_DECODE, MIXED),))

    @property
    def splits(self) -> bool:
        """Whether prefill and decode may be on different engines."""
        return self.split_words != (MIXED,)

    @property
    def wanted(self) -> float | None:
        """The load to be served; None if the largest load is searched."""
        return self.rate if self.load == "rate" else self.sessions

    def configurations(self) -> tuple[Configuration, ...]:
        """Return all configurations, in the order of GPUs and searched values, numbered from 1."""
        keys = [key for key, _ in self.search]
        combinations = itertools.product(*(values for _, values in self.search))
        made: dict[tuple[str, str], Mapping[str, Any]] = {}  # each once, in order
        for gpu, values in itertools.product(self.gpus, combinations):
            for chosen in self._meant(dict(zip(keys, values, strict=True))):
                made.setdefault((gpu, repr(chosen)), chosen)
        return tuple(
            Configuration(number=number, gpu=gpu, chosen=chosen)
            for number, ((gpu, _), chosen) in enumerate(made.items(), 1)
        )

    def _meant(self, chosen: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the configurations of a combination: several for `auto`, without settings that have no effect."""
        if not self.splits:
            return [chosen]
        word = chosen.get(PREFILL_DECODE, self.common.get(PREFILL_DECODE, MIXED))
        if word != AUTO:
            return [_meaningful(chosen, parse_split(word))]
        assert self.gpus_max is not None
        tp, pp = (int(chosen.get(name, self.common.get(name, 1))) for name in ("tp", "pp"))
        found = [MIXED, *map(str, all_splits(self.gpus_max, tp, dict(self.search).get("tp", (tp,)), pp))]
        return [_meaningful({**chosen, PREFILL_DECODE: one}, parse_split(one)) for one in found]


def _meaningful(chosen: dict[str, Any], split: RoleSplit | None) -> dict[str, Any]:
    """Return the settings with an effect: no `tp` if each side has its own, no transfer settings without transfers."""
    if split is None:
        return {name: value for name, value in chosen.items() if name not in (*TRANSFER_SETTINGS, *LINK_KEYS)}
    return {name: value for name, value in chosen.items() if name != "tp" or not split.names_tp}


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One GPU type and one value of everything searched."""

    number: int
    gpu: str
    chosen: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the configuration: `h200 tp=2 schedule_policy=lpm`."""
        return " ".join([self.gpu, *(f"{key}={shown(value)}" for key, value in self.chosen.items())])


def shown(value: Any) -> str:
    """Return a value as written on a command line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def parse_search(texts: tuple[str, ...]) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Parse `tp=1,2,4`, `chunked_prefill_size=512..8192` (each value twice the previous one), `policy=fcfs,lpm`."""
    found: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        name, equals, values_text = text.partition("=")
        if not equals:
            raise ConfigError(f"`search` has `{text}`, expected NAME=VALUES\nhint: such as --search tp=1,2,4")
        _refuse_unsearched(name)
        key = field_of(name, (*OWN_KEYS, *TIER_KEYS))
        if key in found:
            raise ConfigError(f"`search` names `{key}` twice\nhint: put all its values into one")
        words = [word for part in values_text.split(",") for word in _words(key, part.strip())]
        if not words:
            raise ConfigError(f"`search`: `{key}` has no values\nhint: such as --search tp=1,2,4")
        values = tuple(_value(key, word) for word in words)
        if len(set(map(shown, values))) < len(values):
            raise ConfigError(f"`search`: `{key}` has a value twice: {values_text}")
        found[key] = values
    return tuple(found.items())


def _refuse_unsearched(name: str) -> None:
    """Raise ConfigError for an option of `lockstep simulate` that a plan does not search, with the way that does."""
    key = name.strip().lower().removeprefix("--").replace("-", "_")
    options = {**options_of(Scenario), **options_of(ClusterScenario)}
    own = {field.flag[2:].replace("-", "_"): field.name for field in options.values()}
    field = options.get(key) or options.get(own.get(key, "")) or options.get(f"{key}_us")
    if field is None or {key, field.name} & {*OWN_KEYS, *TIER_KEYS, "settings", "tiers"}:
        return
    if field.name == "gpu":
        why, hint = "is what every plan compares", "--gpus h100,h200"
    elif field.name in ("rate", "concurrency"):
        why, hint = "is the load that a plan varies", "--rate, --sessions, or neither of them for the largest load"
    elif field.name in ("replicas", "engines"):
        why, hint = "follows from the load", f"--max-gpus, or --search {PREFILL_DECODE}=1:3,1:1"
    elif field.takes("plan"):
        why = "belongs to the question, and is equal for all configurations"
        hint = f"one plan for each value, `lockstep plan ... {field.flag} VALUE --json FILE`"
    else:
        why = "is an option of one simulation"
        hint = f"`lockstep simulate ... {field.flag} VALUE --out DIR` for each value, then `lockstep compare`"
    raise ConfigError(f"`search`: `{name.strip()}` {why}; a plan does not search it\nhint: {hint}")


def _words(key: str, part: str) -> list[str]:
    """Return a single value, or the doublings of a range."""
    if ".." not in part:
        return [part] if part else []
    match = re.fullmatch(r"(\d+)\.\.(\d+)", part)
    if match is None:
        raise ConfigError(f"`search`: `{key}` cannot be `{part}`: a range is LOW..HIGH of whole numbers")
    low, high = int(match[1]), int(match[2])
    if not 1 <= low <= high:
        raise ConfigError(f"`search`: `{key}` cannot be `{part}`: LOW must be at least 1, and at most HIGH")
    words = []
    while low <= high:
        words.append(str(low))
        low *= 2
    return words


def _value(key: str, word: str) -> Any:
    kind = options_of(Scenario)[key].kind if key in options_of(Scenario) else None
    if kind is int:
        least = 0 if key == "redundant_experts" else 1
        if not word.isascii() or not word.isdigit() or int(word) < least:
            raise ConfigError(f"`search`: `{key}` must be a whole number of at least {least}, got `{word}`")
        return int(word)
    if kind is bool:
        if word not in YES_NO:
            raise ConfigError(f"`search`: `{key}` must be yes or no, got `{word}`")
        return YES_NO[word]
    if kind is float:
        try:
            return float(word)
        except ValueError:
            limit = "up to 1" if key == "mem_fraction" else "of at least 0"
            raise ConfigError(f"`search`: `{key}` must be a number {limit}, got `{word}`") from None
    if key == "router":
        if word not in ROUTER_POLICIES:
            raise ConfigError(f"`search`: `router` must be one of {', '.join(ROUTER_POLICIES)}, got `{word}`")
        return word
    if key == "placement" and word not in PLACEMENTS:
        raise ConfigError(f"`search`: `placement` must be one of {', '.join(PLACEMENTS)}, got `{word}`")
    if key == "autoscale":
        return scaling_of(word)
    if key == PREFILL_DECODE:
        return split_of(word)
    if key in OWN_KEYS:
        return word
    if key in TIER_KEYS:
        return parse_tier(key, word)
    return parse_setting(key, word)[1]


def scaling_of(word: str) -> str:
    """Return a scaling policy in which `:` stands for `=` and `/` for `,`: none, open_requests:24/minimum:2."""
    if word == "none":
        return word
    text = word.replace(":", "=").replace("/", ",")
    parse_scaling(text)
    return text


def split_of(word: str) -> str:
    """Return a split in its usual spelling. Raises ConfigError."""
    return word if word in (MIXED, AUTO) else str(parse_split(word))


def parse_prices(texts: tuple[str, ...]) -> dict[str, float]:
    """Parse `h100=1.99`, in USD per GPU-hour."""
    prices: dict[str, float] = {}
    for text in texts:
        gpu, equals, number = text.partition("=")
        try:
            price = float(number)
        except ValueError:
            price = math.nan
        if not equals or not gpu or not (price > 0 and math.isfinite(price)):
            raise ConfigError(f"`price` has `{text}`, expected GPU=USD above 0\nhint: such as --price h100=1.99")
        prices[gpu.strip()] = price
    return prices


def price_of(question: Question, name: str, gpu: GpuSpec) -> tuple[float | None, str]:
    """Return the price in USD per GPU-hour and its source; None without a price."""
    if name in question.prices:
        return question.prices[name], "given"
    kinds = [question.price_kind, *(kind for kind in PRICE_KINDS if kind != question.price_kind)]
    kind = next((kind for kind in kinds if kind in gpu.usd_per_gpu_hour), None)
    if kind is None:
        return None, f"the catalogue has no price of {gpu.name}"
    known = gpu.usd_per_gpu_hour[kind]
    words = kind if kind == question.price_kind else f"{kind}, for lack of {question.price_kind}"
    return known.value, f"{words}: {known.source}"


def is_drawn(workload: Workload) -> bool:
    """Return whether another seed makes another workload. Traces and mixes of traces do not depend on the seed."""
    if workload.format == "mix":
        return PREFIX in workload.source or ".json@" in workload.source or workload.source.endswith(".json")
    return not workload.has_clock or workload.format in ("generated", "fitted", "servegen")


def has_calls(workload: str) -> bool:
    """Return whether a rate counts calls of several requests each: a generator with `items`."""
    keys = [item.partition("=")[0] for item in workload.removeprefix(PREFIX).split(",")]
    return workload.startswith(PREFIX) and "items" in keys


def natural_load(workload: str, *, reading: SourceReading = STRICT) -> Load:
    """Return "sessions" for recorded sessions without start times, and "rate" for everything else."""
    if workload.startswith((PREFIX, MIX_PREFIX)) or not Path(workload).is_file():
        return "rate"
    opened = open_workload(workload, seed=0, rate=math.inf, digest=False, reading=reading)
    return "rate" if opened.has_clock or len(opened.turns.by_clock_rows) == len(opened.turns) else "sessions"


def content_files(question: Question) -> list[Path]:
    """Return the files that determine the answer, besides those of the package."""
    workload = question.workload
    sources = [source.workload for source in parse_mix(workload)] if workload.startswith(MIX_PREFIX) else [workload]
    names = [question.model, *question.gpus, *sources]
    names += [str(question.common.get(name) or "") for name in ("calibration", "draft_model")]
    files = [path for path in map(Path, names) if path.is_file()]
    models = [question.model, *filter(None, [question.common.get("draft_model")])]
    folders = [*(Path(model, "config.json") for model in models), *(Path(gpu, "gpu.json") for gpu in question.gpus)]
    files += [path for path in folders if path.is_file()]
    if (tokenizer := question.common.get("tokenizer")) is not None:
        files += [path for path in (Path(tokenizer), Path(tokenizer, "tokenizer.json")) if path.is_file()]
    operators = question.common.get("operators")
    return files if operators is None else files + sorted(Path(operators).glob("*.csv*"))
