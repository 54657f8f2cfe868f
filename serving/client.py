"""A client of OpenAI-compatible servers that streams completions."""

import http.client
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 300.0
_DATA, _END = b"data: ", b"[DONE]"


@dataclass(frozen=True, slots=True)
class Server:
    """Where to ask, and for what.

    Attributes:
        host: address.
        port: of it.
        model: name of the model there.
    """

    host: str
    port: int
    model: str


@dataclass(slots=True)
class Completion:
    """What a request yielded.

    Attributes:
        token_ids: of the answer.
        first_s: seconds to the first token.
        total_s: seconds to the end.
    """

    token_ids: list[int] = field(default_factory=list)
    first_s: float = 0.0
    total_s: float = 0.0


class RequestError(RuntimeError):
    """A server answered with another status than 200, or ended an answer early."""


def post(server: Server, path: str, body: bytes) -> tuple[int, bytes]:
    """Send a body and return status and answer."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def completion_body(
    server: Server, prompt: str | Sequence[int], max_tokens: int, **more: Any
) -> bytes:
    """Return a request for the likeliest tokens behind a prompt, streamed, as token ids."""
    values = {
        "model": server.model,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return json.dumps(values | more).encode()


def complete(
    server: Server,
    prompt: str | Sequence[int],
    max_tokens: int,
    on_text: Callable[[str], object] = lambda _text: None,
) -> Completion:
    """Stream one completion.

    Args:
        server: whom to ask.
        prompt: text or token ids.
        max_tokens: of the answer.
        on_text: called with each piece of text as it comes.

    Raises:
        RequestError: the server refused or ended early.
    """
    connection = http.client.HTTPConnection(server.host, server.port, timeout=TIMEOUT_S)
    done, started = Completion(), time.monotonic()
    try:
        body = completion_body(server, prompt, max_tokens)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise RequestError(f"status {response.status}: {response.read(400)!r}")
        ended = False
        for line in response:
            if not line.startswith(_DATA):
                continue
            payload = line.removeprefix(_DATA).strip()
            if payload == _END:
                ended = True
                break
            chunk = json.loads(payload)
            if "error" in chunk:  # behind status 200, in the midst of an answer
                raise RequestError(f"ended by an error: {chunk['error']}")
            for choice in chunk["choices"]:
                # A chunk may carry several tokens, or none.
                done.token_ids += choice.get("token_ids") or []
                on_text(choice.get("text") or "")
            done.first_s = done.first_s or time.monotonic() - started
    finally:
        connection.close()
    if not ended:
        raise RequestError(f"ended after {len(done.token_ids)} tokens")
    done.total_s = time.monotonic() - started
    return done
