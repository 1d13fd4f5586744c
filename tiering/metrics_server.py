"""``serve_metrics``: ``/metrics`` of a cache over HTTP, on loopback unless told otherwise (design: watching)."""

from __future__ import annotations

import logging
import socket
import socketserver
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Final, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from kvtier.errors import ConfigError
from kvtier.io.threads import start_thread
from kvtier.tiering.metrics import HasStats, TierCollector

_log = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
CLIENT_SECONDS: Final = 10.0
"""For a client to send its request: one that sends nothing keeps no thread for ever."""
_POLL_SECONDS: Final = 0.1
_ACCEPT_SECONDS: Final = 1.0  # a client may be gone before it is accepted, and the next would be waited for


class MetricsServer:
    """Serves one registry until it is closed. Make one with :func:`serve_metrics`."""

    def __init__(self, registry: CollectorRegistry, port: int, address: str) -> None:
        kind = _Server6 if ":" in address else _Server
        try:
            self._server = kind((address, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"metrics cannot be served on {address!r}, port {port} ({error}); choose another port, 0 for any that is "
                              "free, or an address of this machine") from error
        self._server.socket.settimeout(_ACCEPT_SECONDS)
        self._server.set_app(make_wsgi_app(registry))
        self.address = address
        self.port = int(self._server.server_address[1])
        try:
            self._thread = start_thread(partial(self._server.serve_forever, _POLL_SECONDS), "kvtier-metrics")
        except ConfigError:
            self._server.server_close()
            raise

    @property
    def url(self) -> str:
        """What Prometheus, ``curl`` and ``kvtier top`` take."""
        return f"http://{f'[{self.address}]' if ':' in self.address else self.address}:{self.port}/metrics"

    def close(self) -> None:
        """Stop listening; an answer that is being written is finished on its own. About a second at most. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_ACCEPT_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def serve_metrics(cache: HasStats, port: int = 0, address: str = LOOPBACK, labels: Mapping[str, str] | None = None) -> MetricsServer:
    """Show a cache's metrics at ``http://ADDRESS:PORT/metrics``. Close it before or after the cache; it holds nothing of it up.

    Args:
        cache: ``KVCacheManager``, or another with ``stats()``.
        port: 0 takes one that is free; see ``url``.
        address: where to listen. Metrics tell how a service is used: only loopback unless you say so.
        labels: more labels for every metric, such as ``{"replica": "a"}``.

    Raises:
        ConfigError: the port is taken or may not be used, the address is not of this machine, a label that is none, or no thread to be had.
    """
    registry = CollectorRegistry()
    registry.register(TierCollector(cache, labels))
    return MetricsServer(registry, port, address)


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True  # a client that hangs holds up neither the others nor the end

    def server_bind(self) -> None:
        """Without the look-up of our own name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away, mostly: no traceback for that."""
        _log.debug("metrics: a request from %s failed", client_address, exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_SECONDS

    def log_message(self, format: str, *args: object) -> None:
        """Not a word for each scrape."""
