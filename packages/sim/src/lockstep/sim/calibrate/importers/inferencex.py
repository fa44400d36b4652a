"""Result files of InferenceX (before: InferenceMAX): means of a closed loop, with the layout of the engine.

Source: SemiAnalysisAI/InferenceX, utils/process_result.py at 00e51cc7. Latencies are in seconds, as `mean_ttft`,
`median_tpot`, or `ttft_p50`; `hw` begins with the GPU; `conc` is the number of requests in progress. Records of the
dashboard have the same figures below `metrics`. Prompts and answers are uniform in [0.8 N, N] of `isl` and `osl`.
"""

from __future__ import annotations

import re

from lockstep.sim.calibrate.importers.fields import Fields
from lockstep.sim.calibrate.load_runs import MeasuredPoint, Measurements, ServerFacts

FORM = "InferenceX"
FRAMEWORKS = {"trt": "trtllm", "trtllm": "trtllm", "tensorrt-llm": "trtllm", "vllm": "vllm", "sglang": "sglang"}
UNIFORM_FROM = 0.8
STATISTICS = ("mean_{0}", "median_{0}", "{0}_p50")
TAKES = "`--prompt-tokens` and `--output-tokens` set lengths that a file lacks"


def is_inferencex(found: Fields) -> bool:
    """Whether an object is a result of InferenceX."""
    return "framework" in found and "conc" in found and ("hw" in found or "hardware" in found)


def read_inferencex(
    found: Fields, name: str, prompt_tokens: int | None, output_tokens: int | None
) -> Measurements | str:
    """Read one result. Returns the reason as text if it is of a kind that is not modelled.

    Args:
        prompt_tokens, output_tokens: lengths, for a file without `isl` and `osl`.
    """
    if str(found.value.get("dp_attention", "")).lower() == "true":
        return "data-parallel attention"
    if found.value.get("is_multinode") or found.value.get("disagg"):
        return "several nodes, or prefill and decode apart"
    if found.value.get("mtp") not in (None, "", "off") or found.value.get("spec_decoding") not in (None, "", "none"):
        return "speculative decoding"
    framework = found.text("framework").lower()
    metrics = found.inner("metrics") if "metrics" in found else found
    lengths = []
    for key, given in (("isl", prompt_tokens), ("osl", output_tokens)):
        if key not in found and given is None:
            found.refuse(key, None, "a number of tokens", TAKES)
        lengths.append(float(given) if given is not None and key not in found else found.number(key, least=1))
    hardware = found.text("hw") or found.text("hardware")
    ep = found.number("ep", default=1.0)
    facts = ServerFacts(
        engine=FRAMEWORKS.get(framework, framework),
        engine_version=found.text("image"),
        model=found.text("model"),
        gpu=re.split(r"[-_]", hardware.lower())[0],
        tp=int(found.number("tp", least=1)),
        ep=int(ep) or 1,
        weights_dtype=found.text("precision").lower(),
    )
    point = MeasuredPoint(
        name,
        FORM,
        prompt_tokens=lengths[0],
        output_tokens=lengths[1],
        in_progress=found.number("conc", least=1),
        ttft_s=_statistic(metrics, "ttft"),
        tpot_s=_statistic(metrics, "tpot"),
        requests=0,
        is_closed=True,
        facts=facts,
        lengths_from=UNIFORM_FROM,
    )
    return Measurements(points=(point,))


def _statistic(metrics: Fields, metric: str) -> float:
    for form in STATISTICS:
        if (key := form.format(metric)) in metrics:
            return metrics.number(key, least=1e-9)
    return metrics.refuse(STATISTICS[0].format(metric), None, "a time in seconds")
