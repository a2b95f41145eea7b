"""Plain values as JSON lines between the tests' process and the answer's process.

The other side is not trusted: a decoded value is always of an exact built-in type, so no method of the answer's own
classes (an `__eq__` that is always true, say) ever runs where the verdict is formed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, BinaryIO

MAX_LINE_BYTES = 1 << 24


def encode(value: Any, reference: Callable[[Any], int]) -> Any:
    """JSON form of None, bool, numbers, str, bytes, list, tuple, set, frozenset and dict, subclasses as their base.

    `reference` gives the number that stands for anything else, or raises.
    """
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int):
        # Python refuses decimal text of more than some thousand digits, not hexadecimal.
        return {"int": hex(value)} if value.bit_length() > 63 else value
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).decode("latin-1")}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, reference) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, reference), encode(item, reference)] for key, item in value.items()]}
    return {"reference": reference(value)}


def decode(data: Any, resolve: Callable[[int], Any]) -> Any:
    """The value that `encode` wrote; `resolve` turns a number back into what it stands for. Else ValueError."""
    if not isinstance(data, dict):
        if isinstance(data, list):
            raise ValueError("wire.decode: data must not be a bare list")
        return data
    [(kind, content)] = data.items()
    if kind == "reference":
        return resolve(int(content))
    if kind == "complex":
        return complex(*content)
    if kind == "int":
        return int(content, 16)
    if kind == "bytes":
        return str(content).encode("latin-1")
    if kind == "dict":
        return {decode(key, resolve): decode(item, resolve) for key, item in content}
    sequence = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}.get(kind)
    if sequence is None:
        raise ValueError(f"wire.decode: kind must be one of the kinds that encode writes, got {kind!r}")
    return sequence(decode(item, resolve) for item in content)


def send(stream: BinaryIO, message: dict[str, Any]) -> None:
    """Writes one message and flushes."""
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


def receive(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message; None at the end of the stream. ValueError for a line that is too long or no JSON object."""
    line = stream.readline(MAX_LINE_BYTES)
    if not line:
        return None
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"wire.receive: a message must be a JSON object, got {type(message).__name__}")
    return message
