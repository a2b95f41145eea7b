"""The tests' side of an assert-style check: test code runs here, the answer elsewhere, and only plain values come back.

What the answer prints, exits with, patches or overloads happens in its own process and cannot touch the verdict.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
from typing import Any, BinaryIO

from .wire import decode, encode, receive, send


class _AnswerEnded(BaseException):
    """Not an Exception: test code that expects one must not take the end of the answer's process for it."""


class _TestsUnsupported(BaseException):
    """The test code asks for something that cannot cross the process boundary: no fault of the answer."""


class AnswerError(Exception):
    """The answer raised an exception of its own class; the text names it."""


def judge(replies: BinaryIO, requests: BinaryIO) -> None:
    """Runs the test code of standard input; writes {"verdict": "passed" | "failed" | "unsupported", "reason": text}."""
    test_code = sys.stdin.read()
    output = os.fdopen(os.dup(1), "w")
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    answer = _Answer(replies, requests)
    verdict, reason = "failed", ""
    try:
        answer.wait_until_loaded()
        exec(compile(test_code, "<tests>", "exec"), _Names(answer))
        verdict = "passed"
    except _TestsUnsupported as error:
        verdict, reason = "unsupported", str(error)
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
    json.dump({"verdict": verdict, "reason": reason[:500]}, output)
    output.flush()


class _Names(dict[str, Any]):
    """Globals of the test code: its own, then builtins, then the answer's, which so cannot replace `sorted`."""

    def __init__(self, answer: _Answer) -> None:
        super().__init__(__name__="tests", __builtins__=builtins)
        self._answer = answer

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        try:
            return self._answer.get(None, name)
        except AttributeError:
            raise KeyError(name) from None


class _Answer:
    """The connection to the answer's process."""

    def __init__(self, replies: BinaryIO, requests: BinaryIO) -> None:
        self._replies, self._requests = replies, requests

    def wait_until_loaded(self) -> None:
        self._receive()

    def get(self, owner: int | None, name: str) -> Any:
        return self._ask({"do": "get", "object": owner, "name": name})[0]

    def call(self, function: int, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        encoded = [encode(item, _number_of) for item in arguments]
        encoded_keywords = {name: encode(item, _number_of) for name, item in keywords.items()}
        request = {"do": "call", "object": function, "arguments": encoded, "keywords": encoded_keywords}
        value, changed = self._ask(request)
        for argument, after in zip(arguments, changed, strict=True):
            if isinstance(argument, (list, dict, set)) and type(after) is type(argument):
                _overwrite(argument, after)
        return value

    def _ask(self, request: dict[str, Any]) -> tuple[Any, list[Any]]:
        try:
            send(self._requests, request)
        except BrokenPipeError:
            raise _AnswerEnded("the answer's process ended") from None
        reply = self._receive()
        changed = [None if item is None else decode(item, self._remote) for item in reply.get("arguments", [])]
        return decode(reply["value"], self._remote), changed

    def _receive(self) -> dict[str, Any]:
        reply = receive(self._replies)
        if reply is None:
            raise _AnswerEnded("the answer's process ended")
        if "error" in reply:
            raise _exception(reply["error"], reply["text"])
        return reply

    def _remote(self, number: int) -> Remote:
        return Remote(self, number)


def _number_of(value: Any) -> int:
    if isinstance(value, Remote):
        return value._number
    raise _TestsUnsupported(
        f"an argument for the answer must be plain data or an object of the answer's, got {type(value).__name__}"
    )


def _overwrite(argument: Any, after: Any) -> None:
    """Gives a mutable argument the content that the answer left in it."""
    if argument != after:
        argument.clear()
        if isinstance(argument, list):
            argument.extend(after)
        else:
            argument.update(after)


def _exception(kinds: list[str], text: str) -> Exception:
    """The nearest built-in exception class among the names of an exception's bases; AnswerError when there is none."""
    for kind in kinds:
        found = getattr(builtins, str(kind), None)
        if found is Exception:
            break
        if isinstance(found, type) and issubclass(found, Exception):
            return found(text) if not issubclass(found, UnicodeError) else ValueError(text)
    return AnswerError(f"{kinds[0]}: {text}")


class Remote:
    """An object that stays in the answer's process: tests may call it, read attributes, index, iterate and measure it.

    It has no truth value and no equality, because those would be the answer's word for the verdict.
    """

    def __init__(self, answer: _Answer, number: int) -> None:
        self._answer, self._number = answer, number

    def __getattr__(self, name: str) -> Any:
        return self._answer.get(self._number, name)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._answer.call(self._number, arguments, keywords)

    def __iter__(self) -> Any:
        return self._special("__iter__")

    def __next__(self) -> Any:
        return self._special("__next__")

    def __len__(self) -> int:
        return int(self._special("__len__"))

    def __getitem__(self, key: Any) -> Any:
        return self._special("__getitem__", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._special("__setitem__", key, value)

    def __contains__(self, item: Any) -> bool:
        return self._special("__contains__", item) is True

    def _special(self, name: str, *arguments: Any) -> Any:
        try:
            method = self._answer.get(self._number, name)
        except AttributeError as error:
            raise TypeError(str(error)) from None
        return method(*arguments)

    def __bool__(self) -> bool:
        raise TypeError("the answer returned an object that is not plain data: it has no truth value in a test")

    def __eq__(self, other: object) -> bool:
        raise TypeError("the answer returned an object that is not plain data: it cannot be compared in a test")

    __hash__ = None  # type: ignore[assignment]
