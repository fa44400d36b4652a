"""LiteLLM as a library: OpenAI's and Anthropic's endpoints through one interface."""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

url, model, key = sys.argv[1:4]
asked = [{"role": "user", "content": "Say the word"}]
for name, base in (
    (f"openai/{model}", f"{url}/v1"),
    (f"hosted_vllm/{model}", f"{url}/v1"),
    (f"anthropic/{model}", url),
):
    said = litellm.completion(model=name, messages=asked, api_base=base, api_key=key, max_tokens=50)
    assert said.choices[0].message.content == "lighthouse", (name, said)
    pieces = litellm.completion(model=name, messages=asked, api_base=base, api_key=key, max_tokens=50, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == "lighthouse", name
print("completion and streams as openai, hosted_vllm and anthropic")
