"""TierConfig: precedence, sources, strictness. A setting is honoured or refused, never dropped."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.io.fault_text import parse_faults
from kvtier.io.faults import Faults
from kvtier.tiering.config import TierConfig
from kvtier.tiering.config_names import OTHER_NAMES
from kvtier.tiering.config_sources import KEYWORD_ONLY


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KVTIER_"):
            monkeypatch.delenv(name)


def test_the_constructor_of_the_design_page_works_word_for_word() -> None:
    config = TierConfig(primary="8 blocks", secondary="4 blocks", nvme="0 blocks",
                        max_batch_size=64, max_seq_len=8192, max_beam_width=1, chunk_size=None,
                        nvme_directory=None, secondary_offload_min_priority=35, nvme_offload_min_priority=35,
                        enable_block_reuse=True, enable_partial_reuse=True, copy_on_partial_reuse=True,
                        keep_backing=True, event_buffer_max_size=1024, gds="auto", policy="default",
                        request_directory_root=None, faults=None, clock=time.monotonic)
    assert config.primary == "8 blocks"
    assert set(config.sources.values()) <= {"keyword", "default"}


def test_the_defaults_are_those_of_the_design_page() -> None:
    config = TierConfig()
    assert (config.primary, config.secondary, config.nvme) == ("90%", "0 blocks", "0 blocks")
    assert (config.max_batch_size, config.max_seq_len, config.max_beam_width, config.chunk_size) == (64, 8192, 1, None)
    assert (config.secondary_offload_min_priority, config.nvme_offload_min_priority) == (35, 35)
    assert (config.event_buffer_max_size, config.gds, config.policy) == (1024, "auto", "default")
    assert config.clock is time.monotonic
    assert config.faults is None
    assert set(config.sources.values()) == {"default"}


def test_a_changed_copy_is_checked_as_keywords_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_SECONDARY", "2 blocks")
    config = TierConfig(primary="8 blocks", faults="nvme.read.eio")
    monkeypatch.setenv("KVTIER_SECONDARY", "3 blocks")
    for update, message in (({"primary": "8 apples"}, "apples"), ({"primry": "1 blocks"}, "primary"), ({"nvme": "1GiB"}, "wants a folder"),
                            ({"max_seq_len": "4"}, "must be a whole number")):
        with pytest.raises(ConfigError, match=message):
            config.model_copy(update=update)
    changed = config.model_copy(update={"max_seq_len": 4, "primary": "9 blocks"})
    assert (changed.primary, changed.secondary, changed.max_seq_len) == ("9 blocks", "2 blocks", 4)
    assert changed.faults is config.faults
    assert changed.sources == {**config.sources, "max_seq_len": "keyword"}
    assert config.model_copy() == config
    assert config.model_copy(deep=True).sources == config.sources


def test_keywords_win_over_environment_over_file_over_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "tier.yaml"
    file.write_text("primary: 1 blocks\nsecondary: 1 blocks\nmax_seq_len: 1\n")
    monkeypatch.setenv("KVTIER_PRIMARY", "2 blocks")
    monkeypatch.setenv("KVTIER_SECONDARY", "2 blocks")
    config = TierConfig.from_file(file, primary="3 blocks")
    assert (config.primary, config.secondary) == ("3 blocks", "2 blocks")
    assert (config.max_seq_len, config.max_batch_size) == (1, 64)
    assert config.sources["primary"] == "keyword"
    assert config.sources["secondary"] == "environment KVTIER_SECONDARY"
    assert config.sources["max_seq_len"] == f"file {file}"
    assert config.sources["max_batch_size"] == "default"


def test_kvtier_config_names_the_default_file_and_from_file_replaces_it(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text('primary = "1 blocks"\nmax_seq_len = 5\n')
    (tmp_path / "two.yml").write_text("primary: 2 blocks\n")
    monkeypatch.setenv("HERE", str(tmp_path))
    monkeypatch.setenv("KVTIER_CONFIG", "$HERE/one.toml")
    assert TierConfig().primary == "1 blocks"
    config = TierConfig.from_file(tmp_path / "two.yml")
    assert (config.primary, config.max_seq_len) == ("2 blocks", 8192)
    assert TierConfig().max_seq_len == 5


def test_every_kind_of_value_comes_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, text in {"PRIMARY": '["8 blocks", "4 blocks"]', "GROUP_SHARES": "[0.5, 1]", "MAX_BATCH_SIZE": "12",
                      "KEEP_BACKING": "false", "CHUNK_SIZE": "64", "WRITE_AHEAD_SHARE": "0.5", "GDS": "off",
                      "NVME_DIRECTORY": "~/kv"}.items():
        monkeypatch.setenv(f"KVTIER_{key}", text)
    config = TierConfig()
    assert config.primary == ["8 blocks", "4 blocks"]
    assert config.group_shares == [0.5, 1.0]
    assert (config.max_batch_size, config.keep_backing, config.chunk_size) == (12, False, 64)
    assert (config.write_ahead_share, config.gds) == (0.5, "off")
    assert config.nvme_directory == Path.home() / "kv"


def test_the_cap_on_tokens_comes_from_keyword_environment_or_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "tier.yaml"
    file.write_text("max_tokens: 1000\n")
    assert TierConfig().max_tokens is None
    assert TierConfig.from_file(file).max_tokens == 1000
    monkeypatch.setenv("KVTIER_MAX_TOKENS", "2000")
    assert TierConfig.from_file(file).max_tokens == 2000
    assert TierConfig(max_tokens=3000).max_tokens == 3000


def test_every_kind_of_value_comes_through_a_file(tmp_path: Path) -> None:
    yaml_file, toml_file = tmp_path / "a.yaml", tmp_path / "a.toml"
    yaml_file.write_text("primary: [8 blocks, 50%]\ngroup_shares: [0.5, 1]\ngds: off\nkeep_backing: false\n"
                         "nvme_directory: ~/kv\nmax_batch_size: 3\n")
    toml_file.write_text('primary = ["8 blocks", "50%"]\ngroup_shares = [0.5, 1]\ngds = "off"\nkeep_backing = false\n'
                         'nvme_directory = "~/kv"\nmax_batch_size = 3\n')
    from_yaml, from_toml = TierConfig.from_file(yaml_file), TierConfig.from_file(str(toml_file))
    assert [row[:2] for row in from_yaml.effective()] == [row[:2] for row in from_toml.effective()]
    assert from_yaml.gds == "off"  # a bare `off` in YAML is false


@pytest.mark.parametrize("key", ["primry", "max_seq_length", "nvme_dir"])
def test_an_unknown_keyword_names_the_nearest_key(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{key}' \(keyword\): unknown key; (did you mean|the keys are)"):
        TierConfig(**{key: "8 blocks"})  # type: ignore[arg-type]


def test_an_unknown_key_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_SECONDARY_OFFLOAD_MIN_PRIO", "50")
    with pytest.raises(ConfigError, match=r"environment KVTIER_SECONDARY.*mean 'secondary_offload_min_priority'"):
        TierConfig()


def test_an_unknown_key_in_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tier.toml"
    file.write_text('polcy = "lru"\n')
    with pytest.raises(ConfigError, match=r"'polcy' \(file .*tier.toml\): unknown key; did you mean 'policy'"):
        TierConfig.from_file(file)


def test_what_a_file_or_variable_may_not_set_is_no_hint_for_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "tier.yaml"
    for key in ("clok", "allreduce_mni", "x"):
        with pytest.raises(ConfigError, match=r"unknown key; (did you mean|the keys are)"):
            TierConfig(**{key: 1})  # type: ignore[arg-type]
        file.write_text(f"{key}: 1\n")
        with pytest.raises(ConfigError, match="unknown key") as in_file:
            TierConfig.from_file(file)
        monkeypatch.setenv(f"KVTIER_{key.upper()}", "1")
        with pytest.raises(ConfigError, match="unknown key") as in_environment:
            TierConfig()
        monkeypatch.delenv(f"KVTIER_{key.upper()}")
        for refused in (in_file, in_environment):
            hint = str(refused.value).partition("unknown key;")[2]
            assert not any(name in hint.replace("'", " ").replace(",", " ").split() for name in KEYWORD_ONLY)
    with pytest.raises(ConfigError, match="did you mean 'clock'"):
        TierConfig(clok=1)  # type: ignore[call-arg]


def test_a_merged_key_may_be_overruled(tmp_path: Path) -> None:
    (tmp_path / "tier.yaml").write_text("<<: {primary: 1 blocks, rank: 0}\nprimary: 2 blocks\n")
    assert TierConfig.from_file(tmp_path / "tier.yaml").primary == "2 blocks"


@pytest.mark.parametrize("key", ["secondary_offload_min_priority", "nvme_offload_min_priority"])
@pytest.mark.parametrize(("given", "number"), [("HIGH", 80), ("medium", 35), ("LOW", 10), ("7", 7)])
def test_priorities_have_names_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str, given: str, number: int) -> None:
    (tmp_path / "tier.yaml").write_text(f"{key}: {given}\n")
    assert getattr(TierConfig.from_file(tmp_path / "tier.yaml"), key) == number
    if not given.isdecimal():
        assert getattr(TierConfig(**{key: given}), key) == number  # type: ignore[arg-type]
    monkeypatch.setenv(f"KVTIER_{key.upper()}", given)
    assert getattr(TierConfig(), key) == number


@pytest.mark.parametrize("key", ["nvme_directory", "request_directory_root"])
def test_a_relative_folder_stays_where_it_was_when_it_was_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "tier.toml").write_text(f'{key} = "kv"\n')
    monkeypatch.chdir(tmp_path)
    config = TierConfig.from_file("elsewhere/tier.toml")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert getattr(config, key) == tmp_path / "kv"
    assert {row[0]: row[1] for row in config.effective()}[key] == str(tmp_path / "kv")


def test_a_relative_folder_without_a_working_directory_is_a_config_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigError, match=r"nvme_directory='kv': relative.*write the path out"):
        TierConfig(nvme_directory="kv")  # type: ignore[arg-type]


@pytest.mark.parametrize(("settings", "message"), [
    ({"primary": 8}, r'primary=8: a size needs a unit; write "8 blocks"'),
    ({"primary": "8"}, r'primary=\'8\': a size needs a unit; write "8 blocks"'),
    ({"primary": "0 blocks"}, "at least 1 block"),
    ({"primary": ["8 blocks", "0%"]}, "at least 1 block"),
    ({"primary": "-8 blocks"}, "must not be negative"),
    ({"primary": []}, "one per group"),
    ({"secondary": "-1GiB"}, "must not be negative"),
    ({"secondary": None}, "not a size"),
    ({"max_batch_size": 0}, r"max_batch_size=0 \(keyword\): must be at least 1"),
    ({"max_batch_size": "64"}, "must be a whole number"),
    ({"max_batch_size": True}, "must be a whole number"),
    ({"max_seq_len": 1.5}, "must be a whole number"),
    ({"max_seq_len": -1}, "must be at least 1"),
    ({"max_beam_width": 0}, "must be at least 1"),
    ({"chunk_size": 0}, "must be at least 1"),
    ({"max_tokens": 0}, r"max_tokens=0 \(keyword\): must be at least 1"),
    ({"max_tokens": 1.5}, "must be a whole number"),
    ({"secondary_offload_min_priority": 101}, "must be at most 100"),
    ({"nvme_offload_min_priority": -1}, "must be at least 0"),
    ({"keep_backing": 1}, "must be true or false"),
    ({"gds": "always"}, "'required', 'auto' or 'off'"),
    ({"gds": True}, 'must be "required", "auto" or "off".*write "auto"'),
    ({"nvme_offload_min_priority": "HIHG"}, r"from 0 to 100, or one of HIGH \(80\), MEDIUM \(35\), LOW \(10\)"),
    ({"policy": "fifo"}, "'default', 'lru', 'halving' or 'seen-first'"),
    ({"write_ahead_share": 1.5}, "must be at most 1"),
    ({"write_ahead_share": float("nan")}, "finite"),
    ({"group_shares": [0.5, -1]}, "between 0 and 1"),
    ({"group_shares": [0.5, float("nan")]}, "between 0 and 1"),
    ({"group_shares": [0, 0]}, "more than 0"),
    ({"group_shares": ["half"]}, r"group_shares\[0\]='half' \(keyword\): must be a number"),
    ({"group_shares": 0.5}, "must be a list of numbers"),
    ({"nvme_free_space_reserve": "10 blocks"}, "size in bytes"),
    ({"nvme_directory": 3}, "must be a Path"),
    ({"nvme_directory": ""}, "not a path"),
    ({"nvme_directory": "/data/$NOT_SET_ANYWHERE"}, r"\$NOT_SET_ANYWHERE is not set"),
    ({"nvme_directory": "${NOT_SET_ANYWHERE}/x"}, r"NOT_SET_ANYWHERE\} is not set"),
    ({"nvme_directory": "~nobody-of-this-name/x"}, "cannot be expanded"),
    ({"nvme": "1 blocks"}, "a folder .*and a secondary level.*set nvme_directory=.* and for example secondary="),
    ({"nvme": "1 blocks", "secondary": "1 blocks"}, r"wants a folder for its files; set nvme_directory=\.\.\.$"),
    ({"nvme": "1 blocks", "gds": "required"}, r"wants a folder for its files; set nvme_directory=\.\.\.$"),
    ({"nvme": "1 blocks", "nvme_directory": "x"}, "needs GPUDirect Storage; set"),
    ({"nvme": ["0 blocks", "1 blocks"], "secondary": ["1 blocks", "0 blocks"], "nvme_directory": "x"}, "needs GPUDirect"),
    ({"faults": 3}, "must be a Faults"),
    ({"clock": 3}, "must be a function"), ({"allreduce_min": 3}, "must be a function"),
])
def test_a_value_that_cannot_be_used_says_key_limit_and_remedy(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TierConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"max_tokens": 10**5000}, {"primary": [10**5000]}, {"group_shares": [10**5000]},
                                      {"write_ahead_share": -(10**5000)}, {"policy": 10**5000}, {"nvme_free_space_reserve": 10**5000}],
                         ids=lambda settings: next(iter(settings)))
def test_a_number_of_thousands_of_digits_is_a_config_error(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="a number of thousands of digits") as refused:
        TierConfig(**settings)  # type: ignore[arg-type]
    assert len(str(refused.value)) < 600


_PATHS = ("nvme_directory", "request_directory_root")


@pytest.mark.parametrize("text", ["9" * 5000 + "KB", "x" * 5000, "9" * 5000 + " blocks", "$" + "x" * 5000, "a.b.c=" + "9" * 5000],
                         ids=["bytes", "letters", "blocks", "variable", "fault"])
@pytest.mark.parametrize("key", [key for key in TierConfig.model_fields if key not in KEYWORD_ONLY] + ["host_cache_size"])
def test_a_value_that_fills_the_screen_is_shown_shortened(monkeypatch: pytest.MonkeyPatch, key: str, text: str) -> None:
    if key in _PATHS and "$" not in text:
        return  # any text may be a path
    monkeypatch.setenv(f"KVTIER_{key.upper()}", text)
    with pytest.raises(ConfigError, match=key if key not in OTHER_NAMES else OTHER_NAMES[key].key) as refused:
        TierConfig()
    assert len(str(refused.value)) < 900


def test_a_key_that_fills_the_screen_is_shown_shortened() -> None:
    with pytest.raises(ConfigError, match=r"'xxx.*\.\.\. \(keyword\): unknown key") as refused:
        TierConfig(**{"x" * 5000: "8 blocks"})  # type: ignore[arg-type]
    assert len(str(refused.value)) < 2000  # it names all keys that there are


def test_all_bad_values_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"max_seq_len=0 .*; gds='x'"):
        TierConfig(max_seq_len=0, gds="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(("key", "value"), [("max_batch_size", "twelve"), ("group_shares", "0.5,1"), ("primary", "8"),
                                            ("keep_backing", "maybe"), ("clock", "x"), ("faults", "1"),
                                            ("allreduce_min", "min")])
def test_a_bad_value_in_the_environment_is_a_config_error(
        monkeypatch: pytest.MonkeyPatch, key: str, value: str) -> None:
    monkeypatch.setenv(f"KVTIER_{key.upper()}", value)
    with pytest.raises(ConfigError, match=key):
        TierConfig()


@pytest.mark.parametrize(("key", "value", "said"), [
    ("primary", "12 giblets", "primary='12 giblets': unknown unit 'giblets'"),
    ("nvme", "-1GiB", "nvme='-1GiB': a size must not be negative"),
    ("nvme_free_space_reserve", "4 blocks", "must be a size in bytes"), ("gds_task_size", "3KiB", "multiple of 4096"),
    ("prefetch_bandwidth", "1GiB", "a rate is a size per second"), ("nvme_directory", "$NOT_SET_ANYWHERE", "is not set"),
    ("faults", "nvme.read.bit_flop=1", "did you mean 'bit_flip'"), ("host_cache_size", "much", "secondary='much': not a size"),
    ("free_gpu_memory_fraction", "much", "free_gpu_memory_fraction='much': must be a share")], ids=lambda text: str(text).split()[0])
def test_a_value_that_cannot_be_read_is_refused_with_the_file_or_variable_that_it_came_from(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str, value: str, said: str) -> None:
    file = tmp_path / "tier.toml"
    file.write_text(f'{key} = "{value}"\n')
    with pytest.raises(ConfigError) as refused:
        TierConfig.from_file(file)
    assert str(refused.value).startswith(f"file {file}")
    assert said in str(refused.value)
    monkeypatch.setenv(f"KVTIER_{key.upper()}", value)
    with pytest.raises(ConfigError) as refused:
        TierConfig.from_file(file)
    assert str(refused.value).startswith(f"environment KVTIER_{key.upper()}"), "the environment wins, so it is the one to correct"
    assert said in str(refused.value)


@pytest.mark.parametrize(("name", "text", "message"), [
    ("a.json", "{}", "use a .yaml, .yml or .toml file"), ("a.toml", "primary = ", "correct the file"),
    ("a.yaml", "primary: [", "correct the file"), ("a.yaml", "- 8 blocks", "keys and values"),
    ("a.yaml", "1: 8 blocks", "keys and values"), ("a.yaml", "clock: 3", "only be given as a keyword"),
    ("a.toml", 'allreduce_min = "min"', "only be given as a keyword"), ("a.toml", b"\xff\xfe", "correct the file"),
    ("a.yaml", "primary: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
    ("a.toml", "primary = " + "[" * 3000 + "]" * 3000, "nested too deeply"),
    ("a.toml", "primary." + "a." * 3000 + "a = 1", "inside each other"),
    ("a.yaml", "primary: 1 blocks\nrank: 0\nprimary: 2 blocks\n", "'primary' stands twice, on lines 1 and 3; correct the file"),
    ("a.yaml", '{"primary": "1 blocks",\nprimary: 2 blocks}', "'primary' stands twice, on lines 1 and 2"),
    ("a.yaml", "gds: on", r"file .*a\.yaml: gds=True: .*YAML reads on and yes as true"),
    ("a.yaml", "primary: &a [*a]", "inside each other"), ("a.yaml", "primary: [[8 blocks]]", "inside each other")])
def test_a_bad_file_is_a_config_error(tmp_path: Path, name: str, text: str | bytes, message: str) -> None:
    file = tmp_path / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message):
        TierConfig.from_file(file)


def test_a_deep_list_in_the_environment_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_GROUP_SHARES", "[" * 9000 + "]" * 9000)
    with pytest.raises(ConfigError, match="environment"):
        TierConfig()


def test_a_missing_file_is_a_config_error_also_as_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="config file /nowhere/settings: cannot be read"):
        TierConfig.from_file("/nowhere/settings")
    with pytest.raises(ConfigError, match="cannot be read"):
        TierConfig.from_file(tmp_path / "none.yaml")
    monkeypatch.setenv("KVTIER_CONFIG", str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="cannot be read"):
        TierConfig()


def test_an_empty_file_leaves_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    assert TierConfig.from_file(tmp_path / "empty.yaml") == TierConfig()


def test_a_config_cannot_be_changed_and_travels_between_processes() -> None:
    config = TierConfig(primary="8 blocks")
    with pytest.raises(ValueError, match="frozen"):
        config.primary = "9 blocks"
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert again.sources == config.sources


def test_nvme_with_folder_and_secondary_is_accepted(tmp_path: Path) -> None:
    config = TierConfig(secondary="4 blocks", nvme="16 blocks", nvme_directory=str(tmp_path))
    assert config.nvme_directory == tmp_path
    assert config.nvme_free_space_reserve_bytes == 1 << 30


def test_objects_are_taken_as_they_are() -> None:
    faults = Faults([])
    clock: Callable[[], float] = lambda: 7.0  # noqa: E731
    config = TierConfig(faults=faults, clock=clock, allreduce_min=sorted)
    assert config.faults is faults
    assert config.clock() == 7.0
    assert config.allreduce_min is sorted
    assert not {"clock", "allreduce_min"} & {key for key, _, _ in config.effective()}


@pytest.mark.parametrize("source", ["keyword", "environment", "yaml", "yaml list", "toml"])
def test_faults_are_written_the_same_way_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str) -> None:
    rules = "nvme.read.bit_flip=0.01, secondary.copy.delay=0.1:5ms*20"
    file = tmp_path / ("config.toml" if source == "toml" else "config.yaml")
    as_list = "[" + ", ".join(map(repr, rules.split(", "))) + "]"
    file.write_text({"yaml": f"faults: {rules}", "yaml list": f"faults: {as_list}", "toml": f"faults = {as_list}"}.get(source, ""))
    if source == "environment":
        monkeypatch.setenv("KVTIER_FAULTS", rules)
    config = TierConfig(faults=rules) if source == "keyword" else TierConfig.from_file(file)
    assert isinstance(config.faults, Faults)
    assert {key: value for key, value, _ in config.effective()}["faults"] == str(parse_faults(rules))
    assert config.sources["faults"].split()[0] == ("file" if file.read_text() else source)


def test_a_fault_nobody_knows_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'nvme\.read\.bit_flop': unknown kind 'bit_flop'; did you mean 'bit_flip'\?"):
        TierConfig(faults="nvme.read.bit_flop")  # type: ignore[arg-type]


def test_configuration_needs_no_torch() -> None:
    code = "import sys, kvtier.tiering.config, kvtier.pools.sizing; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_write_bandwidth_is_a_size_in_bytes_or_nothing() -> None:
    assert TierConfig().nvme_write_bytes_per_second is None
    assert TierConfig(nvme_write_bandwidth="1KiB/s").nvme_write_bytes_per_second == 1024.0
    for wrong in ("10 blocks", "50%", "0GiB/s", "1GiB"):
        with pytest.raises(ConfigError, match="nvme_write_bandwidth"):
            TierConfig(nvme_write_bandwidth=wrong)
