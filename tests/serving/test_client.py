"""The client that streams, against a server that answers as it is set; none of it needs vLLM."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from neuron_moe.serving.client import RequestError, Server, complete

TOKEN = {"choices": [{"token_ids": [7], "text": "seven"}]}


@contextmanager
def _answering(*chunks: dict[str, Any] | str) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            for chunk in chunks:
                text = chunk if isinstance(chunk, str) else json.dumps(chunk)
                self.wfile.write(f"data: {text}\n\n".encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        try:
            yield Server("127.0.0.1", server.server_port, "model")
        finally:
            thread.join()


def test_an_answer_is_streamed_to_its_end() -> None:
    pieces: list[str] = []
    with _answering(TOKEN, TOKEN, "[DONE]") as server:
        assert complete(server, [1], 2, pieces.append).token_ids == [7, 7]
    assert pieces == ["seven", "seven"]


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([TOKEN], "ended after 1 tokens"),
        ([TOKEN, {"error": {"message": "EngineCore died"}}, "[DONE]"], "EngineCore died"),
    ],
    ids=["early", "error"],
)
def test_an_answer_that_does_not_come_to_its_end_is_told(chunks: list[Any], words: str) -> None:
    with _answering(*chunks) as server, pytest.raises(RequestError, match=words):
        complete(server, [1], 2)
