"""The answer's side of an assert-style check: executes requests on what the answer defined and returns plain values."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

from .wire import decode, encode, receive, send


def serve(run_answer: Callable[[], types.ModuleType], requests: BinaryIO, replies: BinaryIO) -> None:
    """Runs the answer, then replies to requests until they end. An exit anywhere in the answer ends the process."""
    objects: list[Any] = []

    def reference(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def reply(action: Callable[[], dict[str, Any]]) -> None:
        try:
            message = action()
        except Exception as error:
            message = {"error": [kind.__name__ for kind in type(error).__mro__], "text": str(error)[:500]}
        send(replies, message)

    module: Any = None

    def load() -> dict[str, Any]:
        nonlocal module
        module = run_answer()
        return {}

    def get(request: dict[str, Any]) -> dict[str, Any]:
        owner = module if request["object"] is None else objects[request["object"]]
        return {"value": encode(getattr(owner, request["name"]), reference)}

    def call(request: dict[str, Any]) -> dict[str, Any]:
        arguments = [decode(item, objects.__getitem__) for item in request["arguments"]]
        keywords = {name: decode(item, objects.__getitem__) for name, item in request["keywords"].items()}
        value = objects[request["object"]](*arguments, **keywords)
        changed = [encode(a, reference) if isinstance(a, (list, dict, set)) else None for a in arguments]
        return {"value": encode(value, reference), "arguments": changed}

    reply(load)
    while (request := receive(requests)) is not None:
        reply(partial({"get": get, "call": call}[request["do"]], request))
