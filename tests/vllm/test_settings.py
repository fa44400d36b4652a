"""Settings: where they are read, how SchedConfig follows from vLLM's configuration, and what is refused by name."""

from __future__ import annotations

import multiprocessing
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import UNSET

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.journal.records import JournalError
from lockstep.vllm import groups, recording, versions
from lockstep.vllm import settings as settings_module
from lockstep.vllm.checks import KINDS, WITHOUT_EFFECT
from lockstep.vllm.recording import begin_recording
from lockstep.vllm.settings import (
    ENVIRONMENT,
    OF_VLLM,
    VllmSettings,
    draft_method,
    read_settings,
    run_folder,
    sched_config,
    token_budget,
    unsupported,
)
from lockstep.vllm.tiers import CONNECTOR, cache_tiers
from tests.vllm.support import needs_vllm


def configuration(**changed: Any) -> Any:
    """The parts of a VllmConfig that the settings read. A name such as `scheduler_config.policy` changes a part."""
    config = SimpleNamespace(
        additional_config={},
        aux_output_config=SimpleNamespace(enabled=False),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        ec_manager_config=SimpleNamespace(encoder_cache_manager_cls=None),
        ec_transfer_config=None,
        kv_events_config=None,
        is_mm_encoder_only=False,
        kv_transfer_config=None,
        lora_config=None,
        model_config=SimpleNamespace(
            is_diffusion=False, is_encoder_decoder=False, max_model_len=2048, return_sampling_mask=False,
            runner_type="generate", supports_multimodal_inputs=False,
        ),
        num_speculative_tokens=0,
        observability_config=SimpleNamespace(
            enable_mfu_metrics=False, kv_cache_metrics=False, per_request_spec_decode_metrics="none"
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, pipeline_parallel_size=1, prefill_context_parallel_size=1
        ),
        scheduler_config=SimpleNamespace(
            async_scheduling=False, disable_chunked_mm_input=False, enable_chunked_prefill=True,
            long_prefill_token_threshold=0, max_num_active_seqs=None, max_num_batched_tokens=1024,
            max_num_scheduled_tokens=None, max_num_seqs=64,
            policy="fcfs", prefill_schedule_interval=1, scheduler_reserve_full_isl=True, watermark=0.0,
        ),
        speculative_config=None,
        use_v2_model_runner=False,
    )  # fmt: skip
    for name, value in changed.items():
        part, _, field = name.rpartition("__")
        setattr(getattr(config, part) if part else config, field, value)
    return config


def kv_cache(groups: int = 1, **changed: Any) -> Any:
    """The parts of a KVCacheConfig that the settings read."""
    specs = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16)) for _ in range(groups)]
    values = {
        "has_mamba_layers": False, "kv_cache_groups": specs, "needs_kv_cache_zeroing": False, "num_blocks": 501,
        **changed,
    }  # fmt: skip
    return SimpleNamespace(**values)


