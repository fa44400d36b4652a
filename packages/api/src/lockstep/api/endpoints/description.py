"""/openapi.json: for each route its body, its variables, the media types of its answers, and its errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec
from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from lockstep.api.endpoints.schemas import Body

ERROR_FIELDS: dict[str, Any] = {
    "message": {"type": "string"},
    "type": {"type": "string"},
    "param": {"type": ["string", "null"]},
    "code": {"type": "integer"},
}
ERRORS: dict[str, dict[str, Any]] = {
    "openai": {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "object", "required": ["message", "type"], "properties": ERROR_FIELDS}},
    },
    "anthropic": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {name: ERROR_FIELDS[name] for name in ("type", "message")},
            },
        },
    },
}
"""Schemas of errors: `errors.ApiError`."""

NAMES = {"openai": "Error", "anthropic": "AnthropicError"}


class Described(Protocol):
    """What the description reads of a route: `app.HttpRoute`."""

    @property
    def path(self) -> str: ...
    @property
    def body(self) -> type[Body] | None: ...
    @property
    def optional(self) -> bool: ...
    @property
    def errors(self) -> Literal["openai", "anthropic"]: ...
    @property
    def form(self) -> dict[str, Any] | None: ...
    @property
    def media(self) -> tuple[str, ...]: ...


def operation_of(route: Described) -> dict[str, Any]:
    """Return the OpenAPI operation of a route."""
    error = {"schema": {"$ref": f"#/components/schemas/{NAMES[route.errors]}"}}
    errors = {"description": "An error", "content": {"application/json": error}}
    if not route.media:
        errors = {"description": "An error; a check of health that fails has no content"}
    answer: dict[str, Any] = {"description": "Successful Response"}
    if route.media:
        answer["content"] = {one: {"schema": {}} for one in route.media}
    responses = {"200": answer, "4XX": errors, "5XX": errors}
    if route.path == "/":
        responses["307"] = {"description": "The live page"}
    operation: dict[str, Any] = {"responses": responses}
    if route.body is not None:
        schema = {"$ref": f"#/components/schemas/{route.body.__name__}"}
        operation["requestBody"] = {"required": not route.optional, "content": {"application/json": {"schema": schema}}}
    if route.form is not None:
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": route.form}}}
    if named := re.findall(r"{(\w+)", route.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in named
        ]
    return operation


def description_of(app: FastAPI, routes: Sequence[Described]) -> bytes:
    """Return openapi.json, with the schemas of the bodies and of the errors."""
    described = app.openapi()
    bodies: list[tuple[type[Body], Literal["validation"]]]
    bodies = [(route.body, "validation") for route in routes if route.body is not None]
    _, definitions = models_json_schema(bodies, ref_template="#/components/schemas/{model}")
    schemas = described.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(definitions.get("$defs", {}))
    schemas.update({NAMES[kind]: schema for kind, schema in ERRORS.items()})
    by_path = {route.path: route for route in routes}
    for path, operations in described["paths"].items():
        for operation in operations.values():
            if path in by_path and "application/json" not in by_path[path].media:  # FastAPI adds it
                operation["responses"]["200"].get("content", {}).pop("application/json", None)
                if not by_path[path].media:
                    operation["responses"]["200"].pop("content", None)
            operation["responses"].pop("422", None)
    return msgspec.json.encode(described)
