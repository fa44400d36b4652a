"""Settings of `lockstep serve`: from flags, from a file, and their errors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")

from click.testing import CliRunner

from lockstep.api.engines import HINTS
from lockstep.api.processes.launch import listen
from lockstep.api.serve import check, serve
from lockstep.api.settings import ServeSettings, read_settings, sched_values
from lockstep.core.cluster.router import RouterConfig, policy_settings
from lockstep.core.command import main
from lockstep.core.contract.errors import ConfigError
from lockstep.host.options import options_of
from lockstep.sim import cost

NO_MODEL = (
    "`model`: there is no folder /nowhere" if find_spec("torch") else "a model needs the package lockstep-runtime"
)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lora": {"law": "/nowhere"}}, "`lora` law: `/nowhere` has no adapter_config.json\nhint: "),
        ({"draft_model": "/nowhere"}, "`draft_model`: there is no folder /nowhere\nhint: "),
        ({"model": "/nowhere"}, "`model`: there is no folder /nowhere\nhint: "),
    ],
)
def test_folders_that_are_none_are_found_before_anything_starts(given: dict[str, Any], said: str) -> None:
    pytest.importorskip("torch", reason="needs the runtime")
    with pytest.raises(ConfigError) as caught:
        check(read_settings(None, given))
    assert str(caught.value).startswith(said)


def test_every_setting_of_the_router_is_one_of_the_server() -> None:
    router, options = RouterConfig(), options_of(ServeSettings)
    assert {name for name in options if name.startswith("router_")} == {f"router_{name}" for name in policy_settings()}
    for name in policy_settings():
        assert options[f"router_{name}"].default == getattr(router, name)


def test_an_option_of_an_engine_has_one_name_in_programs_and_settings() -> None:
    pytest.importorskip("torch", reason="needs the runtime")
    from lockstep.runtime.engine_config import EngineConfig

    programs, served = options_of(EngineConfig), options_of(ServeSettings)
    by_flag = {field.flag: name for name, field in programs.items()}
    assert {name for name, field in served.items() if by_flag.get(field.flag, name) != name} == set()
    assert {"tp", "random_weights"} <= set(programs) & set(served)
    assert "lora" in set(EngineConfig.__struct_fields__) & set(ServeSettings.__struct_fields__)


def test_flags_go_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        "emulate = 'qwen3-8b@h200'\nport = 9000\n[limits]\nsamples_max = 4\n[set]\nmax_running_requests = 8"
    )
    settings = read_settings(file, {"port": 9001, "set": {"overlap_depth": 0}})
    assert (settings.emulate, settings.port, settings.limits.samples_max) == ("qwen3-8b@h200", 9001, 4)
    assert settings.set == {"max_running_requests": 8, "overlap_depth": 0}
    assert settings.limits.prompts_max == ServeSettings().limits.prompts_max


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"port": "80"}, r"Expected `int`, got `str` - at `\$\.port`"),
        ({"port": 70_000}, "`port` must be at most 65535, got `70000`"),
        ({"api_workers": 0}, "`api_workers` must be at least 1"),
        ({"host": "0.0.0.0"}, "`host` 0.0.0.0 can be reached from other machines"),
        ({"host": "example.org"}, "can be reached from other machines"),
        ({"emulate": "qwen3-8b"}, "`emulate` must be MODEL@GPU"),
        ({"emulate": "a@b", "model": "c"}, "two kinds of engine"),
        ({"speed": 0.0, "emulate": "a@b"}, "`speed` must be above 0"),
        ({"speed": 2.0}, "`speed` is for an emulated engine"),
        ({"cuda_graphs": "maybe"}, "Invalid enum value 'maybe'"),
        ({"admin_socket": "a"}, "`admin_socket` needs `api_keys`"),
        ({"set": {"tiers": 1}}, r"`tiers` .* follow from options of the engine\nhint: --host-cache-gb 20"),
        ({"storage": "kv"}, r"`storage` requires memory below the device, but `host_cache_gb` is 0"),
        ({"host_cache_gb": 2.0, "storage": "kv"}, r"`storage` is kv, but `storage_gb` is 0\nhint: add --storage-gb"),
        ({"host_cache_gb": 2.0, "emulate": "qwen3-8b@h200"}, r"`host_cache_gb` is for a model"),
        (
            {"set": {"hybrid": 1}},
            r"`hybrid` follows from the model and from options of the engine\nhint: --swa-full",
        ),
        ({"set": {"overlap_deph": 1}}, r"no setting `overlap_deph` of the scheduler\nhint: did you mean overlap_depth"),
        ({"set": {"foo": 1}}, r"no setting `foo` of the scheduler\nhint: `lockstep serve --dry-run` prints them all"),
        (
            {"set": {"speculative_method": "eagle"}},
            "`speculative_method` is eagle, but no `draft_model` is given",
        ),
        (
            {"set": {"speculative_method": "mtp"}, "tp": 2},
            "`speculative_method` is mtp, but 2 processes run the model",
        ),
        (
            {"set": {"encoder_budget_tokens": 64}, "emulate": "a@b"},
            "`encoder_budget_tokens` is 64, but an emulated engine takes no media",
        ),
        (
            {"set": {"encoder_cache_tokens": 64}, "emulate": "a@b"},
            "`encoder_cache_tokens` is 64, but an emulated engine takes no media",
        ),
        (
            {"set": {"speculative_method": "draft_model"}},
            "`speculative_method` is draft_model, but no `draft_model` is given",
        ),
        (
            {"set": {"jump_forward_tokens": 4}, "emulate": "a@b"},
            "`jump_forward_tokens` is 4, but an emulated engine draws each token by itself",
        ),
        (
            {"set": {"speculative_method": "ngram"}, "emulate": "a@b"},
            "`speculative_method` is ngram, but an emulated engine verifies no drafts",
        ),
        ({"limits": {"samples": 3}}, "unknown field `samples`"),
        ({"limits": {"head_s": float("inf")}}, "`limits.head_s` must be above 0, and finite, got `inf`"),
        ({"journal": "run\0"}, "`journal` has a zero character"),
        ({"stored_responses": -1}, "`stored_responses` must be at least 0"),
        ({"api_workers": 10**6}, "`api_workers` must be at most 256, got `1000000`"),
        ({"seed": 2**63}, "`seed` must be at most 9223372036854775807"),
        ({"random_weights": -1}, "`random_weights` must be a seed of at least 0"),
        ({"speed": 1e-300, "emulate": "a@b"}, "`speed` must be above 0, from 1e-6"),
        ({"answer_tokens": 5}, "`answer_tokens` is for an emulated engine"),
        ({"dtype": "int3", "emulate": "a@b"}, "`dtype` is for a model"),
        ({"max_lora_rank": 32}, "`max_lora_rank` is 32, but LoRA is off\nhint: --lora NAME=PATH, or --set max_loras=N"),
        ({"journal": ""}, "`journal` is empty\nhint: give a path, or drop it"),
        ({"served_model_name": ("",)}, "`served_model_name` has an empty name"),
        ({"set": {"isolate_tenants": 3}}, "`isolate_tenants` must be true or false, got `3`"),
        ({"set": {"eos_token_ids": ["a"]}}, "`eos_token_ids`: Expected `int`, got `str`"),
        ({"log_level": "loud"}, "Invalid enum value 'loud'"),
    ],
)
def test_impossible_settings_are_one_clear_error(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_settings(None, given)


@pytest.mark.parametrize("name", ["--journal", "--usage-dir"])
def test_a_folder_that_cannot_be_written_to_is_found_before_anything_starts(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for given in (tmp_path / "file", tmp_path / "file" / "run"):
        for words in ((), ("--dry-run",)):
            shown = CliRunner().invoke(serve, ["--emulate", "qwen3-0.6b@h200", name, str(given), *words])
            assert isinstance(shown.exception, ConfigError), shown.output
            assert f"`{name[2:].replace('-', '_')}`: {given} cannot be written to" in str(shown.exception)
    assert not list(tmp_path.glob("file?*"))


def test_a_name_that_is_none_is_found_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("prot = 1")
    with pytest.raises(ConfigError, match=r"no setting `prot`\nhint: did you mean port"):
        read_settings(file, {})


@pytest.mark.parametrize("text", ["port = ", "port: 1", "\xff"])
def test_a_file_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"serve\.toml cannot be read"):
        read_settings(file, {})


def test_addresses_of_this_machine_need_no_keys() -> None:
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert ServeSettings(host=host).host == host


def test_values_of_the_scheduler() -> None:
    assert sched_values(("a=1", "b=true", "c=none", "d=[1, 2]", "e=x=y")) == {
        "a": 1,
        "b": True,
        "c": "none",
        "d": [1, 2],
        "e": "x=y",
    }
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        sched_values(("a",))


def test_a_dry_run_prints_the_configuration() -> None:
    arguments = ["--emulate", "qwen3-8b@h200", "--set", "max_running_requests=17", "--port", "0", "--dry-run"]
    said = CliRunner().invoke(serve, arguments)
    assert said.exit_code == 0, said.output
    for line in (
        "model      qwen3-8b (emulated) on 1 x H200-SXM, emulated",
        "listens    127.0.0.1:0",
        "processes  1 engine, 1 API worker",
        "  max_running_requests = 17",
    ):
        assert line in said.output.splitlines()
    assert "KV tokens" in said.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--model", "/nowhere"),
            NO_MODEL,
        ),
        (("--emulate", "qwen9-8b@h200"), r"`emulate`: unknown model `qwen9-8b`"),
        (("--emulate", "qwen3-8b@h900"), r"`emulate`: unknown GPU `h900`"),
        (("--emulate", "qwen3-235b-a22b@h200", "--dry-run"), r"`emulate`: qwen3-235b-a22b does not fit"),
        (("--emulate", "qwen3-8b@h200", "--tokenizer", "/nowhere"), "/nowhere/tokenizer.json` cannot be read"),
        (("--emulate", "qwen3-8b@h200", "--api-keys", "/nowhere"), "`api_keys`: /nowhere cannot be read"),
        (("--set", "overlap_deph=1"), "no setting `overlap_deph`"),
        (("--emulate", "qwen3-8b@h200", "--set", "page_size=24", "--dry-run"), "`page_size` must be a power of two"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_missing_files_are_reported_before_anything_is_started(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        serve.main([*arguments, "--port", "0"], standalone_mode=False)


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("nobody.invalid", "`host`: nobody.invalid is not known: .*\nhint: 127.0.0.1, or an address"),
        (f"{'a' * 70}..b", "`host`: a*..b is not known: it is not a host name"),
        ("192.0.2.1", "`port`: 192.0.2.1:0 cannot be listened on: .*\nhint: the address must be one of this machine"),
    ],
)
def test_where_it_cannot_listen_is_one_clear_error(host: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        listen(host, 0)


def test_a_share_of_an_unknown_tenant_is_reported_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("".join(f"[[keys]]\ntenant = '{one}'\nkey = '{one * 16}'\n" for one in "ab"))
    settings = {"emulate": "qwen3-8b@h200", "dp": 2, "api_keys": str(file)}
    check(read_settings(None, {**settings, "admission": "open=4,share.a=2"}))
    assert not caplog.messages
    check(read_settings(None, {**settings, "admission": "open=4,share.a=2,share.nosuch=2"}))
    (told,) = caplog.messages
    assert f"`admission` has shares of `nosuch`, but the tenants of {file} are `a`, `b`;" in told


def test_errors_of_an_emulated_engine_name_options_that_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"`fp8_activations` is on, but weights are bf16\nhint: .*quantization_config"
    ):
        serve.main(["--emulate", "qwen3-8b@h200", "--dry-run", "--fp8-activations", "on"], standalone_mode=False)
    options = {option for parameter in serve.params for option in parameter.opts}
    found = set()
    for module in ("capacity", "calibration", "hardware", "models", "lora"):
        told = " ".join(errors_of(Path(cost.__file__).with_name(f"{module}.py")))
        for theirs, ours in HINTS.items():
            told = told.replace(theirs, ours)
        found |= set(re.findall(r"--[a-z][a-z0-9-]*", told))
    assert "--tp" in found
    assert found <= options


def errors_of(path: Path) -> Iterator[str]:
    """The error messages that a module raises, without the values in them."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Raise):
            parts = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
            yield "".join(one for one in parts if isinstance(one, str))