@pytest.fixture(autouse=True)
def groups_of_full_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups that `kv_cache` makes have full attention. Those of vLLM have the kinds of their specs."""
    original = groups.kind_of

    def kind_of(spec: Any, *, alone: bool = False) -> groups.Kind:
        return "full" if isinstance(spec, SimpleNamespace) else original(spec, alone=alone)

    monkeypatch.setattr(groups, "kind_of", kind_of)


def connector(name: str, module: str | None = None, **extra: Any) -> Any:
    """The parts of a KVTransferConfig that the settings read."""
    return SimpleNamespace(kv_connector=name, kv_connector_module_path=module, kv_connector_extra_config=extra)


def drafts(method: str = "ngram", slots: int = 0, *, multi_module: bool = False, by_batch_size: object = None) -> Any:
    """The parts of a SpeculativeConfig that the settings read."""
    return SimpleNamespace(
        max_num_new_slots_for_drafting=slots, method=method, num_speculative_tokens_per_batch_size=by_batch_size,
        use_multi_module_mtp=lambda: multi_module,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- their source


def test_without_settings_it_decides_like_profile_vllm() -> None:
    assert read_settings({}, {}) == VllmSettings(profile="vllm", journal="", journal_tokens=False, scheduler={})
    assert read_settings(None, {}) == VllmSettings()


def test_additional_config_stands_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "lockstep.toml"
    file.write_text('journal = "runs/of-the-file"\n[scheduler]\nschedule_policy = "spf"\n')
    environment = {ENVIRONMENT: str(file)}
    read = read_settings({}, environment)
    assert (read.journal, read.scheduler) == ("runs/of-the-file", {"schedule_policy": "spf"})
    assert read_settings({"lockstep": {"journal": "runs/a"}}, environment) == VllmSettings(journal="runs/a")
    assert read_settings({"other": 1}, environment) == read


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"jurnal": "x"}, "`jurnal` is no setting\nhint: journal or journal_tokens (docs/vllm.md)"),
        ({"x": 1}, "`x` is no setting\nhint: docs/vllm.md lists the settings"),
        ({"journal": 5}, "`journal` must be a string, the name of a run folder, got `5`"),
        ({"journal_tokens": "yes"}, "`journal_tokens` must be true or false, got `yes`"),
        ({"journal_tokens": True}, "`journal_tokens` is set, but there is no journal\nhint: set `journal`"),
        ({"mean_request_tokens": -1}, "`mean_request_tokens` must be a whole number of tokens, at least 0, got `-1`"),
        ({"mean_request_tokens": True}, "`mean_request_tokens` must be a whole number of tokens, at least 0"),
        ({"scheduler": []}, "`scheduler` must be a table of scheduler settings, got `[]`"),
        ({"scheduler": {"schedule_polcy": "spf"}}, "`scheduler.schedule_polcy` is no scheduler setting\n"),
        ({"scheduler": {"schedule_polcy": "spf"}}, "hint: schedule_policy"),
        ("vllm", "must be a table of settings, got `vllm`"),
    ],
)
def test_wrong_fields_are_refused_with_source_value_and_what_is_right(values: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_settings({"lockstep": values}, {})
    assert message in str(refused.value)
    assert str(refused.value).startswith("--additional-config `lockstep`")


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_settings_without_an_effect_under_vllm_are_refused_with_the_reason(name: str) -> None:
    assert name in SchedConfig.__struct_fields__
    with pytest.raises(ConfigError, match=rf"`scheduler\.{name}` cannot be set under vLLM: "):
        read_settings({"lockstep": {"scheduler": {name: getattr(SchedConfig(), name)}}}, {})


def test_every_setting_has_a_check() -> None:
    assert tuple(KINDS) == VllmSettings.__struct_fields__


@pytest.mark.parametrize("text", [None, "journal = ", "unknown = 1"], ids=["no file", "no TOML", "unknown field"])
def test_a_bad_file_is_refused_by_name(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "lockstep.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=f"{ENVIRONMENT}={file}"):
        read_settings({}, {ENVIRONMENT: str(file)})


@pytest.mark.parametrize("name", OF_VLLM)
def test_what_follows_from_vllm_cannot_be_set(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"`scheduler\.{name}` follows from vLLM's own options"):
        read_settings({"lockstep": {"scheduler": {name: 1}}}, {})


# ---------------------------------------------------------------------------------------------------------- run folders


def test_each_data_parallel_engine_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = VllmSettings(journal="runs/a")
    assert run_folder(settings, ranked(0)) == Path("runs/a")  # one engine
    assert run_folder(settings, ranked(1)) == Path("runs/a/engines/1")
    assert run_folder(settings, ranked(0, engines=2)) == Path("runs/a/engines/0")  # experts: the engines run in step
    monkeypatch.setattr(multiprocessing.current_process(), "name", "EngineCore_DP0")  # dense: vLLM sets the size to 1
    assert run_folder(settings, ranked(0)) == Path("runs/a/engines/0")


def test_start_in_the_name_of_a_folder_is_the_time_of_the_start() -> None:
    folder = run_folder(VllmSettings(journal="runs/{start}/engine"), ranked(0))
    assert re.fullmatch(r"runs/\d{8}T\d{6}Z/engine", str(folder))


def test_data_parallel_engines_have_the_start_of_the_process_that_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=7))
    monkeypatch.setattr(settings_module, "_started_s", lambda pid: 1e9 + pid)
    folders = [run_folder(VllmSettings(journal="runs/{start}"), ranked(index, engines=2)) for index in range(2)]
    assert folders == [Path(f"runs/20010909T014647Z/engines/{index}") for index in range(2)]


def test_a_journal_that_cannot_be_begun_is_refused_with_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "device_name", lambda: "cpu")  # requires vLLM
    settings = VllmSettings(journal=str(tmp_path / "run"))
    began = begin_recording(settings, SchedConfig(), ranked(0), "0.32.0")
    with pytest.raises(JournalError) as refused:
        begin_recording(settings, SchedConfig(), ranked(0), "0.32.0")
    began.close()
    assert str(refused.value) == (
        f"{tmp_path}/run/journal already holds a journal\n"
        f"hint: set another `journal`, such as {tmp_path}/run-{{start}}, a new folder for each start"
    )
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"cannot make .*/file/run/journal: .*\nhint: .* in which vLLM may write"):
        begin_recording(VllmSettings(journal=str(tmp_path / "file/run")), SchedConfig(), ranked(0), "0.32.0")


def ranked(index: int, engines: int = 1) -> Any:
    """A configuration of data-parallel engine `index`; of a dense model vLLM sets the number of engines to 1."""
    config = configuration(
        parallel_config__data_parallel_index=index,
        parallel_config__data_parallel_size=engines,
        parallel_config__tensor_parallel_size=1,
    )
    config.model_config.model = "demo"
    return config


# ---------------------------------------------------------------------------------------------------------- SchedConfig


def test_sizes_are_vllms() -> None:
    config = sched_config(configuration(), kv_cache(), VllmSettings(), 16)
    assert (config.page_size, config.pages) == (16, 500)  # block 0 is vLLM's null block
    assert (config.context_tokens_max, config.max_running_requests) == (2048, 64)
    assert (config.max_prefill_tokens, config.chunked_prefill_size) == (1024, 1024)
    assert (config.overlap_depth, config.batching, config.schedule_policy) == (0, "running_first", "fcfs")
    assert config.radix_cache


def test_asynchronous_scheduling_is_overlap_depth_1() -> None:
    changed = configuration(scheduler_config__async_scheduling=True, scheduler_config__enable_chunked_prefill=False)
    config = sched_config(changed, kv_cache(), VllmSettings(), 16)
    assert (config.overlap_depth, config.chunked_prefill_size) == (1, None)


def test_no_prefix_caching_is_no_radix_cache() -> None:
    changed = configuration(cache_config__enable_prefix_caching=False)
    assert not sched_config(changed, kv_cache(), VllmSettings(), 16).radix_cache


def test_vllms_priority_policy() -> None:
    config = sched_config(configuration(scheduler_config__policy="priority"), kv_cache(), VllmSettings(), 16)
    assert (config.schedule_policy, config.retraction_policy) == ("priority", "priority")
    assert config.schedule_low_priority_values_first


def test_settings_of_the_scheduler_go_over_the_profile() -> None:
    settings = VllmSettings(profile="sglang", scheduler={"schedule_policy": "spf", "batching": "prefill_first"})
    config = sched_config(configuration(), kv_cache(), settings, 16)
    assert (config.schedule_policy, config.batching) == ("spf", "prefill_first")


def test_an_unknown_scheduler_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`scheduler\.polcy` is no scheduler setting"):
        sched_config(configuration(), kv_cache(), VllmSettings(scheduler={"polcy": "fcfs"}), 16)


def test_a_pass_larger_than_the_workers_buffers_is_refused() -> None:
    mixed = VllmSettings(scheduler={"batching": "mixed"})
    with pytest.raises(ConfigError, match=r"a pass of vLLM has at most 1024 tokens") as refused:
        sched_config(configuration(), kv_cache(), mixed, 16)
    assert "chunked_prefill_size to at most 960" in str(refused.value)
    fits = VllmSettings(scheduler={"batching": "mixed", "chunked_prefill_size": 960})
    assert sched_config(configuration(), kv_cache(), fits, 16).chunked_prefill_size == 960


@pytest.mark.parametrize("batching", ["prefill_first", "mixed"])
def test_verifications_larger_than_the_workers_buffers_are_refused(batching: str) -> None:
    """Without one budget for prompts and decodes, a pass verifies the drafts of all running requests."""
    settings = VllmSettings(scheduler={"batching": batching, "chunked_prefill_size": 64})

    def drafted(number: int) -> Any:
        return sched_config(
            configuration(speculative_config=drafts(), num_speculative_tokens=number), kv_cache(), settings, 16
        )

    assert drafted(14).num_speculative_tokens == 14  # 64 requests: 960 tokens, and 64 of a prompt
    with pytest.raises(ConfigError, match=r"decodes all 64 running requests .* 1088 tokens, .* at most 1024 tokens"):
        drafted(16)


def test_a_mean_length_without_layers_of_several_kinds_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`mean_request_tokens` divides KV blocks .* have one pool\nhint: remove it"):
        sched_config(configuration(), kv_cache(), VllmSettings(mean_request_tokens=300), 16)


def test_the_budget_leaves_room_for_drafts() -> None:
    assert token_budget(configuration()) == 1024
    assert token_budget(configuration(scheduler_config__max_num_scheduled_tokens=600)) == 600
    assert token_budget(configuration(speculative_config=drafts(slots=2))) == 1024 - 2 * 64
    with pytest.raises(ConfigError, match=r"1024 tokens .* no room beside the 16 draft slots of each of 64 requests"):
        token_budget(configuration(speculative_config=drafts(slots=16)))


def test_pipeline_stages_are_microbatches() -> None:
    config = sched_config(configuration(parallel_config__pipeline_parallel_size=2), kv_cache(), VllmSettings(), 16)
    assert (config.pp_size, config.microbatches, config.launches_max) == (2, 2, 2)


def one_group() -> Any:
    """A KV cache of two layers, with 2,000 bytes of each in a page."""
    spec = SimpleNamespace(block_size=16, page_size_bytes=2_000)
    return kv_cache(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"])])


def test_host_memory_in_pages() -> None:
    changed = configuration(kv_transfer_config=connector(*CONNECTOR, host_gb=0.001, write_policy="write_back"))
    config = sched_config(changed, one_group(), VllmSettings(), 16)
    assert (config.tiers.host_pages, config.tiers.write_policy) == (250, "write_back")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "missing required field `host_gb`"),
        ({"host_gb": 1, "blocks": 5}, "unknown field `blocks`"),
        ({"host_gb": 1e-6}, r"`host_gb` 1e-06 of HostTier is less than one page, 0.000004 GB"),
        ({"host_gb": 1, "write_policy": "never"}, r"`tiers.write_policy` must be"),
    ],
)
def test_wrong_settings_of_the_host_tier_are_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cache_tiers(configuration(kv_transfer_config=connector(*CONNECTOR, **extra)), one_group())


@pytest.mark.parametrize(
    ("method", "core"),
    [("ngram", "ngram"), ("suffix", "ngram"), ("draft_model", "draft_model"), ("mtp", "mtp"), ("eagle3", "eagle")],
)
def test_methods_of_drafts(method: str, core: str) -> None:
    assert draft_method(configuration(speculative_config=drafts(method))) == core


# ------------------------------------------------------------------------------------------------------- not supported

REFUSALS: dict[str, dict[str, Any]] = {
    "KV connector NixlConnector (--kv-transfer-config; hint: HostTier": {
        "kv_transfer_config": connector("NixlConnector")
    },
    "HostTier without prefix caching": {
        "kv_transfer_config": connector(*CONNECTOR, host_gb=1),
        "cache_config__enable_prefix_caching": False,
    },
    "HostTier beside anything but one KV cache group": {
        "kv_transfer_config": connector(*CONNECTOR, host_gb=1),
        "parallel_config__pipeline_parallel_size": 2,
    },
    "--ec-manager-config": {"ec_manager_config": SimpleNamespace(encoder_cache_manager_cls="package.Manager")},
    "--no-scheduler-reserve-full-isl": {"scheduler_config__scheduler_reserve_full_isl": False},
    "--per-request-spec-decode-metrics": {"observability_config__per_request_spec_decode_metrics": "summary"},
    "--kv-cache-metrics": {"observability_config__kv_cache_metrics": True},
    "--enable-mfu-metrics": {"observability_config__enable_mfu_metrics": True},
    "--ec-transfer-config": {"ec_transfer_config": "shared storage"},
    "--kv-events-config": {"kv_events_config": SimpleNamespace(enable_kv_cache_events=True)},
    "--no-async-scheduling": {"parallel_config__pipeline_parallel_size": 2, "scheduler_config__async_scheduling": True},
    "drafts with pipeline parallelism": {
        "parallel_config__pipeline_parallel_size": 2,
        "speculative_config": drafts("ngram"),
    },
    "context parallelism": {"parallel_config__decode_context_parallel_size": 2},
    "encoder-decoder models": {"model_config__is_encoder_decoder": True},
    "diffusion models": {"model_config__is_diffusion": True},
    "--watermark": {"scheduler_config__watermark": 0.1},
    "--disable-chunked-mm-input": {
        "model_config__supports_multimodal_inputs": True,
        "scheduler_config__disable_chunked_mm_input": True,
    },
    "engines that only encode": {"is_mm_encoder_only": True},
    "MTP with several modules": {"speculative_config": drafts("mtp", multi_module=True)},
    "by batch size": {"speculative_config": drafts(by_batch_size=[(1, 8, 3)])},
    "drafts of method ngram with model runner V2 (hint: VLLM_USE_V2_MODEL_RUNNER=0)": {
        "speculative_config": drafts(),
        "use_v2_model_runner": True,
    },
    "drafts with model runner V2 and asynchronous scheduling (hint: --no-async-scheduling)": {
        "speculative_config": drafts("draft_model"),
        "use_v2_model_runner": True,
        "scheduler_config__async_scheduling": True,
    },
    "auxiliary outputs": {"aux_output_config": SimpleNamespace(enabled=True)},
    "sampling masks": {"model_config__return_sampling_mask": True},
    "--prefill-schedule-interval": {"scheduler_config__prefill_schedule_interval": 4},
    "--long-prefill-token-threshold": {"scheduler_config__long_prefill_token_threshold": 100},
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_supported_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"lockstep\.vllm does not support: ") as refused:
        sched_config(configuration(**REFUSALS[name]), kv_cache(), VllmSettings(), 16)
    assert name in str(refused.value)
    assert "--scheduler-cls" in str(refused.value)


@pytest.mark.parametrize(
    ("cache", "block_size", "name"),
    [
        pytest.param(kv_cache(2), 16, "2 KV cache groups other than", marks=needs_vllm),
        pytest.param(
            kv_cache(has_mamba_layers=True),
            16,
            "prefix caching of recurrent state (Mamba, GDN; hint: --no-enable-pre",
            marks=needs_vllm,
        ),
        (kv_cache(0), 16, "models without KV cache that generate text"),
        (kv_cache(needs_kv_cache_zeroing=True), 16, "zeroed KV blocks"),
        (kv_cache(), 48, "a block size of 48 tokens, which is no power of two"),
    ],
)
def test_kv_caches_that_are_refused(cache: Any, block_size: int, name: str) -> None:
    (finding,) = unsupported(configuration(), cache, block_size)
    assert name in finding


def groups_of(*specs: Any, blocks: int = 501) -> Any:
    """A KVCacheConfig of vLLM with these groups."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    return KVCacheConfig(blocks, [], [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)])


