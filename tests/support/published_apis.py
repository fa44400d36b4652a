"""Endpoints and fields of OpenAI, Anthropic, vLLM and SGLang, as published, beside those of this server.

    python -m tests.support.published_apis --vllm WHEEL --sglang WHEEL     reads them again: tests/data/apis.json
    python -m tests.test_apis_page                                         writes docs/apis.md from that file

OpenAI's and Anthropic's are read from the installed client libraries: the routes that they call, and the parameters of
these calls. vLLM's and SGLang's are read from their wheels, as syntax trees: nothing of them is run. The wheels come
from PyPI: `pip download --no-deps vllm==0.33.0 sglang==0.5.23`.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.metadata
import inspect
import json
import re
import sys
import typing
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "data" / "apis.json"

LIBRARIES = {
    "openai": {
        "ChatBody": "openai.types.chat.completion_create_params:CompletionCreateParamsBase",
        "CompletionBody": "openai.types.completion_create_params:CompletionCreateParamsBase",
        "ResponseBody": "openai.types.responses.response_create_params:ResponseCreateParamsBase",
        "EmbeddingBody": "openai.types.embedding_create_params:EmbeddingCreateParams",
        "BatchBody": "openai.types.batch_create_params:BatchCreateParams",
    },
    "anthropic": {
        "MessageBody": "anthropic.types.beta.message_create_params:MessageCreateParamsBase",
        "CountBody": "anthropic.types.beta.message_count_tokens_params:MessageCountTokensParams",
    },
}
"""Library -> our body -> its parameters."""

WHEELS = {
    "vllm": {
        "ChatBody": ("vllm/entrypoints/openai/chat_completion/protocol.py", "ChatCompletionRequest"),
        "CompletionBody": ("vllm/entrypoints/openai/completion/protocol.py", "CompletionRequest"),
        "ResponseBody": ("vllm/entrypoints/openai/responses/protocol.py", "ResponsesRequest"),
        "MessageBody": ("vllm/entrypoints/anthropic/protocol.py", "AnthropicMessagesRequest"),
        "EmbeddingBody": ("vllm/entrypoints/pooling/embed/protocol.py", "EmbeddingCompletionRequest"),
        "RerankBody": ("vllm/entrypoints/pooling/scoring/protocol.py", "RerankRequest"),
        "TokenizeBody": ("vllm/entrypoints/serve/tokenize/protocol.py", "TokenizeChatRequest"),
    },
    "sglang": {
        "ChatBody": ("sglang/srt/entrypoints/openai/protocol.py", "ChatCompletionRequest"),
        "CompletionBody": ("sglang/srt/entrypoints/openai/protocol.py", "CompletionRequest"),
        "ResponseBody": ("sglang/srt/entrypoints/openai/protocol.py", "ResponsesRequest"),
        "MessageBody": ("sglang/srt/entrypoints/anthropic/protocol.py", "AnthropicMessagesRequest"),
        "EmbeddingBody": ("sglang/srt/entrypoints/openai/protocol.py", "EmbeddingRequest"),
        "RerankBody": ("sglang/srt/entrypoints/openai/protocol.py", "V1RerankReqInput"),
        "ScoreBody": ("sglang/srt/entrypoints/openai/protocol.py", "ScoringRequest"),
        "TokenizeBody": ("sglang/srt/entrypoints/openai/protocol.py", "TokenizeRequest"),
        "GenerateBody": ("sglang/srt/managers/io_struct.py", "GenerateReqInput"),
        "NativeSampling": ("sglang/srt/sampling/sampling_params.py", "SamplingParams"),
    },
}
"""Wheel -> our body -> file and class of the wheel."""

METHODS = ("get", "post", "delete", "put", "patch")
INTERNAL = re.compile(r"_.*|model_config|routed_dp_rank|is_normalized")


def of_library(name: str) -> dict[str, Any]:
    """Routes and fields of an installed client library."""
    routes = set()
    folder = Path(inspect.getfile(importlib.import_module(name))).parent / "resources"
    call = re.compile(
        r"self\._(get|post|delete|put|patch|get_api_list)\(\s*f?(?:path_template\(\s*)?[\"'](/[^\"'?]*)", re.S
    )
    for path in sorted(folder.rglob("*.py")):
        for method, route in call.findall(path.read_text("utf-8")):
            route = route if route.startswith("/v1") else f"/v1{route}"
            routes.add(f"{'GET' if method == 'get_api_list' else method.upper()} {route}")
    fields = {}
    for body, place in LIBRARIES[name].items():
        module, _, attribute = place.partition(":")
        fields[body] = sorted(typing.get_type_hints(getattr(importlib.import_module(module), attribute)))
    return {"version": importlib.metadata.version(name), "routes": sorted(routes), "fields": fields}


def of_wheel(name: str, wheel: Path) -> dict[str, Any]:
    """Routes and fields of a wheel."""
    with zipfile.ZipFile(wheel) as files:
        inside = [one for one in files.namelist() if one.endswith(".py") and "/entrypoints/" in one]
        routes = {route for one in inside for route in routes_of(ast.parse(files.read(one)))}
        fields = {}
        for body, (path, class_name) in WHEELS[name].items():
            fields[body] = sorted(set(fields_of(files, path, class_name)))
    version = wheel.name.split("-")[1]
    return {"version": version, "routes": sorted(routes), "fields": fields}


def routes_of(tree: ast.Module) -> Iterator[str]:
    """Yield METHOD and path of every route that a decorator or a call declares with literal texts."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
            continue
        called, first = node.func.attr, node.args[0]
        if not (isinstance(first, ast.Constant) and isinstance(first.value, str) and first.value.startswith("/")):
            continue
        methods = [called] if called in METHODS else []
        if called in ("api_route", "add_api_route"):
            given = next((one.value for one in node.keywords if one.arg == "methods"), None)
            methods = (
                [one.value for one in given.elts if isinstance(one, ast.Constant)]
                if hasattr(given, "elts")
                else ["get"]
            )
        for method in methods:
            if ast.unparse(node.func.value) in ("app", "router", "abort_router", "self.app"):
                yield f"{str(method).upper()} {first.value}"


def fields_of(files: zipfile.ZipFile, path: str, name: str) -> Iterator[str]:
    """Yield the annotated fields of a class and of its bases, through imports of the same wheel."""
    tree = ast.parse(files.read(path))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            above = "".join(f"{one}/" for one in path.split("/")[: -node.level]) if node.level else ""
            for alias in node.names:
                imported[alias.asname or alias.name] = (f"{above}{node.module.replace('.', '/')}", alias.name)
    if name not in classes:
        module, original = imported.get(name, ("", ""))
        for place in (f"{module}.py", f"{module}/__init__.py"):
            if place in files.namelist():
                yield from fields_of(files, place, original)
        return
    for base in classes[name].bases:
        yield from fields_of(files, path, ast.unparse(base).partition("[")[0])
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if not INTERNAL.fullmatch(node.target.id) and "ClassVar" not in ast.unparse(node.annotation):
                yield node.target.id


def main(arguments: list[str]) -> int:
    """Write the file. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, metavar="WHEEL")
    parser.add_argument("--sglang", type=Path, required=True, metavar="WHEEL")
    told = parser.parse_args(arguments)
    found = {name: of_library(name) for name in LIBRARIES}
    found |= {name: of_wheel(name, getattr(told, name)) for name in WHEELS}
    FILE.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    for name, about in found.items():
        fields = sum(map(len, about["fields"].values()))
        print(f"{name} {about['version']}: {len(about['routes'])} routes, {fields} fields")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