def test_every_setting_has_a_flag_or_is_a_table() -> None:
    flags = {parameter.name for parameter in serve.params}
    assert set(ServeSettings.__struct_fields__) - flags == {"limits", "set"}


def test_a_file_of_settings_may_have_the_names_of_flags_and_errors_have_its_line(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('emulate = "qwen3-8b@h200"\nserved-model-name = ["chat"]\nport = 8001\n[set]\npage_size = 32\n')
    settings = read_settings(file, {"port": 8002})
    assert (settings.port, settings.served_model_name, settings.set) == (8002, ("chat",), {"page_size": 32})
    for text, message in (
        ('host = "127.0.0.1"\nprot = 1\n', "line 2: there is no setting `prot`\nhint: did you mean port"),
        ('host = "127.0.0.1"\n\nport = 70000\n', "line 3: `port`"),
        ("port = 8000\nemulate = 3\n", "line 2: Expected `str"),
        ("api-workers = 1\napi_workers = 2\n", "line 2: `api_workers` is given twice"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            read_settings(file, {})
        assert f"serve.toml, {message}" in str(caught.value)


def test_saved_settings_are_read_back(tmp_path: Path) -> None:
    file = tmp_path / "again.toml"
    asked = [
        "serve",
        "--emulate",
        "qwen3-8b@h200",
        "--dp",
        "2",
        "--set",
        "page_size=32",
        "--save",
        str(file),
        "--dry-run",
    ]
    assert main(asked) == 0
    settings = read_settings(file, {})
    assert (settings.emulate, settings.dp, settings.set) == ("qwen3-8b@h200", 2, {"page_size": 32})
    assert main(["serve", str(file), "--dry-run"]) == 0
    assert main(["serve", str(file), "--config", str(file), "--dry-run"]) == 2
