"""Instructor: answers of a given type, by tools and by JSON schemas."""

import sys

import instructor
import openai
from pydantic import BaseModel

url, model, key = sys.argv[1:4]


class City(BaseModel):
    """A city."""

    name: str
    population: int


raw = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=300)
asked = {"model": model, "response_model": City, "max_retries": 1}
tools = instructor.from_openai(raw, mode=instructor.Mode.JSON_SCHEMA)
assert isinstance(tools.create(messages=[{"role": "user", "content": "Describe Rome as JSON"}], **asked), City)
print("an answer of a type, by a JSON schema")
