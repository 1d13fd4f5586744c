"""Addresses that a user gives: what is asked, and that nothing of a password or a key is shown."""

from __future__ import annotations

import base64
import http.server
import threading

import pytest

from kvtier.bench.web_address import WebAddress, opener, request_to, without_secrets


@pytest.mark.parametrize(("text", "origin", "path", "query"), [
    ("localhost:9400", "http://localhost:9400", "", ""), ("http://[::1]:1/", "http://[::1]:1", "/", ""),
    ("https://engine/a/b?key=s3cret#part", "https://engine", "/a/b", "?key=s3cret"),
    ("user:s3cret@engine:1/a", "http://engine:1", "/a", "")])
def test_an_address_is_taken_apart(text: str, origin: str, path: str, query: str) -> None:
    address = WebAddress.read(text)
    assert (address.origin, address.path, address.query) == (origin, path, query)
    assert address.url == origin + path + query
    assert "s3cret" not in address.shown + repr(address).replace(query or "nothing", "")


def test_a_user_and_a_password_go_into_a_header() -> None:
    headers = WebAddress.read("http://us%40er:s3%3Acret@engine").headers
    assert base64.b64decode(headers["Authorization"].removeprefix("Basic ")) == b"us@er:s3:cret"
    assert WebAddress.read("http://engine").headers == {}
    assert base64.b64decode(WebAddress.read("http://token@engine").headers["Authorization"].removeprefix("Basic ")) == b"token:"


@pytest.mark.parametrize("text", ["", "http://", "ftp://engine", "two words", "engine:abc", "http://[::1", "engine/\x01",
                                  "http://user:s3cret/x@engine", "http://user:s3cret@engine:port", "http://user:s3cret@"])
def test_what_is_no_address_is_refused_without_its_password(text: str) -> None:
    with pytest.raises(ValueError, match=r"Port|HOST:PORT|IPv6") as refused:
        WebAddress.read(text)
    assert "s3cret" not in str(refused.value) + without_secrets(text)


@pytest.mark.parametrize(("text", "shown"), [
    ("http://user:s3cret@engine:1/a", "http://***@engine:1/a"), ("user:s3cret@engine", "***@engine"),
    ("http://engine/a?key=s3cret", "http://engine/a?***"), ("http://user:s3/cr@et@engine?key=s3cret", "http://***@engine?***"),
    ("engine:1", "engine:1"), ("http://engine/#s3cret", "http://engine/?***")])
def test_user_and_query_are_not_shown(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_who_asks_is_told_to_another_path_of_a_server_and_to_no_other_server() -> None:
    told: list[tuple[str, str | None]] = []
    sent_on: dict[str, str] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            told.append((self.path, self.headers["Authorization"]))
            self.send_response(302 if self.path in sent_on else 200)
            if self.path in sent_on:
                self.send_header("Location", sent_on[self.path])
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server, http.server.HTTPServer(("127.0.0.1", 0), Handler) as other:
        for each in (server, other):
            threading.Thread(target=each.serve_forever, args=(0.05,), daemon=True).start()
        here, there = (f"http://127.0.0.1:{each.server_port}" for each in (server, other))
        sent_on |= {"/first": "/second", "/second": f"{here}/third", "/third": f"{there}/fourth", "/fourth": f"{here}/fifth"}
        address = WebAddress.read(f"user:secret@127.0.0.1:{server.server_port}/first")
        opener().open(request_to(address.url, address.headers), timeout=30).close()
        server.shutdown()
        other.shutdown()
    secret = address.headers["Authorization"]
    assert told == [("/first", secret), ("/second", secret), ("/third", secret), ("/fourth", None), ("/fifth", None)]
