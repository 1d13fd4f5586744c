"""Make the pages of docs/reference/ from the code: public names, commands, errors and exit codes.

Usage: python scripts/reference.py [--check]

``--check`` writes nothing and exits with 1 when a page and the code do not agree (a test does the same). Settings and metrics have pages of
their own, docs/configuration.md and docs/metrics.md, whose tables are made from the code as well.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo

import kvtier
import kvtier.errors
import kvtier.exit_codes
import kvtier.kernels
from kvtier.cli import app

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"

PUBLIC: Final[dict[str, tuple[str, ...]]] = {
    "Two ways to attach": ("KVCacheManager", "TierIndex", "TierWorker", "TierStore"),
    "What an engine asks for": ("Request", "MultimodalItem", "RetentionConfig", "TokenRange", "RetentionLevel", "TransferMode"),
    "What the cache is made of": ("KVLayout", "LayerSpec", "TierConfig", "Level"),
}
"""Names of ``kvtier`` by theme. What is missing here comes last; errors have a page of their own."""

RETURNED: Final[dict[str, tuple[str, ...]]] = {
    "kvtier.tiering.handles": ("Admission", "Lease"),
    "kvtier.tiering.step": ("Step",),
    "kvtier.tiering.block_access": ("BlockView",),
    "kvtier.tiering.ledger.capacity": ("PrefixReuse",),
    "kvtier.tiering.drafting": ("DraftTable",),
    "kvtier.tiering.prefetching": ("Prefetch", "PrefetchState"),
    "kvtier.tiering.statistics": ("Stats", "IterationStats", "RequestStats", "LevelStats", "LoadStats", "GdsStats", "PrefetchStats"),
    "kvtier.tiering.ledger.events": ("Event", "Created", "Stored", "Removed", "Updated"),
    "kvtier.tiering.event_stream": ("EventStream",),
    "kvtier.tiering.tier_messages": ("KeyState", "Lookup", "StorePlan", "LoadPlan", "WorkerResult"),
    "kvtier.tiering.tier_statistics": ("TierStats",),
}
"""What calls give back, and where it is defined."""

BESIDE: Final[dict[str, tuple[str, ...]]] = {
    "kvtier.pools.page_layout": ("PageLayout", "PageGroup"),
    "kvtier.tiering.tier_plan": ("TierPlan",),
    "kvtier.tiering.metrics_server": ("serve_metrics",),
    "kvtier.tiering.metrics": ("TierCollector",),
    "kvtier.tiering.event_gather": ("EventGather",),
    "kvtier.tiering.debug_files": ("read_debug_file",),
}
"""Other names that pages of the documentation use."""

ADAPTERS: Final[dict[str, tuple[str, ...]]] = {
    "kvtier.tiering.attach.transformers": ("AttachedModel", "layout_of", "check_version"),
    "kvtier.tiering.attach.transformers_encoder": ("AttachedEncoderDecoder", "digest_of"),
    "kvtier.tiering.attach.generation_cache": ("GenerationCache",),
    "kvtier.tiering.attach.serving_loop": ("ServingLoop",),
    "kvtier.tiering.attach.serving_sequence": ("Answer",),
    "kvtier.tiering.attach.sampling": ("Sampling",),
    "kvtier.tiering.attach.streaming": ("AsyncServing",),
}

_NOT_TO_CALL: Final = {"settings_customise_sources", "model_post_init"}  # pydantic's hooks
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):\s*(.*)$")
_MADE = "<!-- Made by scripts/reference.py. Change the code, then run it. -->\n"


# -- docstrings ------------------------------------------------------------------------------------------------------------------


def as_markdown(docstring: str | None) -> str:
    """A docstring with its marks and its sections (Args, Raises, ...) as Markdown."""
    out: list[str] = []
    in_section = is_list = False
    for line in inspect.cleandoc(docstring or "").splitlines():
        if found := _SECTION.match(line):
            out += ["", f"*{found[1]}*" + (f": {found[2]}" if found[2] else ""), ""]
            in_section, is_list = True, found[1] in ("Args", "Attributes", "Raises")
        elif in_section and line.startswith("    "):
            item = line[4:]
            if item.startswith(" "):
                out[-1] += f" {item.strip()}"
            elif not is_list:
                out.append(item)
            else:
                out.append("* " + re.sub(r"^([\w, *]+?): ", lambda name: f"`{name[1]}`: ", item))
        else:
            in_section = in_section and not line.strip()
            out.append(line)
    text = "\n".join(out)
    text = re.sub(r" \(design: [^)]*\)", "", text)
    text = re.sub(r":\w+:`~?(?:[a-z_][\w]*\.)*([\w.]+)`", r"`\1`", text)
    return re.sub(r"\n{3,}", "\n\n", text.replace("``", "`")).strip()


def has_own_docstring(value: object) -> bool:
    """Whether it says something of its own: dataclasses and enums get a docstring made for them."""
    text = getattr(value, "__doc__", None)
    name = getattr(value, "__name__", "")
    return bool(text) and not str(text).startswith((f"{name}(", "Create a collection of name/value pairs", "An enumeration"))


# -- Python ----------------------------------------------------------------------------------------------------------------------


def signature_of(value: Any, name: str) -> str:
    """How it is called, in one line."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    parts: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts and not any(part.startswith("*") for part in parts):
            parts.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        annotation = "" if parameter.annotation in (parameter.empty, "Any") else f": {_shown(parameter.annotation)}"
        equals = " = " if annotation else "="
        parts.append(f"{stars}{parameter.name}{annotation}"
                     + ("" if parameter.default is parameter.empty else f"{equals}{_default(parameter.default)}"))
    returns = signature.return_annotation
    behind = "" if returns in (signature.empty, "None", None) or inspect.isclass(value) else f" -> {_shown(returns)}"
    return f"{name}({', '.join(parts)}){behind}"


