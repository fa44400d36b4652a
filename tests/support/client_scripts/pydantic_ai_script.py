"""Pydantic AI: an agent with a tool, and an answer of a given type."""

import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

url, model, key = sys.argv[1:4]
agent = Agent(OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key)))


@agent.tool_plain
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"it is sunny in {city}"


assert agent.run_sync("Say the word").output == "lighthouse"
assert agent.run_sync("What is the weather in Rome").output == "It is sunny in Rome."
print("an agent that answers, and one that runs a tool and answers with its result")
