"""The layout of an engine over GPUs, with the work of a stage that drafts."""

from __future__ import annotations

from dataclasses import replace

from lockstep.sim.catalogue import load_model
from lockstep.sim.cost import ModelSpec
from lockstep.sim.cost.models import checked_weights_dtype
from lockstep.sim.cost.parallel import Parallelism
from lockstep.sim.cost.stages import drafter_layers
from lockstep.sim.scenario.scenario import Scenario

DRAFTERS = ("draft_model", "eagle", "mtp")  # methods with passes of a drafter; n-grams have none


def layout_of(scenario: Scenario, model: ModelSpec) -> Parallelism:
    """Return the layout of an engine. Raises CapacityError for an impossible one, CatalogueError for a drafter."""
    split, method = scenario.parallelism, scenario.settings.get("speculative_method")
    if split.pp == 1 or method not in DRAFTERS:
        return split
    drafter = None
    if scenario.draft_model is not None:
        small = load_model(scenario.draft_model)
        drafter = small, checked_weights_dtype(small, None)
    beside = drafter_layers(model, checked_weights_dtype(model, scenario.weights_dtype), drafter)
    return replace(split, drafter_layers=beside, drafts_first=method == "draft_model")
