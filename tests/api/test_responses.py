"""/v1/responses with the official client: whole, streamed, cut off, fetched again, continued, refused."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
openai = pytest.importorskip("openai", reason="the OpenAI client is not installed")

from lockstep.api.endpoints.errors import ApiError  # noqa: E402
from lockstep.api.endpoints.responses_api import _begun  # noqa: E402
from lockstep.api.endpoints.schemas import ResponseBody  # noqa: E402
from lockstep.api.endpoints.server import Call  # noqa: E402
from lockstep.api.endpoints.stored_responses import StoredResponse, StoredResponses  # noqa: E402
from tests.support.live_server import LiveServer, running, until  # noqa: E402

MODEL = "qwen3-0.6b"


@pytest.fixture(scope="module")
def client(emulated: LiveServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{emulated.url}/v1", api_key="nothing", max_retries=0, timeout=300) as made:
        yield made


def test_a_text_input_is_a_user_message(client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0}
    said = client.responses.create(input="hello", max_output_tokens=5, instructions="Rhyme.", **asked)
    told = [{"role": "system", "content": "Rhyme."}, {"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(messages=told, max_completion_tokens=5, **asked)
    assert said.output_text == chat.choices[0].message.content
    assert (said.object, said.status, said.incomplete_details.reason) == ("response", "incomplete", "max_output_tokens")
    assert said.id.startswith("resp_")
    assert (said.model, said.instructions, said.max_output_tokens) == (MODEL, "Rhyme.", 5)
    (item,) = said.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    assert (said.usage.input_tokens, said.usage.output_tokens) == (chat.usage.prompt_tokens, 5)
    assert said.usage.total_tokens == said.usage.input_tokens + 5


def test_an_answer_that_ends_by_itself_is_completed(client: Any) -> None:
    said = client.responses.create(model=MODEL, input="hello", temperature=0)
    assert said.status == "completed"
    assert said.incomplete_details is None
    assert said.output[0].status == "completed"


def test_items_and_parts(client: Any) -> None:
    asked = {"model": MODEL, "temperature": 0, "max_output_tokens": 4}
    items = [
        {"role": "developer", "content": "Rhyme."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "yellow"}]},
        {"role": "user", "content": "more"},
    ]
    chat = client.chat.completions.create(
        model=MODEL,
        temperature=0,
        max_completion_tokens=4,
        messages=[
            {"role": "system", "content": "Rhyme."},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "yellow"},
            {"role": "user", "content": "more"},
        ],
    )
    assert client.responses.create(input=items, **asked).output_text == chat.choices[0].message.content


def test_a_stream_has_every_event_in_order_and_adds_up_to_the_response(client: Any) -> None:
    asked = {"model": MODEL, "input": "hello", "temperature": 0, "max_output_tokens": 400}
    whole = client.responses.create(**asked, extra_body={"ignore_eos": True})
    events = list(client.responses.create(**asked, stream=True, extra_body={"ignore_eos": True}))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * len(deltas),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert deltas  # their number depends on the load of the machine
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text == events[-4].text
    assert events[-1].response.usage.output_tokens == 400
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {events[2].item.id}
    assert events[0].response.id == events[-1].response.id


def test_the_clients_own_accumulator_takes_the_stream(client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "hello", "temperature": 0}
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.output_text == client.responses.create(**asked).output_text


def test_stop_texts_and_deadlines_hold_here_too(client: Any) -> None:
    asked = {"model": MODEL, "input": "hello", "temperature": 0, "max_output_tokens": 40}
    text = client.responses.create(**asked).output_text
    stop = text[20:26]
    said = client.responses.create(**asked, extra_body={"stop": stop})
    assert (said.output_text, said.status) == (text[: text.index(stop)], "completed")
    endless = {"ignore_eos": True, "timeout_s": 1.0}
    with pytest.raises(openai.InternalServerError) as caught:
        client.responses.create(model=MODEL, input="hello", max_output_tokens=30_000, extra_body=endless)
    assert caught.value.status_code == 504
    *_, last = client.responses.create(
        model=MODEL, input="hello", max_output_tokens=30_000, stream=True, extra_body=endless
    )
    assert (last.type, last.response.error.message) == ("response.failed", "the request ran out of time")


def test_leaving_a_stream_cancels_it(client: Any, emulated: LiveServer) -> None:
    stream = client.responses.create(
        model=MODEL, input="hello", max_output_tokens=30_000, stream=True, extra_body={"ignore_eos": True}
    )
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    until(lambda: running(emulated) == 1)
    stream.close()
    until(lambda: running(emulated) == 0)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True, "store": False}, "background"),
        ({"tools": [{"type": "file_search"}]}, "tools"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"truncation": "some"}, "truncation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 50_000}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": "x" * 50_000}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.type"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.image_url"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0.type"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_fields_that_are_not_served_are_refused_by_name(client: Any, asked: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": MODEL, "input": "a", **asked})
    assert caught.value.body["param"].startswith(param)
    assert f"`{param}" in caught.value.message or "context length" in caught.value.message


def test_fields_that_change_nothing_are_accepted(client: Any) -> None:
    said = client.responses.create(
        model=MODEL,
        input="a",
        max_output_tokens=1,
        store=False,
        tools=[],
        truncation="disabled",
        text={"format": {"type": "text"}},
        tool_choice="auto",
        parallel_tool_calls=True,
        metadata={"for": "a test"},
        extra_body={"previous_response_id": None},
    )
    assert said.metadata == {"for": "a test"}


# ------------------------------------------------------------------------------------------------------ stored answers

ENDLESS: dict[str, Any] = {"model": MODEL, "input": "hello", "max_output_tokens": 30_000}


def test_an_answer_can_be_had_again_until_it_is_deleted(client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "hello", "temperature": 0, "max_output_tokens": 5}
    said = client.responses.create(**asked)
    assert said.store is True
    assert client.responses.retrieve(said.id) == said
    *_, last = client.responses.create(**asked, stream=True)
    assert client.responses.retrieve(last.response.id) == last.response
    with pytest.raises(openai.BadRequestError, match="`stream`: only the events of a response in the background"):
        list(client.responses.retrieve(said.id, stream=True))
    client.responses.delete(said.id)
    for again in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            again(said.id)
    unkept = client.responses.create(**asked, store=False)
    assert unkept.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_an_answer_goes_on_from_another_as_if_all_of_it_were_sent(client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 6}
    first = client.responses.create(input="hello", instructions="Rhyme.", **asked)
    second = client.responses.create(input="more", previous_response_id=first.id, **asked)
    third = client.responses.create(
        input=[{"role": "user", "content": "still more"}], previous_response_id=second.id, stream=False, **asked
    )
    assert second.previous_response_id == first.id
    told = [
        {"role": "user", "content": "hello"},  # instructions hold for one answer only
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "still more"},
    ]
    whole = client.responses.create(input=told, **asked)
    assert (third.output_text, third.usage.input_tokens) == (whole.output_text, whole.usage.input_tokens)
    items = list(client.responses.input_items.list(third.id, order="asc", limit=2))  # page by page
    assert [item.content[0].text if item.content else "" for item in items[:4]] == [one["content"] for one in told[:4]]
    assert len({item.id for item in items}) == len(items) == 5
    newest = client.responses.input_items.list(third.id, limit=1)
    assert newest.data[0].id == items[-1].id
    client.responses.delete(first.id)  # the second one includes it
    assert client.responses.create(input="on", previous_response_id=second.id, **asked).output_text


def test_an_answer_in_the_background_is_fetched_when_it_is_there(client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "hello", "temperature": 0, "max_output_tokens": 50}
    begun = client.responses.create(**asked, background=True)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    until(lambda: client.responses.retrieve(begun.id).status not in ("queued", "in_progress"))
    done = client.responses.retrieve(begun.id)
    whole = client.responses.create(**asked)
    assert (done.status, done.output_text) == (whole.status, whole.output_text)
    assert client.responses.cancel(begun.id) == done  # it had ended
    with pytest.raises(openai.BadRequestError, match="not made in the background"):
        client.responses.cancel(whole.id)


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_an_answer_in_the_background_is_ended_by(client: Any, emulated: LiveServer, how: str) -> None:
    begun = client.responses.create(**ENDLESS, background=True, extra_body={"ignore_eos": True})
    until(lambda: running(emulated) == 1 and client.responses.retrieve(begun.id).status == "in_progress")
    with pytest.raises(openai.BadRequestError, match="is in_progress; only an answer can be continued"):
        client.responses.create(model=MODEL, input="a", previous_response_id=begun.id)
    ended = getattr(client.responses, how)(begun.id)
    until(lambda: running(emulated) == 0)
    if how == "cancel":
        assert ended == client.responses.retrieve(begun.id)
        assert (ended.status, ended.output[0].status) == ("cancelled", "incomplete")
        assert ended.output_text
        assert 0 < ended.usage.output_tokens < 30_000
    else:
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(begun.id)


def test_an_answer_in_the_background_that_fails_has_an_error(client: Any) -> None:
    begun = client.responses.create(**ENDLESS, background=True, extra_body={"ignore_eos": True, "timeout_s": 1.0})
    until(lambda: client.responses.retrieve(begun.id).status == "failed")
    assert client.responses.retrieve(begun.id).error.message == "the request ran out of time"


def test_bounds_are_each_tenants_own_and_all_workers_see_the_same(tmp_path: Path) -> None:
    now_s = [1000.0]

    def worker() -> StoredResponses:
        return StoredResponses(tmp_path, most=3, bytes_max=2000, kept_s=60.0, now_s=lambda: now_s[0])

    def answer(name: str, text: str = "") -> dict[str, Any]:
        return {"id": name, "status": "completed", "output": [text]}

    one, other = worker(), worker()
    for number in range(5):
        assert not one.put("a", answer(f"r{number}"), [{"n": number}], over=True)
    assert [other.get("a", f"r{number}") is not None for number in range(5)] == [False, False, True, True, True]
    assert other.get("a", "r4") == StoredResponse(answer("r4"), [{"n": 4}], True)
    assert other.get("b", "r4") is None
    other.put("b", answer("r4", "b's"), [], over=True)  # the same name
    other.put("b", answer("large", "x" * 1900), [], over=True)
    assert one.get("b", "r4") is None  # too many bytes with it
    assert one.get("a", "r4") is not None
    assert "limits.responses_bytes_max is 2000" in other.put("b", answer("larger", "x" * 3000), [], over=True)
    assert one.get("b", "larger") is None
    assert one.get("b", "large") is not None
    one.remove("b", "r3")
    assert one.get("a", "r3") is not None
    now_s[0] += 61.0
    assert one.get("a", "r3") is None


def under_way(name: str, text: str = "", status: str = "in_progress") -> dict[str, Any]:
    return {"id": name, "status": status, "output": [text], "error": None}


def test_answers_in_progress_are_not_removed(tmp_path: Path) -> None:
    now_s = [1000.0]
    store = StoredResponses(tmp_path, most=3, bytes_max=99_999, kept_s=60.0, now_s=lambda: now_s[0])

    def there(*names: str) -> list[bool]:
        return [store.get("a", name) is not None for name in names]

    assert not store.put("a", under_way("slow"), [], over=False)
    for number in range(4):
        assert not store.put("a", under_way(f"done{number}", status="completed"), [], over=True)
        now_s[0] += 1.0
    assert there("slow", "done0", "done1", "done2", "done3") == [True, False, False, True, True]
    for name in ("slow2", "slow3"):
        assert not store.put("a", under_way(name), [], over=False)
    assert there("slow", "slow2", "slow3", "done2", "done3") == [True, True, True, False, False]
    for over in (False, True):
        assert "3 answers are in progress" in store.put("a", under_way("late"), [], over=over)
    assert there("late") == [False]
    assert not store.put("b", under_way("late"), [], over=False)  # each tenant has its own limits
    now_s[0] += 1000.0
    assert there("slow", "slow2", "slow3") == [True, True, True]  # the time to live begins at the end
    store.change("a", under_way("slow", status="completed"), over=True)
    now_s[0] += 59.0
    assert there("slow") == [True]
    assert not store.put("a", under_way("late"), [], over=False)  # ended answers are removed
    assert there("slow", "late") == [False, True]
    store.change("a", under_way("late", status="completed"), over=True)
    now_s[0] += 61.0
    assert there("late") == [False]


def test_an_answer_beyond_the_limits_has_failed_and_names_the_limit(tmp_path: Path) -> None:
    store = StoredResponses(tmp_path, most=9, bytes_max=5000, kept_s=60.0)

    def status(name: str) -> str | None:
        found = store.get("a", name)
        return None if found is None else found.response["status"]

    for name in ("first", "large", "second"):
        assert not store.put("a", under_way(name), [], over=False)
    store.change("a", under_way("first", "x" * 2500, "completed"), over=True)
    store.change("a", under_way("second", "x" * 2500, "completed"), over=True)  # beside another in progress
    assert [status(name) for name in ("first", "second", "large")] == [None, "completed", "in_progress"]
    store.change("a", under_way("large", "x" * 6000, "completed"), over=True)  # by itself
    found = store.get("a", "large")
    assert found is not None
    assert (found.over, found.response["status"], found.response["output"]) == (True, "failed", [])
    assert "limits.responses_bytes_max is 5000" in found.response["error"]["message"]
    store.change("a", under_way("large", "x"), over=True)  # it has ended
    assert store.get("a", "large") == found
    for name in ("third", "fourth", "fifth"):
        assert not store.put("a", under_way(name), [], over=False)
    store.change("a", under_way("third", "x" * 4000, "completed"), over=True)  # beside two more in progress
    assert [status(name) for name in ("third", "fourth", "fifth")] == ["failed", "in_progress", "in_progress"]
    assert "limits.responses_bytes_max" in store.put("a", under_way("sixth", "x" * 2900), [], over=False)
    taken = [len(msgspec.json.encode((under_way(name), []))) - 3 + 1024 for name in ("fourth", "fifth", "sixth")]
    room = 5000 - sum(taken)
    assert "limits.responses_bytes_max" in store.put("a", under_way("sixth", "x" * (room + 1)), [], over=False)
    assert not store.put("a", under_way("sixth", "x" * room), [], over=False)  # and not a byte is left
    store.change("a", under_way("sixth", "x" * (room + 9)), over=False)
    assert status("sixth") == "in_progress"
    store.change("a", under_way("sixth", "x" * 4000, "completed"), over=True)
    assert status("sixth") == "failed"


def test_no_answer_is_begun_in_the_background_for_which_there_is_no_place(tmp_path: Path) -> None:
    store = StoredResponses(tmp_path, most=1, bytes_max=9999, kept_s=99.0)
    cancelled = []

    async def accepted() -> None:
        pass

    async def never_disconnects() -> None:
        await asyncio.Event().wait()

    generation: Any = SimpleNamespace(accepted=accepted, cancel=lambda: cancelled.append("later"))
    shape: Any = SimpleNamespace(response=lambda status: under_way("later", status=status))
    server: Any = SimpleNamespace(responses=store, background=set())
    request: Any = SimpleNamespace(receive=never_disconnects, scope={})
    call = Call(request, ResponseBody(input="a"), "a", 0.0)
    assert not store.put("a", under_way("now"), [], over=False)
    with pytest.raises(ApiError, match=r"`background`: .* 1 answers are in progress, .*stored_responses") as caught:
        asyncio.run(_begun(server, call, generation, shape, []))
    assert (caught.value.status, caught.value.param) == (503, "background")
    assert cancelled == ["later"]
    assert not server.background
    assert store.get("a", "now") is not None


def test_workers_that_begin_together_make_one_file(tmp_path: Path) -> None:
    def worker(number: int) -> bool:
        stored = StoredResponses(tmp_path, most=99, bytes_max=9999, kept_s=99.0)
        try:
            return not stored.put("", {"id": f"r{number}", "status": "completed"}, [], over=True)
        finally:
            stored.close()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(worker, range(40)))
    stored = StoredResponses(tmp_path, most=99, bytes_max=9999, kept_s=99.0)
    assert all(stored.get("", f"r{number}") for number in range(40))


def test_answers_in_progress_in_a_worker_that_ended_have_failed(tmp_path: Path) -> None:
    store = "from lockstep.api.endpoints.stored_responses import StoredResponses as S\n"
    store += "from pathlib import Path; import sys\n"
    store += "s = S(Path(sys.argv[1]), most=9, bytes_max=9999, kept_s=99.0)\n"
    store += "s.put('', {'id': 'r', 'status': 'in_progress', 'output': []}, [], over=False)"
    subprocess.run([sys.executable, "-c", store, str(tmp_path)], check=True, timeout=120)
    stored = StoredResponses(tmp_path, most=2, bytes_max=9999, kept_s=99.0)
    assert not stored.put("", {"id": "mine", "status": "queued"}, [], over=False)
    found = stored.get("", "r")
    assert found is not None
    assert (found.over, found.response["status"]) == (True, "failed")
    stored.change("", {"id": "r", "status": "completed"}, over=True)  # too late
    assert stored.get("", "r") == found
    assert not stored.put("", {"id": "another", "status": "queued"}, [], over=False)  # in place of the failed one
    assert stored.get("", "r") is None
    mine = stored.get("", "mine")
    assert mine is not None
    assert not mine.over
    assert (tmp_path / "responses.sqlite").stat().st_mode & 0o777 == 0o600
