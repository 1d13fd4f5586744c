"""Addresses of servers that a user gives (``kvtier check``, ``kvtier top``), and what may be said of them: never a password or a key."""

from __future__ import annotations

import base64
import re
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPMessage
from typing import IO, Final

HIDDEN: Final = "***"
_NONE: Final = "not HOST:PORT, nor a URL of http or https"
_USER: Final = re.compile(r"^([a-zA-Z]+://)?.*@", re.DOTALL)
_QUERY: Final = re.compile(r"[?#].*", re.DOTALL)


@dataclass(frozen=True)
class WebAddress:
    """Where to ask, and how.

    Attributes:
        origin: such as http://127.0.0.1:8000.
        path: "", or what stands behind it, from its /.
        query: "", or from its ?. It may hold a key.
        headers: of each request: a user and password that stood in the address go there.
    """

    origin: str
    path: str
    query: str
    headers: Mapping[str, str] = field(repr=False)

    @classmethod
    def read(cls, text: str) -> WebAddress:
        """``HOST:PORT`` means http.

        Raises:
            ValueError: no such address. Says why, and nothing of a password.
        """
        if not text.isprintable() or any(letter.isspace() for letter in text):
            raise ValueError(_NONE)
        try:
            url = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
            url.port  # noqa: B018 - ValueError for a port that is none
        except ValueError as error:
            raise ValueError(_NONE if "@" in text else str(error)) from None
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(_NONE)
        host = url.netloc.rpartition("@")[2]
        user = ":".join(urllib.parse.unquote(part or "") for part in (url.username, url.password))
        headers = {} if url.username is None else {"Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"}
        return cls(f"{url.scheme}://{host}", url.path, f"?{url.query}" if url.query else "", headers)

    @property
    def url(self) -> str:
        """To ask; not to be shown."""
        return self.origin + self.path + self.query

    @property
    def shown(self) -> str:
        """For messages."""
        return without_secrets(self.url)


def without_secrets(address: str) -> str:
    """An address, or what should be one, without user, password and query."""
    return _QUERY.sub(f"?{HIDDEN}", _USER.sub(rf"\g<1>{HIDDEN}@" if "://" in address else f"{HIDDEN}@", address))


class _SentOn(urllib.request.HTTPRedirectHandler):
    """Sends the authorization along to another path of the same server, and to no other server."""

    def redirect_request(self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage,
                         newurl: str) -> urllib.request.Request | None:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        authorization = req.get_header("Authorization")
        if request is not None and authorization is not None and _server_of(newurl) == _server_of(req.full_url):
            request.add_unredirected_header("Authorization", authorization)
        return request


def _server_of(url: str) -> tuple[str, str | None, int | None]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def opener() -> urllib.request.OpenerDirector:
    """Asks the server itself, whatever proxy the environment names. The authorization of :func:`request_to` goes to no other server."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), _SentOn())


def request_to(url: str, authorization: Mapping[str, str], data: bytes | None = None, **headers: str) -> urllib.request.Request:
    """A GET, or a POST of ``data``, for :func:`opener`."""
    request = urllib.request.Request(url, data, headers)
    for name, value in authorization.items():
        request.add_unredirected_header(name, value)
    return request
