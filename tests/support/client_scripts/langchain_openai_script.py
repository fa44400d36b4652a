"""LangChain's ChatOpenAI: invoke, stream, tools, structured output, the responses API."""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

url, model, key = sys.argv[1:4]


class City(BaseModel):
    """A city."""

    name: str
    population: int


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"it is sunny in {city}"


chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=key, max_retries=0)
assert chat.invoke("Say the word").content == "lighthouse"
assert "".join(piece.content for piece in chat.stream("Say the word")) == "lighthouse"
said = chat.bind_tools([get_weather]).invoke("What is the weather in Rome")
assert get_weather.invoke(said.tool_calls[0]["args"]) == "it is sunny in Rome"
assert isinstance(chat.with_structured_output(City, method="json_schema").invoke("Describe Rome as JSON"), City)
newer = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=key, max_retries=0, use_responses_api=True)
assert newer.invoke("Say the word").text == "lighthouse"
print("invoke, stream, a tool, structured output, the responses API")