def attention(block_size: int = 64, kind: str = "FullAttentionSpec", **changed: Any) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface

    sizes = {"block_size": block_size, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    return getattr(kv_cache_interface, kind)(**sizes, **changed)


def state(mode: str = "none", block_size: int = 2048, **changed: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    shapes = {"shapes": ((4, 4),), "dtypes": (torch.float32,)}
    return MambaSpec(block_size=block_size, mamba_cache_mode=mode, **shapes, **changed)


@needs_vllm
def test_recurrent_state_is_the_state_slots_of_the_core() -> None:
    plain = configuration(cache_config__enable_prefix_caching=False)
    config = sched_config(plain, groups_of(state(), attention(), state()), VllmSettings(), 2048)
    slots = config.hybrid.state_slots
    assert (config.page_size, config.pages + 2 * slots) == (64, 500)  # the pages of the full group
    assert slots == 27  # a request of 1,024 tokens has 16 pages and a block in each of two groups
    assert not config.radix_cache
    short = sched_config(plain, groups_of(state(), attention(), state()), VllmSettings(mean_request_tokens=64), 2048)
    assert short.hybrid.state_slots == 64  # as many as requests run at once


@needs_vllm
def test_a_model_with_recurrent_state_only_has_pages_that_are_counted() -> None:
    plain = configuration(cache_config__enable_prefix_caching=False)
    config = sched_config(plain, groups_of(state(), blocks=21), VllmSettings(), 2048)
    assert config.hybrid.state_slots == 20
    assert config.pages * config.page_size == 64 * 2048  # every request may have the whole context


@needs_vllm
@pytest.mark.parametrize(
    ("changed", "specs", "block_size", "name"),
    [
        ({"cache_config__enable_prefix_caching": True}, ("align", 64), 64, "hint: --no-enable-prefix-caching"),
        ({"speculative_config": drafts()}, ("none", 64), 64, "drafts of a model with recurrent state"),
        ({}, ("align", 64), 64, "beside layers other than those of one full attention"),
        ({}, ("none", 528), 528, "528 tokens, which is no power of two (hint: --block-size 1024)"),
    ],
)
def test_models_with_recurrent_state_that_are_refused(
    changed: dict[str, Any], specs: tuple[str, int], block_size: int, name: str
) -> None:
    mode, attention_block = specs
    plain = configuration(**{"cache_config__enable_prefix_caching": False, **changed})
    (finding,) = unsupported(plain, groups_of(state(mode), attention(attention_block)), block_size)
    assert name in finding


@needs_vllm
@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("FullAttentionSpec", {"sliding_window": 128}),  # full attention and windows without vLLM's hybrid manager
        ("SlidingWindowSpec", {"sliding_window": 128}),
        ("ChunkedLocalAttentionSpec", {"attention_chunk_size": 128}),
    ],
)
def test_a_group_alone_keeps_all_its_blocks(kind: str, changed: dict[str, Any]) -> None:
    cache = groups_of(attention(16, kind, **changed))
    config = sched_config(configuration(), cache, VllmSettings(), 16)
    assert (config.pages, config.hybrid) == (500, UNSET)
    made = groups.KvGroups(groups.kinds_of(cache), config.pages)
    assert made.tables([4, 5], made.windows_of([4, 5])) == ([4, 5],)


@needs_vllm
def test_a_group_whose_blocks_vllm_itself_frees_is_refused() -> None:
    (finding,) = unsupported(configuration(), groups_of(attention(16, "RSWASpec", rswa_window=128)), 16)
    assert finding == "a KV cache of kind RSWASpec"


def test_all_findings_are_named_at_once() -> None:
    changed = configuration(kv_transfer_config=connector("NixlConnector"), model_config__is_diffusion=True)
    assert len(unsupported(changed, kv_cache(), 48)) == 3
    assert unsupported(configuration(), kv_cache(), 16) == []


# ------------------------------------------------------------------------------------------------------------ versions


@pytest.mark.parametrize("version", ["0.32.0", "0.32.4+cpu", "0.33.0rc1"])
def test_supported_versions(version: str) -> None:
    versions.check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0", ""])
def test_other_versions_are_refused_in_one_sentence(version: str) -> None:
    with pytest.raises(ConfigError, match=r"supports vLLM 0\.32 and 0\.33, but"):
        versions.check_version(version)
