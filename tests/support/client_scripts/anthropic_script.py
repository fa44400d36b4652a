"""Anthropic's library: messages, streams, tools, thinking, counts of tokens."""

import sys

import anthropic

url, model, key = sys.argv[1:4]
client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
asked = [{"role": "user", "content": "Say the word"}]
thinking = {"type": "adaptive"}
said = client.messages.create(model=model, max_tokens=50, messages=asked, thinking=thinking)
assert [block.text for block in said.content if block.type == "text"] == ["lighthouse"]
with client.messages.stream(model=model, max_tokens=50, messages=asked) as stream:
    assert "".join(stream.text_stream) == "lighthouse"
assert client.messages.count_tokens(model=model, messages=asked).input_tokens > 3
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"name": "get_weather", "input_schema": schema}, {"type": "web_search_20250305", "name": "web_search"}]
asked = [{"role": "user", "content": "What is the weather in Rome"}]
said = client.messages.create(model=model, max_tokens=200, messages=asked, tools=tools)
(call,) = [block for block in said.content if block.type == "tool_use"]
assert (said.stop_reason, call.name, call.input) == ("tool_use", "get_weather", {"city": "Rome"})
result = {"type": "tool_result", "tool_use_id": call.id, "content": "it is sunny in Rome"}
asked += [{"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
said = client.messages.create(model=model, max_tokens=200, messages=asked, tools=tools)
assert said.content[0].text == "It is sunny in Rome."
print("messages, a stream, counted tokens, a tool, adaptive thinking, a tool of the server left out")
