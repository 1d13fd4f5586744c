"""Which way bytes take between device and NVMe, decided once at start and said aloud (design: ``gds``, transfer modes).

``gds="required"`` starts with GPUDirect Storage or not at all. ``"auto"`` takes it where a probe of the real directory has written,
read back and compared every byte, and otherwise goes through the host and says why: in the log, in ``stats().gds`` and in
``kvtier doctor``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError
from kvtier.io import gds_probe
from kvtier.io.gds import GdsPath, open_gds
from kvtier.io.gds_driver import GdsUnavailable
from kvtier.io.gds_probe import NvmePath
from kvtier.io.nvme_store import NvmeStore
from kvtier.pools.nvme_geometry import NvmeGeometry
from kvtier.pools.sizing import parse_size
from kvtier.tiering.config import TierConfig
from kvtier.tiering.direct_writes import WRITE_ROWS

_log = logging.getLogger(__name__)

SWITCHED_OFF: Final = "gds='off'"


def require_possible(config: TierConfig, device: str, has_nvme: bool) -> None:
    """Refuse ``gds="required"`` before anything is opened, where it cannot be had.

    Raises:
        ConfigError: names the reason.
    """
    if config.gds != "required":
        return
    if not has_nvme:
        raise ConfigError("gds='required' without an NVMe level: there are no files to read; set nvme and nvme_directory, or gds='auto'")
    reason = gds_probe.obstacle(device, config.nvme_directory)
    if reason is not None:
        raise _required(reason)


def open_direct_path(config: TierConfig, device: str, store: NvmeStore | None, staging_blocks: int) -> tuple[NvmePath, GdsPath | None]:
    """Choose the way, and open it if it is the direct one.

    Args:
        config: ``gds`` and its settings.
        device: "cpu" or "cuda:N".
        store: the NVMe level, open; None without one.
        staging_blocks: blocks of each group that may be read at once.

    Raises:
        ConfigError: ``gds="required"`` and it does not work; names the reason.
    """
    if store is None:
        return gds_probe.NO_NVME, None
    if config.gds == "off":
        return NvmePath("posix", SWITCHED_OFF), None
    directory = store.directory
    reason = gds_probe.obstacle(device, directory)
    if reason is None:
        reason = gds_probe.try_directory(directory, device)
    if reason is None:
        slabs = store.slabs()
        try:
            path = _open([path for path, _geometry in slabs], [geometry for _path, geometry in slabs], config, device, staging_blocks)
        except ConfigError as error:  # GdsUnavailable, and no memory on the device
            reason = str(error)
        else:
            _log.info("%s: NVMe and %s exchange blocks directly (GPUDirect Storage)", directory, device)
            return NvmePath("gds"), path
    if config.gds == "required":
        raise _required(reason)
    # On a CPU nobody expects it; anywhere else somebody may think it is there.
    _log.log(logging.INFO if device == "cpu" else logging.WARNING, "%s: NVMe goes through the host (POSIX), not GPUDirect: %s", directory,
             reason)
    return NvmePath("posix", reason), None


def _open(paths: Sequence[Path], geometries: Sequence[NvmeGeometry], config: TierConfig, device: str, staging_blocks: int) -> GdsPath:
    return open_gds(paths, geometries, int(device.partition(":")[2] or 0), staging_blocks + WRITE_ROWS, config.gds_threads,
                    int(parse_size(config.gds_task_size, "gds_task_size").amount))


def _required(reason: str) -> ConfigError:
    return GdsUnavailable(f"gds='required': {reason}. Set gds='auto' to go through the host where GPUDirect does not work")
