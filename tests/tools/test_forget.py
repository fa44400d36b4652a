"""A copy of a journal without a tenant's content: equal decisions, and none of its tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import RequestArrived, TokenIds
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import JournalError
from lockstep.core.journal.replay import replay
from lockstep.core.scheduler.engine import Engine
from lockstep.tools.forget import MARK, Redaction, forget
from lockstep.tools.journal import journal

GOLDEN = Path(__file__).parents[1] / "golden"


def tenants(run: Path) -> set[str]:
    return {one.event.tenant for one in read_journal(run).events() if isinstance(one.event, RequestArrived)}


RUNS = sorted(
    path.parent.name
    for path in GOLDEN.glob("*/journal")
    if read_journal(path).header.content == "full" and not read_journal(path).first_step and "handover" not in str(path)
)


REFUSED = {"sessions", "sessions-branch", "sessions-yield", "media", "tiers", "hybrid-storage"}
"""Runs in which a prompt may repeat the tokens of a session, or KV is known by a hash of its content."""


@pytest.mark.parametrize("name", RUNS)
def test_a_copy_decides_alike_and_has_no_prompt_of_the_tenant(name: str, tmp_path: Path) -> None:
    several = tenants(GOLDEN / name)
    for number, tenant in enumerate(sorted(several)):
        out = tmp_path / str(number)
        if len(several) > 1 or name in REFUSED:
            try:
                forget(GOLDEN / name, tenant, out)
            except JournalError:
                assert not out.exists()
                continue
        else:
            assert forget(GOLDEN / name, tenant, out)
        replay(out)
        for record in read_journal(out).events():
            event = record.event
            if not isinstance(event, RequestArrived) or event.tenant != tenant:
                continue
            assert event.session or not event.label
            if isinstance(event.prompt, TokenIds):
                assert (np.frombuffer(event.prompt.ids, np.int32) >= MARK).all()


def test_texts_of_a_request_are_left_out_and_turns_keep_their_order() -> None:
    redaction = Redaction(Engine(SchedConfig(pages=8)), "t")
    texts: dict[str, Any] = {"label": "secret", "stop_texts": ("secret",), "stop_regexes": ("secret.*",)}
    prompt = TokenIds(np.array([1, 2], np.int32).tobytes())
    event = RequestArrived(0, request_id=0, prompt=prompt, max_new_tokens=1, tenant="t", session="s", **texts)
    first = redaction.of(event)
    later = redaction.of(msgspec.structs.replace(event, request_id=1, label="more", session_after="secret"))
    assert isinstance(first, RequestArrived)
    assert isinstance(later, RequestArrived)
    assert "secret" not in f"{first} {later}"
    assert later.session_after == first.label != later.label
    assert len(first.stop_regexes) == 1


def test_the_command_names_what_it_left_out(tmp_path: Path) -> None:
    arguments = ["forget", str(GOLDEN / "served"), "--tenant", "", "--out", str(tmp_path / "copy")]
    done = CliRunner().invoke(journal, arguments)
    assert done.exit_code == 0, done.output
    assert "without the content of" in done.output
    assert CliRunner().invoke(journal, arguments).exit_code != 0


def test_stored_and_kept_answers_of_the_tenant_are_left_out_of_the_copy(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="the server is not installed")
    from lockstep.api.endpoints.kept_answers import Content, KeptAnswers, KeptRequest
    from lockstep.api.endpoints.stored_conversations import StoredConversations
    from lockstep.api.endpoints.stored_responses import StoredResponses

    run, out = tmp_path / "run", tmp_path / "copy"
    shutil.copytree(GOLDEN / "served", run)
    answers = run / "answers"
    answers.mkdir(0o700)
    kept = KeptAnswers(answers / "kept", most=10, bytes_max=10**6, kept_s=1e6)
    responses = StoredResponses(answers, most=10, bytes_max=10**6, kept_s=1e6)
    conversations = StoredConversations(answers, most=10, bytes_max=10**6, kept_s=1e6)
    for tenant, text in (("gone", "a secret of this tenant"), ("stays", "words of the other")):
        for name in ("ans_00000001", "ans_00000002"):
            request = KeptRequest("/v1/completions", tenant, b"", text.encode(), (), b"", 0.0)
            answer = kept.begin(name + ("a" if tenant == "gone" else "b"), request)
            assert answer is not None
            answer.append(Content(text.encode()))
            answer.end()
        assert not responses.put(tenant, {"id": f"resp_{tenant}"}, [{"text": text}], over=True)
        conversations.create(tenant, [{"type": "message", "text": text}], {})
    forget(run, "gone", out)  # while the server has its files open
    found = b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())
    assert b"a secret of this tenant" not in found
    assert found.count(b"words of the other") >= 4
    copied = KeptAnswers(out / "answers/kept", most=10, bytes_max=10**6, kept_s=1e6)
    assert copied.find("stays", "ans_00000001b") is not None
    assert copied.find("gone", "ans_00000001a") is None
    assert StoredResponses(out / "answers", most=10, bytes_max=10**6, kept_s=1e6).get("stays", "resp_stays") is not None
    assert {path.stat().st_mode & 0o077 for path in (out / "answers").rglob("*")} == {0}
