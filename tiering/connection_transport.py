"""``ConnectionTransport``: ranks that are processes of one machine, over ``multiprocessing.connection`` (design: events).

Only bytes travel, never pickles. On rank 0 a thread waits on each other rank, so that one that stops in the middle of a message
holds up nobody else.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

from kvtier.errors import ConfigError, TransferError
from kvtier.io.threads import start_thread
from kvtier.tiering.event_transport import check_rank, closed_transport

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES: Final = 256 << 20
MAX_WAITING: Final = 64          # messages received and not fetched yet; further ones wait on the sender's side
HELLO_SECONDS: Final = 1.0       # for whoever connects to say which rank it is
RETRY_SECONDS: Final = 0.02


class ConnectionTransport:
    """A :class:`~kvtier.tiering.event_transport.GatherTransport` over established connections, which it owns from here on.

    ``connections``: at rank 0 one for each other rank, elsewhere ``{0: connection}``; both ends of ``multiprocessing.Pipe()``
    for example. Where processes have no such pipe, rank 0 calls :meth:`listen` and the others :meth:`connect`.

    Raises:
        ConfigError: connections that are not those, which stay open; or a thread cannot be started, and all connections are closed.
    """

    def __init__(self, rank: int, num_ranks: int, connections: Mapping[int, Connection[Any, Any]]) -> None:
        check_rank(rank, num_ranks)
        expected = set(range(1, num_ranks)) if rank == 0 else {0}
        if set(connections) != expected:
            raise ConfigError(f"rank {rank} of {num_ranks}: connections to ranks {sorted(connections)}, needed are {sorted(expected)}")
        self.rank = rank
        self.num_ranks = num_ranks
        self._connections = dict(connections)
        # A second handle on each socket: shutting it down wakes threads that read or write, which closing would not.
        self._sockets = [socket.socket(fileno=os.dup(connection.fileno())) for connection in connections.values()]
        self._box: SimpleQueue[tuple[int, bytes | None]] = SimpleQueue()
        self._room = threading.Semaphore(MAX_WAITING)
        self._sending = threading.Lock()
        self._is_closed = False
        self._readers: list[threading.Thread] = []
        try:
            for other, connection in self._connections.items():
                self._readers.append(start_thread(partial(self._read, other, connection), f"kvtier-gather-read-{other}"))
        except ConfigError:
            self.close()
            raise

    @classmethod
    def listen(cls, path: str | Path, num_ranks: int, timeout: float = 60.0) -> ConnectionTransport:
        """Rank 0: wait until all other ranks have connected to the socket file ``path``, which is gone afterwards.

        Put it into a folder that only you may write to; the file itself admits only its owner.

        Raises:
            ConfigError: the path is taken or cannot be a socket.
            TimeoutError: not all ranks came; nothing stays open.
        """
        check_rank(0, num_ranks)
        deadline = time.monotonic() + timeout
        found: dict[int, Connection[Any, Any]] = {}
        with closing(_bind(path)) as listener:
            try:
                while len(found) < num_ranks - 1:
                    listener.settimeout(max(deadline - time.monotonic(), 0.001))
                    try:
                        arrived, _address = listener.accept()
                    except TimeoutError:
                        missing = sorted(set(range(1, num_ranks)) - set(found))
                        raise TimeoutError(f"{path}: ranks {missing} of {num_ranks} have not connected within {timeout} s") from None
                    arrived.setblocking(True)
                    _admit(Connection(arrived.detach()), num_ranks, found)
                return cls(0, num_ranks, found)
            except BaseException:
                for connection in found.values():
                    connection.close()
                raise
            finally:
                Path(path).unlink(missing_ok=True)

    @classmethod
    def connect(cls, path: str | Path, rank: int, num_ranks: int, timeout: float = 60.0) -> ConnectionTransport:
        """Another rank: connect to rank 0, which may start later than this.

        Raises:
            ConfigError: the path cannot be connected to.
            TimeoutError: nobody listens there.
        """
        check_rank(rank, num_ranks)
        if rank == 0:
            raise ConfigError("rank=0: rank 0 listens, the others connect")
        deadline = time.monotonic() + timeout
        while True:
            ours = socket.socket(socket.AF_UNIX)
            try:
                ours.connect(str(path))
                break
            except OSError as error:
                ours.close()
                if error.errno not in (errno.ENOENT, errno.ECONNREFUSED):
                    raise ConfigError(f"{path}: cannot connect to rank 0 there ({error})") from None
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path}: rank 0 does not listen there after {timeout} s ({error.strerror})") from None
                time.sleep(RETRY_SECONDS)
        connection: Connection[Any, Any] = Connection(ours.detach())
        connection.send_bytes(str(rank).encode())
        return cls(rank, num_ranks, {0: connection})

    def send(self, to: int, message: bytes) -> None:
        try:
            with self._sending:
                self._connections[to].send_bytes(message)
        except OSError as error:
            raise TransferError(f"rank {to} is gone; nothing can be sent to it from rank {self.rank} ({error})") from None

    def receive(self, timeout: float) -> list[tuple[int, bytes | None]]:
        found: list[tuple[int, bytes | None]] = []
        deadline = time.monotonic() + timeout
        if self._is_closed:
            raise closed_transport(self.rank)
        while not self._is_closed and len(found) < MAX_WAITING:
            try:
                found.append(self._box.get(not found, max(deadline - time.monotonic(), 0.0)))
            except Empty:
                break
            self._room.release()
        return [(sender, message) for sender, message in found if sender != self.rank]

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for ours in self._sockets:
            try:
                ours.shutdown(socket.SHUT_RDWR)
            except OSError:  # the other end went first
                pass
        self._room.release(len(self._readers))
        self._box.put((self.rank, None))  # wakes our own receive
        for reader in self._readers:
            reader.join(1.0)
        for ours in self._sockets:
            ours.close()
        with self._sending:  # the number of a closed file may belong to another one a moment later: not while somebody writes
            for connection in self._connections.values():
                connection.close()

    def _read(self, other: int, connection: Connection[Any, Any]) -> None:
        while True:
            self._room.acquire()
            if self._is_closed:
                return
            message: bytes | None
            try:
                message = connection.recv_bytes(MAX_MESSAGE_BYTES)
            except (OSError, EOFError):
                message = None
            self._box.put((other, message))
            if message is None:
                return


def _bind(path: str | Path) -> socket.socket:
    """A listening socket at ``path``. A file that a crashed process has left there is replaced."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        try:
            listener.bind(str(path))
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not _is_left_over(path):
                raise
            Path(path).unlink()
            listener.bind(str(path))
        os.chmod(path, 0o600)  # before listen(): until then nobody can connect
        listener.listen()
        return listener
    except OSError as error:
        listener.close()
        raise ConfigError(f"{path}: cannot be a socket to listen at ({error}); name a new file in a folder of your own, its whole path at "
                          "most 107 bytes long") from None


def _is_left_over(path: str | Path) -> bool:
    with closing(socket.socket(socket.AF_UNIX)) as trial:
        try:
            trial.connect(str(path))
        except ConnectionRefusedError:
            return Path(path).is_socket()
        except OSError:
            return False
        return False


def _admit(connection: Connection[Any, Any], num_ranks: int, found: dict[int, Connection[Any, Any]]) -> None:
    """Find out which rank has connected. Who says nothing, or something else, is turned away."""
    try:
        hello = connection.recv_bytes(16) if connection.poll(HELLO_SECONDS) else b"nothing"
    except (OSError, EOFError):
        hello = b"nothing"
    text = hello.decode("ascii", "replace")
    if text.isdecimal() and 0 < int(text) < num_ranks and int(text) not in found:
        found[int(text)] = connection
        return
    logger.warning("event gather: a connection that calls itself rank %r is turned away; ranks 1 to %d are waited for, %s are there", text,
                   num_ranks - 1, sorted(found))
    connection.close()
