"""What is used of KvikIO and of cuFile below it, and the switches that keep both from taking a detour in silence.

Two layers may replace a transfer between device and drive by ordinary reads and writes through the host without saying so:
KvikIO where its compatibility mode allows it, and cuFile itself where *its* compatibility mode does. GPUDirect Storage is
claimed only with both turned off. Both are settings of the whole process; KvikIO's is put back once a file is open, because
a handle keeps the mode that it was opened in, and cuFile's can only be set before its driver starts.

KvikIO is imported when something here is called, never by importing this file.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final, Protocol, cast

from kvtier.errors import ConfigError
from kvtier.pools.nvme_geometry import PAGE_BYTES

_ALLOW_COMPAT_MODE: Final = 1  # CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE
_FORCE_COMPAT_MODE: Final = 2  # CUFILE_PARAM_FORCE_COMPAT_MODE


class GdsUnavailable(ConfigError):
    """GPUDirect Storage cannot be used here; the message is the reason and what to do about it."""


class KvikioFuture(Protocol):
    """A read or write under way in KvikIO's threads."""

    def get(self) -> int:
        """Wait for it; the number of bytes moved. RuntimeError when the system refused, or the file ends before them."""


class KvikioFile(Protocol):
    """What is used of ``kvikio.CuFile``. Buffers are host or device memory with the usual array interfaces."""

    def pread(self, buf: object, size: int, file_offset: int, task_size: int) -> KvikioFuture: ...
    def pwrite(self, buf: object, size: int, file_offset: int, task_size: int) -> KvikioFuture: ...
    def close(self) -> None: ...


class KvikioDefaults(Protocol):
    """What is used of ``kvikio.defaults``."""

    def get(self, config_name: str) -> object: ...
    def set(self, config: dict[str, object]) -> AbstractContextManager[None]: ...


class KvikioCompatMode(Protocol):
    """``kvikio.CompatMode``."""

    OFF: object
    ON: object


class KvikioModule(Protocol):
    """What is used of ``kvikio``, which has no type information."""

    CompatMode: KvikioCompatMode
    defaults: KvikioDefaults

    def CuFile(self, file: Path, flags: str) -> KvikioFile: ...
    def memory_register(self, buf: object) -> None: ...
    def memory_deregister(self, buf: object) -> None: ...


def load_kvikio() -> KvikioModule:
    """``kvikio``, imported now.

    Raises:
        GdsUnavailable: it is not installed, or does not find its libraries.
    """
    try:
        importlib.import_module("kvikio.defaults")
        return cast(KvikioModule, importlib.import_module("kvikio"))
    except (ImportError, OSError) as error:
        raise GdsUnavailable(f"KvikIO cannot be imported ({error}); pip install 'kvtier[cuda]'") from error


def is_kvikio_installed() -> bool:
    """Whether there is a KvikIO to import. Imports nothing."""
    return importlib.util.find_spec("kvikio") is not None


def configure_kvikio(kvikio: KvikioModule, num_threads: int, task_size: int) -> None:
    """Settings of the process that every handle shares.

    Args:
        kvikio: the module.
        num_threads: threads of KvikIO's pool. Its own default of one cannot keep a drive busy.
        task_size: bytes that one thread moves at a time.
    """
    # Direct I/O is said explicitly for both ways, because the defaults differ. What is below the threshold would go through the
    # host even with GPUDirect; nothing of ours is smaller than a page.
    kvikio.defaults.set({"num_threads": num_threads, "task_size": task_size, "gds_threshold": PAGE_BYTES,
                         "auto_direct_io_read": True, "auto_direct_io_write": True})


@contextmanager
def no_detours(kvikio: KvikioModule) -> Iterator[None]:
    """Within this, files are opened and buffers are registered for GPUDirect or not at all.

    Never enter it where there is no GPU: cuFile's driver then spins for ever.
    """
    mode = kvikio.CompatMode.OFF
    with kvikio.defaults.set({"compat_mode": mode}):
        yield


class _CuFileError(ctypes.Structure):
    """``CUfileError_t``."""

    _fields_ = [("err", ctypes.c_int), ("cu_err", ctypes.c_int)]


class CuFileSettings:
    """cuFile's own settings, through its C interface: KvikIO offers neither the switch nor a look at the one that forces it.

    Args:
        library: ``libcufile``, as ``ctypes`` loads it.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._set = library.cuFileSetParameterBool
        self._set.restype = _CuFileError
        self._set.argtypes = [ctypes.c_int, ctypes.c_bool]
        self._get = library.cuFileGetParameterBool
        self._get.restype = _CuFileError
        self._get.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_bool)]

    @classmethod
    def loaded(cls) -> CuFileSettings:
        """Those of the library that KvikIO has loaded.

        Raises:
            GdsUnavailable: there is none, or one too old to have settings (before CUDA 12.6).
        """
        try:
            return cls(ctypes.CDLL("libcufile.so.0"))
        except OSError as error:
            raise GdsUnavailable(f"libcufile.so.0 cannot be loaded ({error}); pip install nvidia-cufile") from error
        except AttributeError as error:
            raise GdsUnavailable(f"this libcufile has no settings ({error}); install that of CUDA 12.6 or newer") from error

    def forbid_compat_mode(self) -> None:
        """Ask for GPUDirect or an error. Without effect when the driver runs already: ``require_no_compat_mode`` tells."""
        for parameter in (_ALLOW_COMPAT_MODE, _FORCE_COMPAT_MODE):
            self._set(parameter, False)

    def require_no_compat_mode(self) -> None:
        """Check, once the driver runs, that cuFile moves nothing through the host by itself.

        Raises:
            GdsUnavailable: it may, or does not say.
        """
        for parameter, name in ((_ALLOW_COMPAT_MODE, "allow_compat_mode"), (_FORCE_COMPAT_MODE, "force_compat_mode")):
            value = ctypes.c_bool(True)
            status = self._get(parameter, ctypes.byref(value))
            if status.err != 0 or value.value:
                raise GdsUnavailable(f"cuFile's {name} is on and something else in this process has started its driver before: set "
                                     f'"{name}": false in cufile.json, or open the cache first')
