"""Where the settings of ``TierConfig`` come from: keywords, environment, file; each value is marked with its origin."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource
from pydantic_settings.exceptions import SettingsError

from kvtier.errors import ConfigError
from kvtier.pools.sizing import shown
from kvtier.tiering.config_names import OTHER_NAMES, our_names

ENVIRONMENT_PREFIX: Final = "KVTIER_"
CONFIG_FILE_VARIABLE: Final = "KVTIER_CONFIG"
OTHER_VARIABLES: Final = frozenset({CONFIG_FILE_VARIABLE, "KVTIER_COMPILE"})
"""``KVTIER_`` variables that are no settings: the default file, and the compiled build."""

KEYWORD_ONLY: Final = frozenset({"allreduce_min", "clock"})
"""Settings that are objects: no text in the environment or a file can stand for them."""

_FLAT: Final = 'a setting is one value or one list of values, for example primary: ["8 blocks", "4 blocks"]'

_chosen_file: ContextVar[Path | None] = ContextVar("kvtier_config_file", default=None)


class _EachKeyOnce(yaml.SafeLoader):
    """A key that stands twice in one mapping is an error, as it is in TOML: PyYAML would take the last one and say nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                line = key.start_mark.line + 1
                if key.value in first:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{shown(key.value)} stands twice, on lines {first[key.value]} and {line}", key.start_mark)
                first[key.value] = line
        return super().construct_mapping(node, deep)


@dataclass(frozen=True)
class Sourced:
    """A value on its way into the model, with where it came from."""

    value: object
    origin: str

    def refused(self, error: ConfigError) -> ConfigError:
        """The error about this value, with where it came from; whoever wrote a keyword knows."""
        return error if self.origin == "keyword" else ConfigError(f"{self.origin}: {error}")


class _Source(PydanticBaseSettingsSource):
    """Base of the sources that have nothing to say field by field."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[object, str, bool]:
        return None, field_name, False


class Keywords(_Source):
    """Arguments of the constructor."""

    def __init__(self, settings_cls: type[BaseSettings], inner: PydanticBaseSettingsSource) -> None:
        super().__init__(settings_cls)
        self._inner = inner

    def __call__(self) -> dict[str, Any]:
        return _sourced(self._inner(), lambda name: "keyword")


class Environment(EnvSettingsSource):
    """``KVTIER_<KEY>``; lists are written as JSON."""

    def __call__(self) -> dict[str, Any]:
        known = self.settings_cls.model_fields
        others: dict[str, str] = {}
        for name, text in os.environ.items():
            if not name.upper().startswith(ENVIRONMENT_PREFIX) or name.upper() in OTHER_VARIABLES:
                continue
            key = name[len(ENVIRONMENT_PREFIX):].lower()
            if key in OTHER_NAMES:
                others[key] = text
            elif key not in known:
                raise unknown_key(key, f"environment {name}", known)
            _refuse_objects(key, f"environment {name}")
        try:
            values = super().__call__()
        except (SettingsError, RecursionError) as error:
            raise ConfigError(f"environment: {error}; a list is written as JSON, for example "
                              "KVTIER_GROUP_SHARES='[0.5, 0.5]'") from error
        return _sourced({**values, **others}, lambda name: f"environment {ENVIRONMENT_PREFIX}{name.upper()}")


class File(_Source):
    """The file of ``from_file``, else the one that ``KVTIER_CONFIG`` names, else nothing."""

    def __call__(self) -> dict[str, Any]:
        path = _chosen_file.get()
        if path is None:
            named = os.environ.get(CONFIG_FILE_VARIABLE)
            if named is None:
                return {}
            path = expand_path(named, CONFIG_FILE_VARIABLE)
        values = read_file(path)
        for key in values:
            _refuse_objects(key, f"file {path}")
        return _sourced(values, lambda name: f"file {path}")


@contextmanager
def reading_file(path: Path) -> Iterator[None]:
    """Sources are built inside the model's constructor, which takes settings only: hand them the file beside it."""
    token = _chosen_file.set(path)
    try:
        yield
    finally:
        _chosen_file.reset(token)


def read_file(path: Path) -> dict[str, object]:
    """The keys and values of a YAML or TOML file, as written.

    Raises:
        ConfigError: missing or unreadable, another ending, a syntax error, or no mapping of keys.
    """
    if os.path.isdir(path):  # unlike Path.is_dir, never an error
        raise ConfigError(f"config file {path}: is a folder; name a .yaml, .yml or .toml file")
    if path.suffix not in (".yaml", ".yml", ".toml") and os.path.exists(path):  # of one that is missing, this is said below
        raise ConfigError(f"config file {path}: unknown kind {path.suffix!r}; use a .yaml, .yml or .toml file")
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text) if path.suffix == ".toml" else yaml.load(text, _EachKeyOnce)
    except OSError as error:
        raise ConfigError(f"config file {path}: cannot be read ({error.strerror}); check the path") from error
    except yaml.MarkedYAMLError as error:
        place = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: "
        said = ", ".join(filter(None, (error.context, error.problem)))
        raise ConfigError(f"config file {path}: {place}{said}; correct the file") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"config file {path}: {' '.join(str(error).split())}; correct the file") from error
    except RecursionError:
        raise ConfigError(f"config file {path}: lists or tables are nested too deeply to be read; {_FLAT}") from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f'config file {path}: must hold keys and values, for example primary: "90%"')
    for key, value in data.items():
        # Not left to the model: a few lines of TOML or of YAML aliases nest deeper, or grow larger, than a message can show.
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if any(isinstance(item, (dict, list, tuple)) for item in inner):
            raise ConfigError(f"{key} (file {path}): holds lists or tables inside each other; {_FLAT}")
    return data


def expand_path(value: str | Path, name: str) -> Path:
    """Expand ``~`` and ``$VARS``; nothing of the kind is ever taken literally.

    Raises:
        ConfigError: an empty path, an undefined variable, an unknown user, a null byte.
    """
    text = str(value)
    if not text or "\0" in text:
        raise ConfigError(f"{name}={shown(text)}: not a path; write for example /mnt/nvme/kvtier")

    def variable(match: re.Match[str]) -> str:
        found = os.environ.get(match[1] or match[2])
        if found is None:
            raise ConfigError(f"{name}={shown(text)}: the variable {match[0]:.100} is not set; set it or write the path out")
        return found

    expanded = re.sub(r"\$(?:(\w+)|\{([^}]*)\})", variable, text)
    expanded = os.path.expanduser(expanded)
    if expanded.startswith("~") or "$" in expanded:
        raise ConfigError(f"{name}={shown(text)}: cannot be expanded (got {shown(expanded)}); write the path out")
    return Path(expanded)


def _sourced(values: Mapping[str, Any], origin: Callable[[str], str]) -> dict[str, Any]:
    return {key: Sourced(value, where) for key, (value, where) in our_names(values, origin).items()}


def _refuse_objects(key: str, origin: str) -> None:
    if key in KEYWORD_ONLY:
        raise ConfigError(f"{key} ({origin}): can only be given as a keyword in code; remove it there")


def unknown_key(key: str, origin: str, known: Iterable[str]) -> ConfigError:
    """The error for a key that is no setting, with the nearest that may stand there."""
    possible = [name for name in known if origin == "keyword" or name not in KEYWORD_ONLY]
    near = difflib.get_close_matches(key, [*possible, *OTHER_NAMES], 1)
    hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(possible)}"
    return ConfigError(f"{shown(key)} ({origin}): unknown key; {hint}")
