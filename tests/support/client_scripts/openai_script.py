"""OpenAI's library: completions, chats with tools, structured output, responses in the background, models."""

import json
import sys
import time

import openai
from pydantic import BaseModel

url, model, key = sys.argv[1:4]
client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=300)


class City(BaseModel):
    name: str
    population: int


assert [one.id for one in client.models.list()] == [model]
asked = [{"role": "user", "content": "Say the word"}]
assert client.chat.completions.create(model=model, messages=asked).choices[0].message.content == "lighthouse"
pieces = client.chat.completions.create(
    model=model, messages=asked, stream=True, stream_options={"include_usage": True}
)
text, usage = "", None
for piece in pieces:
    text += "".join(choice.delta.content or "" for choice in piece.choices)
    usage = piece.usage or usage
assert (text, usage.completion_tokens > 0) == ("lighthouse", True)

schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"type": "function", "function": {"name": "get_weather", "parameters": schema}}]
asked = [{"role": "user", "content": "What is the weather in Rome"}]
said = client.chat.completions.create(model=model, messages=asked, tools=tools).choices[0]
assert said.finish_reason == "tool_calls"
asked += [
    said.message,
    {"role": "tool", "tool_call_id": said.message.tool_calls[0].id, "content": "it is sunny in Rome"},
]
said = client.chat.completions.create(model=model, messages=asked, tools=tools).choices[0]
assert said.message.content == "It is sunny in Rome."

asked = [{"role": "user", "content": "Describe Rome as JSON"}]
parsed = client.chat.completions.parse(model=model, messages=asked, response_format=City).choices[0].message.parsed
assert isinstance(parsed, City)

reasoning, text = {"effort": "low", "summary": "auto"}, {"verbosity": "low"}
said = client.responses.create(model=model, input="Say the word", reasoning=reasoning, text=text)
assert said.output_text == "lighthouse"
began = client.responses.create(model=model, input="Say the word", background=True, stream=True)
first = next(iter(began))
began.close()
with client.responses.retrieve(first.response.id, stream=True, starting_after=first.sequence_number) as rest:
    events = list(rest)
assert events[-1].response.output_text == "lighthouse"
assert [one.sequence_number for one in events] == list(range(1, 1 + len(events)))
assert client.completions.create(model=model, prompt="Say the word", max_tokens=40).choices[0].text

lines = [
    {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    for number, body in enumerate(
        (
            {"model": model, "messages": [{"role": "user", "content": "Say the word"}]},
            {"model": model, "messages": [{"role": "user", "content": "Say the word"}], "max_tokens": 0},
        )
    )
]
stored = client.files.create(file=("lines.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
assert stored.id in [one.id for one in client.files.list()]
batch = client.batches.create(
    input_file_id=stored.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"of": "the campaign"}
)
until_s = time.monotonic() + 60
while batch.status not in ("completed", "failed", "expired", "cancelled") and time.monotonic() < until_s:
    time.sleep(0.1)
    batch = client.batches.retrieve(batch.id)
counts = batch.request_counts
assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 2, 1, 1), batch
(answer,) = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
assert answer["custom_id"] == "line-0"
assert answer["response"]["body"]["choices"][0]["message"]["content"] == "lighthouse"
(refused,) = map(json.loads, client.files.content(batch.error_file_id).text.splitlines())
assert (refused["custom_id"], refused["response"]["status_code"]) == ("line-1", 400)
assert batch.id in [one.id for one in client.batches.list()]
for one in (stored.id, batch.output_file_id, batch.error_file_id):
    assert client.files.delete(one).deleted
print("models, chats, streams, tools, structured output, completions, a background response taken up again, a batch")
