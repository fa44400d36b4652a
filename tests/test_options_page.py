"""docs/options.md lists every option beside its default; `python -m tests.test_options_page` writes it anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.host.engine_options import EngineOptions
from lockstep.host.options import option_table, options_of
from lockstep.sim.cli.plan import PlanOptions
from lockstep.sim.cli.run_options import RunOptions
from lockstep.sim.cluster.scenario import ClusterScenario
from lockstep.sim.scenario.scenario import Scenario, names_where
from lockstep.sim.scenario.settings import SCHEDULER_OPTIONS, flag_of_setting, tier_fields
from lockstep.tools.sender_options import BenchOptions, LiveOptions

PAGE = Path(__file__).parents[1] / "docs/options.md"
HEAD = """# Options

Each option is declared once, at the field that holds its value; flags, command lines that a run folder keeps, trials of
a plan and these tables follow from that. What settings of the scheduler do: [scheduling.md](scheduling.md).
`LLM` and a file of `serve --config` have the options of an engine by the names of their flags, with _ for -.
`python -m tests.test_options_page` writes this page.
"""


def page() -> str:
    from lockstep.api.settings import ServeSettings

    own = [field for name, field in options_of(ServeSettings).items() if name not in options_of(EngineOptions)]
    sections = {
        "A simulated engine and its load: `simulate`, `plan`": options_of(Scenario).values(),
        "A simulated cluster: `simulate`": options_of(ClusterScenario).values(),
        "Memory beside and below the pages: `simulate`, `plan`": tier_fields().values(),
        "What `simulate` writes and prints": options_of(RunOptions).values(),
        "The question of a `plan`": options_of(PlanOptions).values(),
        "An engine with a model: `generate`, `serve`, `LLM`": options_of(EngineOptions).values(),
        "A server: `serve`": own,
        "A benchmark of a server: `bench serve`": [
            *options_of(BenchOptions).values(),
            *(options_of(Scenario)[name] for name in names_where("sent")),
        ],
        "A trace sent to a server: `replay --to`": options_of(LiveOptions).values(),
    }
    tables = {title: option_table(fields) for title, fields in sections.items()}
    tables["Settings of the scheduler: `simulate`, `plan`, `replay --what-if`; `serve --set NAME=VALUE`"] = settings()
    return "\n".join([HEAD, *(f"## {title}\n\n{table}\n" for title, table in tables.items())])


def settings() -> str:
    """The settings of the scheduler as a table; their help texts end with the default."""
    rows = ["| option | meaning |", "|---|---|"]
    return "\n".join([*rows, *(f"| `{flag_of_setting(name)}` | {text} |" for name, _, text in SCHEDULER_OPTIONS)])


def test_the_page_of_options_is_what_the_options_are() -> None:
    pytest.importorskip("lockstep.api.settings", reason="the server is not installed")
    assert PAGE.read_text(encoding="utf-8") == page()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
