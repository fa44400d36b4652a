"""The journal of a whole vLLM engine: it replays, names requests by vLLM's ids, and holds no text."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import BatchFinished, RequestArrived, TokenIds
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import UnsealedRecord
from lockstep.core.journal.replay import replay
from lockstep.tools.explain import explain
from lockstep.tools.journal import journal
from lockstep.tools.replay import replay as replay_command
from tests.vllm.support import (
    SMALL_POOL,
    Asked,
    assert_idle,
    engine,
    mixed_requests,
    model_folder,
    needs_vllm,
    run,
    scheduler_of,
)

pytestmark = needs_vllm


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of 60 requests: retractions, cancellations, grammars, samples."""
    folder = tmp_path_factory.mktemp("run") / "engine"
    requests = mixed_requests(58, seed=7)
    for number in range(2):
        requests.append(Asked((5, 6, 7 + number), {"max_tokens": 9, "temperature": 0.8, "seed": number, "n": 3}))
    settings = {"journal": str(folder)}
    with engine(model_folder("demo"), overlap=request.param, settings=settings, **SMALL_POOL) as llm:
        run(llm, requests, {1: 1, 5: 3})
        assert_idle(llm)
        assert scheduler_of(llm).engine_state().counts.retractions > 0
    return folder


def command(what: object, *arguments: object) -> str:
    done = CliRunner().invoke(what, [str(one) for one in arguments])  # type: ignore[arg-type]
    assert done.exit_code == 0, done.output
    return done.output


def test_every_decision_is_decided_again(recorded: Path) -> None:
    replay(recorded)
    command(journal, "verify", recorded)
    assert "clean, ended: closed" in command(journal, "info", recorded)
    assert "host kind" in command(journal, "info", recorded)
    assert command(replay_command, recorded)


def test_a_request_is_named_by_the_clients_id(recorded: Path) -> None:
    story = command(explain, recorded, "--request", "17")  # `run` numbers requests, and so does vLLM.LLM
    assert "17-" in story.splitlines()[0]  # vLLM adds random digits to it
    whole = story.split()[0]
    assert command(explain, recorded, "--request", whole) == story


def test_the_samples_of_a_request_are_named_together(recorded: Path) -> None:
    done = CliRunner().invoke(explain, [str(recorded), "--request", "58"])
    assert done.exit_code != 0
    assert "is the label of 3 requests" in done.output


def test_the_slowest_are_explained(recorded: Path) -> None:
    assert "what they waited for" in command(explain, recorded, "--slowest", "ttft", 10)


def test_the_settings_of_a_replay_can_be_changed(recorded: Path) -> None:
    """Until batches of this machine are calibrated, with the times of a GPU of the catalogue."""
    options = ("--what-if", "--policy", "spf", "--model", "qwen3-8b", "--gpu", "h200")
    assert "ttft" in command(replay_command, recorded, *options).lower()


def test_no_token_of_a_prompt_is_in_the_journal(recorded: Path) -> None:
    for record in read_journal(recorded).events():
        if isinstance(record.event, RequestArrived) and isinstance(record.event.prompt, TokenIds):
            assert np.frombuffer(record.event.prompt.ids, np.int32).min() > 1 << 30
        if isinstance(record.event, BatchFinished) and record.event.tokens:
            tokens = np.frombuffer(record.event.tokens, np.int32)
            assert set(tokens[tokens < 1 << 30].tolist()) <= {0, 2}  # end tokens of the model


def test_batches_have_measured_durations(recorded: Path) -> None:
    finished = [one.event for one in read_journal(recorded).events() if isinstance(one.event, BatchFinished)]
    assert all(one.finished_us > one.started_us for one in finished)
    assert all(later.started_us >= one.finished_us for one, later in pairwise(finished))


def test_a_result_that_the_core_refuses_stops_the_engine(tmp_path: Path) -> None:
    """The workers answer a batch that was never launched: the engine stops, and the journal has the event."""
    folder = tmp_path / "engine"
    settings = {"journal": str(folder)}
    with engine(model_folder("demo"), settings=settings, **SMALL_POOL) as llm:
        scheduler = scheduler_of(llm)
        original = scheduler._take_in

        def take_in(event: object, samplers: tuple[int, ...] = ()) -> object:
            if isinstance(event, BatchFinished) and event.batch_id == 3:
                event = BatchFinished(event.time_us, 99, event.tokens, generation=event.generation)
            return original(event, samplers)

        scheduler._take_in = take_in
        with pytest.raises(ContractError):
            run(llm, mixed_requests(4, seed=7, structured=False))
    unsealed = [one for one in read_journal(folder).records() if isinstance(one, UnsealedRecord)]
    assert [one.event.batch_id for one in unsealed] == [99]  # type: ignore[attr-defined]