def _shown(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _default(value: Any) -> str:
    text = str(value) if isinstance(value, enum.Enum) else repr(value)
    return "..." if text.startswith("<") else text


def members_of(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that kvtier defines: those of the class itself first, then of what it is built on."""
    seen: set[str] = set()
    for owner in kind.__mro__:
        if not owner.__module__.startswith("kvtier"):
            continue
        for name, member in vars(owner).items():
            if name.startswith("_") or name in seen or name in _NOT_TO_CALL:
                continue
            seen.add(name)
            if isinstance(member, (property, staticmethod, classmethod)) or inspect.isfunction(member):
                yield name, member


@functools.cache
def source_of(kind: type) -> str:
    """The text of a class."""
    return inspect.getsource(kind)


def enum_lines(kind: type[enum.Enum]) -> list[str]:
    """Members with what the code says behind them."""
    source = source_of(kind)
    lines = []
    for member in kind:
        found = re.search(rf"^ +{member.name} = .*?#:? (.+)$", source, flags=re.MULTILINE)
        lines.append(f"* `{member.name}`" + (f": {found[1].replace('``', '`')}" if found else ""))
    return lines


def field_lines(kind: Any) -> list[str]:
    """Fields of a dataclass or a named tuple with their types and what the code says behind or below them."""
    annotations: dict[str, Any] = {}
    source = ""
    for owner in reversed(kind.__mro__):
        if owner.__module__.startswith("kvtier"):
            annotations |= {name: kind for name, kind in vars(owner).get("__annotations__", {}).items() if not name.startswith("_")}
            source += source_of(owner)
    told = set(re.findall(r"\w+", " ".join(re.findall(r"^    ([\w, ]+): ", inspect.cleandoc(kind.__doc__ or ""), flags=re.MULTILINE))))
    lines = []
    for name, annotation in annotations.items():
        if name in told:  # under Attributes
            continue
        behind = re.search(rf"^    {name}: .*?  #:? (.+)$", source, flags=re.MULTILINE)
        below = re.search(rf'^    {name}: [^\n]*\n    """(.+?)"""', source, flags=re.MULTILINE | re.DOTALL)
        note = behind[1] if behind else " ".join(below[1].split()) if below else ""
        lines.append(f"* `{name}: {annotation}`" + (f": {note.replace('``', '`')}" if note else ""))
    return lines


def class_lines(kind: Any, depth: int) -> list[str]:
    """A class: what it is, its fields or members, its methods."""
    head = "#" * depth
    out = [f"{head} {kind.__name__}", ""]
    is_record = dataclasses.is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))
    if not issubclass(kind, enum.Enum) and not is_record and kind is not kvtier.TierConfig:
        out += [f"`{signature_of(kind, kind.__name__)}`", ""]
    if has_own_docstring(kind):
        out += [as_markdown(kind.__doc__), ""]
    own = vars(kind).get("__init__")
    if not is_record and own is not None and own.__doc__ and inspect.isfunction(own):
        out += [as_markdown(own.__doc__), ""]
    if kind is kvtier.TierConfig:
        out += ["Keywords are the keys of [Settings](../configuration.md#all-settings); in code also `clock`, and a `Faults` for `faults`.",
                ""]
    elif issubclass(kind, enum.Enum):
        out += [*enum_lines(kind), ""]
    elif is_record:
        out += [*field_lines(kind), ""]
    for name, member in members_of(kind):
        if kind is kvtier.TierConfig and isinstance(member, property) and not member.__doc__:
            continue  # sizes as numbers, for ourselves
        out += member_lines(name, member, kind, depth + 1)
    return out


def member_lines(name: str, member: Any, kind: type, depth: int) -> list[str]:
    """A method or property of a class."""
    head = "#" * depth
    if isinstance(member, property):
        returns = inspect.signature(member.fget).return_annotation if member.fget else ""
        shown = f"{name}: {returns}"
        text = member.__doc__
    else:
        function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
        shown = ("async " if inspect.iscoroutinefunction(function) else "") + signature_of(function, name)
        text = function.__doc__
    return [f"{head} {kind.__name__}.{name}", "", f"`{shown}`", "", *([as_markdown(text), ""] if text else [])]


def name_lines(module: str, name: str, depth: int) -> list[str]:
    """Whatever a name of a module stands for."""
    value = getattr(importlib.import_module(module), name)
    if inspect.isclass(value):
        return class_lines(value, depth)
    head = "#" * depth
    if callable(value):
        return [f"{head} {name}", "", f"`{signature_of(value, name)}`", "", as_markdown(value.__doc__), ""]
    return [f"{head} {name}", "", f"`{name} = {value!r}`", ""]


def of_modules(modules: dict[str, tuple[str, ...]], depth: int = 3) -> list[str]:
    """Names by the module they are imported from."""
    out: list[str] = []
    for module, names in modules.items():
        out += [f"{'#' * (depth - 1)} `{module}`", ""]
        for name in names:
            out += name_lines(module, name, depth)
    return out


def python_page() -> str:
    """Names of ``kvtier``."""
    named = {name for names in PUBLIC.values() for name in names}
    others = tuple(sorted(name for name in kvtier.__all__ if name not in named and not hasattr(kvtier.errors, name)))
    out = ["# Python", "", _MADE, "What `from kvtier import ...` gives. What its calls return, and other modules that the documentation",
           "uses, are on [a page of their own](returned.md); settings: [Settings](../configuration.md); errors: [Errors](errors.md).", ""]
    for theme, names in (PUBLIC | ({"More": others} if others else {})).items():
        out += [f"## {theme}", ""]
        for name in names:
            out += name_lines("kvtier", name, 3)
    return page(out)


def returned_page() -> str:
    """What calls give back, and helpers."""
    return page(["# What calls return, and helpers", "", _MADE, "By the module they are imported from.", "",
                 *of_modules(RETURNED | BESIDE)])


def kernels_page() -> str:
    """Names of ``kvtier.kernels``."""
    out = ["# Kernels", "", _MADE, "What `from kvtier.kernels import ...` gives. `use_reference(True)` takes the plain path of all.", ""]
    for name in sorted(kvtier.kernels.__all__, key=str.lower):
        out += name_lines("kvtier.kernels", name, 2)
    return page(out)


def attach_page() -> str:
    """The adapter for transformers and the serving loop."""
    return page(["# Adapters", "", _MADE, "For [transformers](../attach/transformers.md), and the serving loop for any model. vLLM's",
                 "adapter has no names to call: [its page](../attach/vllm.md) has its settings.", "", *of_modules(ADAPTERS)])


# -- command line ----------------------------------------------------------------------------------------------------------------


def commands_page() -> str:
    """Every command with its options."""
    out = ["# Commands", "", _MADE, "`--help` behind a command says the same. Exit codes are [with the errors](errors.md#exit-codes).", ""]
    for path, callback in sorted(_commands("kvtier", app)):
        out += [f"## {path}", "", as_markdown(callback.__doc__), ""]
        hints = get_type_hints(callback, include_extras=True)
        rows = [_option_row(parameter, hints[parameter.name]) for parameter in inspect.signature(callback).parameters.values()]
        if rows:
            out += ["| argument or option | default | meaning |", "|---|---|---|", *rows, ""]
    return page(out)


def _commands(path: str, program: typer.Typer) -> Iterator[tuple[str, Callable[..., Any]]]:
    """From what typer was told, which does not depend on its release."""
    for command in program.registered_commands:
        assert command.callback is not None
        yield f"{path} {command.name or command.callback.__name__.replace('_', '-')}", command.callback
    for group in program.registered_groups:
        assert group.typer_instance is not None
        yield from _commands(f"{path} {group.name or group.typer_instance.info.name}", group.typer_instance)


def _option_row(parameter: inspect.Parameter, annotation: Any) -> str:
    kind, info = get_args(annotation)[:2]
    kinds = [each for each in get_args(kind) or (kind,) if each is not type(None)]
    is_flag = kinds == [bool]
    choices = "|".join(member.value for member in kinds[0]) if inspect.isclass(kinds[0]) and issubclass(kinds[0], enum.Enum) else ""
    value = choices or info.metavar or {int: "NUMBER", float: "NUMBER", Path: "PATH"}.get(kinds[0], "TEXT")
    name = f"--{parameter.name.replace('_', '-')}"
    if isinstance(info, ArgumentInfo):
        shown = value
    elif declared := [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]:
        shown = ", ".join(declared) + ("" if is_flag else f" {value}")
    else:
        shown = f"{name} / --no-{name[2:]}" if is_flag else f"{name} {value}"
    default = parameter.default
    said = "required" if default is parameter.empty else "" if default is None or default is False else \
        "on" if default is True else f"`{getattr(default, 'value', default)}`" if default != "" else ""
    limits = ", ".join(f"{word} {limit:g}" for word, limit in (("at least", info.min), ("at most", info.max)) if limit is not None)
    more = [f"({limits})"] if limits else []
    if get_origin(kind) is list or any(get_origin(each) is list for each in kinds):
        more.append("Several times if need be." if "repeated" not in info.help and "or more" not in info.help else "")
    text = " ".join([info.help or "", *filter(None, more)])
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (f"`{shown}`", said, text)) + " |"


# -- errors ----------------------------------------------------------------------------------------------------------------------


def errors_page() -> str:
    """Errors and exit codes."""
    out = ["# Errors and exit codes", "", _MADE, as_markdown(kvtier.errors.__doc__), "", "## Errors", ""]
    for name, value in vars(kvtier.errors).items():
        if inspect.isclass(value) and issubclass(value, Exception):
            base = value.__mro__[1].__name__
            out += [f"### {name}", "", f"{'An' if base[0] == 'E' else 'A'} `{base}`. {as_markdown(value.__doc__)}", ""]
    out += ["## Exit codes", "", as_markdown(kvtier.exit_codes.__doc__), "", "| code | name | when |", "|---|---|---|"]
    source = inspect.getsource(kvtier.exit_codes)
    when = {"FINE": "what was asked for is done, and every check held",
            "CHECK_FAILED": "what was looked at did not hold, nobody answered, or it could not be carried out",
            "USED_WRONGLY": "bad options, settings, files; nothing was begun", "INTERRUPTED": "Ctrl-C; what was begun is tidied up",
            "TERMINATED": "SIGTERM; what was begun is tidied up"}
    for name, code in re.findall(r"^(\w+): Final = (\d+)", source, flags=re.MULTILINE):
        out.append(f"| {code} | `{name}` | {when[name]} |")
    return page(out)


def page(lines: list[str]) -> str:
    """One page: no run of empty lines, one at the end."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


PAGES: Final[dict[str, Callable[[], str]]] = {
    "python.md": python_page, "returned.md": returned_page, "kernels.md": kernels_page, "attach.md": attach_page,
    "command-line.md": commands_page, "errors.md": errors_page}


def main(arguments: list[str]) -> int:
    """Write the pages, or look whether they agree."""
    wrong = []
    for name, make in PAGES.items():
        file, wanted = FOLDER / name, make()
        if not file.exists() or file.read_text(encoding="utf-8") != wanted:
            wrong.append(name)
            if "--check" not in arguments:
                FOLDER.mkdir(exist_ok=True)
                file.write_text(wanted, encoding="utf-8")
    if "--check" in arguments and wrong:
        print(f"docs/reference: {', '.join(wrong)} and the code do not agree; run python scripts/reference.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
