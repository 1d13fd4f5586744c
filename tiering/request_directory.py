"""``RequestRoot``: folders that requests name for themselves, all under one root, and no way out (design: NVMe rules).

A name is checked when its request is admitted, and again, component by component and without following links, whenever a folder is
opened: whoever can put a link there in between gains nothing.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from kvtier.errors import ConfigError, RequestError, TransferError

FOLDER_MODE = 0o700


class RequestRoot:
    """The folder ``request_directory_root``, held open.

    Raises:
        ConfigError: it cannot be made or opened.
    """

    def __init__(self, root: Path) -> None:
        try:
            root.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            self.path = root.resolve(strict=True)
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise ConfigError(f"request_directory_root={str(root)!r} cannot be used ({error.strerror}); name a folder that user "
                              f"{os.getuid()} may write to") from error

    def close(self) -> None:
        """Let go of the folder. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def parts(self, directory: str) -> tuple[str, ...]:
        """A request's directory as folder names below the root. It may be given relative to the root, or as an absolute path.

        Raises:
            RequestError: outside of the root or not below it, ``..``, ``~`` or ``$``, a link on the way, a name that the system refuses.
        """
        name = f"directory={directory!r}"
        if not directory or "\0" in directory or directory.startswith("~") or "$" in directory:
            raise RequestError(f"{name}: neither expanded nor taken literally; write out a path under {self.path}")
        path = PurePosixPath(directory)
        if ".." in path.parts:
            raise RequestError(f"{name}: '..' is refused; write a path that stays under request_directory_root={self.path}")
        if path.is_absolute():
            if not path.is_relative_to(self.path):
                raise RequestError(f"{name}: not under request_directory_root={self.path}; name a folder below it")
            path = path.relative_to(self.path)
        if not path.parts:
            raise RequestError(f"{name}: is request_directory_root itself; name a folder below it")
        at = self.path
        try:
            longest = os.pathconf(self.path, "PC_NAME_MAX")
            for part in path.parts:
                if len(os.fsencode(part)) > longest:
                    raise RequestError(f"{name}: {part[:20]!r}... is longer than the {longest} bytes that a folder's name may have")
                at /= part
                if at.is_symlink():
                    raise RequestError(f"{name}: {at} is a link, which might lead elsewhere; name a folder")
                if at.exists() and not at.is_dir():
                    raise RequestError(f"{name}: {at} is no folder; name another one")
        except (OSError, UnicodeEncodeError) as error:  # a name that is too long, or no text; a folder that may not be looked into
            raise RequestError(f"{name}: cannot be looked up below {self.path} ({error}); name another folder") from error
        return path.parts

    def open(self, directory: str) -> int:
        """A descriptor of the request's folder, which is made where it is missing (mode 0700). The caller closes it.

        Raises:
            TransferError: it cannot be opened, or a link stands on the way by now.
        """
        try:
            parts = self.parts(directory)
        except RequestError as error:
            raise TransferError(str(error)) from error
        at = os.dup(self._descriptor)
        try:
            for part in parts:
                try:
                    os.mkdir(part, FOLDER_MODE, dir_fd=at)
                except FileExistsError:
                    pass
                below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
                os.close(at)
                at = below
            os.fchmod(at, FOLDER_MODE)
        except OSError as error:
            os.close(at)
            raise TransferError(f"directory={directory!r}: {error.strerror} under {self.path}") from error
        return at
