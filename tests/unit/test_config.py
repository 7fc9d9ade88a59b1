"""Settings: what is accepted, what is refused in which words, where a value comes from, and the documentation."""

from __future__ import annotations

import dataclasses
import logging
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcached_dist import config as config_module
from kvcached_dist.config import PRESETS, SETTINGS, Config, enabled, parse_bytes
from kvcached_dist.coord.core.errors import ConfigError
from kvcached_dist.settings_doc import rewrite

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "settings.md"


@pytest.fixture(autouse=True)
def fresh_warnings() -> Iterator[None]:
    config_module._warn_once.cache_clear()
    yield
    config_module._warn_once.cache_clear()


def test_defaults_of_an_engine() -> None:
    config = Config.from_env({})
    assert config == Config()
    assert not config.enabled
    assert (config.beat_s, config.growth_deadline_s, config.lease_s) == (1, 2, 30)
    assert (config.min_reserved_pages, config.max_reserved_pages) == (5, 10)
    assert (config.gpu_utilization, config.max_cached_tokens, config.ipc_name) == (0.95, 16_000, "")
    assert (config.state_dir, config.physical_growth_lock_dir) == ("/dev/shm", "/tmp")
    assert (config.map_retries, config.on_rank_lost, config.physical_limit_bytes) == (2, "fail", 0)


@pytest.mark.parametrize(
    ("name", "times"), [("engine", (1, 2, 30)), ("replay", (0.25, 2, 5)), ("tests", (0.05, 0.3, 1))]
)
def test_presets_hold_the_times_of_the_design(name: config_module.PresetName, times: tuple[float, ...]) -> None:
    config = Config.preset(name)
    assert (config.beat_s, config.growth_deadline_s, config.lease_s) == times


@pytest.mark.parametrize(
    ("name", "text", "attribute", "value"),
    [
        ("ENABLE_KVCACHED", "TRUE", "enabled", True),
        ("ENABLE_KVCACHED", "", "enabled", False),
        ("KVCACHED_REQUIRE", "on", "require", True),
        ("KVCACHED_SGLANG_DSV4_KV_POOL_BRIDGE", "0", "sglang_dsv4_kv_pool_bridge", False),
        ("KVCACHED_PAGE_SIZE_MB", "64", "page_size_mb", 64),
        ("KVCACHED_GPU_UTILIZATION", "1.0", "gpu_utilization", 1.0),
        ("KVCACHED_IPC_NAME", "my-engine_2", "ipc_name", "my-engine_2"),
        ("KVCACHED_IPC_TIMEOUT", "7.5", "ipc_timeout_s", 7.5),
        ("KVCACHED_LOG_LEVEL", "debug", "log_level", "DEBUG"),
        ("KVCACHED_MAX_CACHED_TOKENS", "-1", "max_cached_tokens", -1),
        ("KVCACHED_DIST_HOST_GRANULE_BYTES", "64K", "host_granule_bytes", 65536),
        ("KVCACHED_DIST_HOST_CAPACITY_BYTES", "1.5GiB", "host_capacity_bytes", 3 << 29),
        ("KVCACHED_DIST_ON_RANK_LOST", "rejoin", "on_rank_lost", "rejoin"),
        ("KVCACHED_DIST_FAULT_JOURNAL", "", "fault_journal", ""),
    ],
)
def test_good_values(name: str, text: str, attribute: str, value: object) -> None:
    assert getattr(Config.from_env({name: text}), attribute) == value


BAD_VALUES = [
    *[("KVCACHED_GPU_UTILIZATION", text) for text in ("nan", "inf", "0", "-1", "1.5", "abc", "")],  # R12 b
    ("ENABLE_KVCACHED", "maybe"),
    ("KVCACHED_AUTOPATCH", ""),
    ("KVCACHED_CONTIGUOUS_LAYOUT", "sideways"),
    *[("KVCACHED_PAGE_SIZE_MB", text) for text in ("0", "3", "-2", "2.0", "2MB")],
    ("KVCACHED_MIN_RESERVED_PAGES", "-1"),
    ("KVCACHED_MIN_RESERVED_PAGES", "11"),
    ("KVCACHED_MAX_RESERVED_PAGES", "4"),
    ("KVCACHED_MAX_RESERVED_PAGES", "9" * 30),
    *[("KVCACHED_IPC_NAME", text) for text in ("a/b", "../x", "a b", "a.b", "x" * 65, "zwölf", "a\nb")],
    *[("KVCACHED_IPC_TIMEOUT", text) for text in ("0", "-1", "inf", "1e9")],
    ("KVCACHED_LOG_LEVEL", "LOUD"),
    ("KVCACHED_PHYSICAL_GROWTH_LOCK_DIR", "locks"),
    ("KVCACHED_PHYSICAL_GROWTH_LOCK_DIR", ""),
    ("KVCACHED_MAX_CACHED_TOKENS", "lots"),
    ("KVCACHED_DIST_BEAT_S", "0"),
    ("KVCACHED_DIST_BEAT_S", "15"),
    ("KVCACHED_DIST_LEASE_S", "2"),
    ("KVCACHED_DIST_GROWTH_DEADLINE_S", "30"),
    ("KVCACHED_DIST_DRAIN_DEADLINE_S", "never"),
    ("KVCACHED_DIST_PARKED_S", "0"),
    ("KVCACHED_DIST_COMPACTION", "when idle"),
    ("KVCACHED_DIST_START_TIMEOUT_S", "1 minute"),
    ("KVCACHED_DIST_MAP_RETRIES", "17"),
    ("KVCACHED_DIST_RUN_PAGES_MIN", "0"),
    ("KVCACHED_DIST_RUN_PAGES_MIN", "65"),
    ("KVCACHED_DIST_RUN_PAGES_MAX", "0"),
    ("KVCACHED_DIST_RUN_SHARE", "-1"),
    *[("KVCACHED_DIST_HOST_GRANULE_BYTES", text) for text in ("3K", "2048", "0.5", "1P")],
    ("KVCACHED_DIST_HOST_CAPACITY_BYTES", "1048576"),
    ("KVCACHED_DIST_PHYSICAL_LIMIT_BYTES", "-1"),
    ("KVCACHED_DIST_STATE_DIR", "shm"),
    ("KVCACHED_DIST_SEED", "0x10"),
    ("KVCACHED_DIST_ON_RANK_LOST", "retry"),
    ("KVCACHED_DIST_FAULT_JOURNAL", "here"),
    ("KVCACHED_DIST_HOST_CARD_FILE", "here"),
]


@pytest.mark.parametrize(("name", "text"), BAD_VALUES)
def test_bad_values_are_refused_in_one_line_with_a_value_that_works(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_env({name: text})
    line = str(caught.value)
    assert line.isprintable()
    assert name in line
    escaped = text.encode("unicode_escape").decode()
    assert f"={escaped}" in line
    # The example is a promise: with it, the same environment is accepted.
    setting, example = re.search(r"for example (\w+)=(\S+)$", line).groups()  # type: ignore[union-attr]
    Config.from_env({name: text, setting: example})


def test_every_setting_has_a_bad_value_above() -> None:
    never_bad = {"KVCACHED_REQUIRE", "KVCACHED_SGLANG_DSV4_KV_POOL_BRIDGE", "KVCACHED_SGLANG_DSV4_RUNTIME_RESERVATION",
                 "KVCACHED_DIST_FAULTS"}  # fmt: skip
    assert {setting.name for setting in SETTINGS.values()} - {name for name, _ in BAD_VALUES} == never_bad


def test_direct_construction_and_overrides_are_checked_alike() -> None:
    for make in (Config, Config().override, lambda **values: Config.from_env({}, **values)):
        with pytest.raises(ConfigError, match="KVCACHED_DIST_LEASE_S=0"):
            make(lease_s=0)
        with pytest.raises(ConfigError, match="KVCACHED_MIN_RESERVED_PAGES=True"):
            make(min_reserved_pages=True)
    with pytest.raises(ConfigError, match="did you mean lease_s"):
        Config.from_env({}, lease=5)
    with pytest.raises(ConfigError, match="preset=fast"):
        Config.preset("fast")  # type: ignore[arg-type]


def test_an_argument_wins_over_the_environment_and_that_over_the_preset() -> None:
    environ = {"KVCACHED_DIST_LEASE_S": "7", "KVCACHED_DIST_BEAT_S": "0.5"}
    config = Config.from_env(environ, preset="replay", lease_s=9)
    assert (config.lease_s, config.beat_s, config.growth_deadline_s) == (9, 0.5, 2)
    lines = config.describe().splitlines()
    assert "KVCACHED_DIST_LEASE_S=9 s (argument)" in lines
    assert "KVCACHED_DIST_BEAT_S=0.5 s (environment)" in lines
    assert "KVCACHED_DIST_GROWTH_DEADLINE_S=2 s (preset replay)" in lines
    assert "KVCACHED_IPC_NAME=(not set) (default)" in lines
    assert len(lines) == len(SETTINGS)
    assert len(config.describe(changed_only=True).splitlines()) < len(lines)
    assert "KVCACHED_DIST_SEED=4 (argument)" in config.override(seed=4).describe()


def test_a_variable_set_after_import_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    # R21: read at init, not at import
    monkeypatch.setenv("KVCACHED_IPC_NAME", "late")
    assert Config.from_env().ipc_name == "late"


def test_a_config_is_frozen_hashable_and_travels_to_other_processes() -> None:
    config = Config.preset("tests", seed=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 4  # type: ignore[misc]
    copy = pickle.loads(pickle.dumps(config))
    assert (copy, hash(copy), copy.describe()) == (config, hash(config), config.describe())


def test_the_world_digest_covers_what_all_ranks_must_share_and_nothing_else() -> None:
    base = Config()
    other_values: dict[str, object] = {
        "enabled": True, "autopatch": False, "require": True, "sglang_dsv4_kv_pool_bridge": False,
        "sglang_dsv4_runtime_reservation": False, "page_size_mb": 4, "contiguous_layout": True,
        "gpu_utilization": 0.5, "min_reserved_pages": 1, "max_reserved_pages": 20, "ipc_name": "x",
        "ipc_timeout_s": 5, "log_level": "ERROR", "physical_growth_lock_dir": "/var/lock",
        "max_cached_tokens": 0, "beat_s": 2, "growth_deadline_s": 3, "lease_s": 31, "drain_deadline_s": 3,
        "parked_s": 3, "compaction": False, "start_timeout_s": 9, "map_retries": 0, "run_pages_min": 2,
        "run_pages_max": 2, "run_share": 0,
        "host_granule_bytes": 4096, "host_capacity_bytes": 1 << 30, "physical_limit_bytes": 1 << 30,
        "state_dir": "/tmp", "seed": 1, "on_rank_lost": "rejoin", "fault_journal": "/tmp/f",
        "host_card_file": "/tmp/card", "faults": "rank=0,op=create",
    }  # fmt: skip
    assert other_values.keys() == SETTINGS.keys()
    for attribute, value in other_values.items():
        changed = base.override(**{attribute: value})
        assert (changed.world_digest() != base.world_digest()) == SETTINGS[attribute].world, attribute
    assert base.world_digest() == Config.from_env({"KVCACHED_DIST_LEASE_S": "30"}).world_digest()


def test_the_old_layout_setting_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert Config.from_env({"KVCACHED_CONTIGUOUS_LAYOUT": "false"}).contiguous_layout is False
    assert [record.message for record in caplog.records] == [
        "KVCACHED_CONTIGUOUS_LAYOUT has no effect: buffers always have the engine's own layout; unset it"
    ]


def test_a_misspelt_setting_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Config.from_env({"KVCACHED_DIST_LEASE": "3", "HOME": "/root"})
    assert "KVCACHED_DIST_LEASE is set" in caplog.text
    assert "did you mean KVCACHED_DIST_LEASE_S?" in caplog.text
    assert "HOME" not in caplog.text


def test_enabled_reads_nothing_but_its_own_variable() -> None:
    broken = {"KVCACHED_GPU_UTILIZATION": "nan"}
    assert not enabled(broken)
    assert not enabled({**broken, "ENABLE_KVCACHED": "false"})
    assert enabled({"ENABLE_KVCACHED": "1"})
    with pytest.raises(ConfigError, match="ENABLE_KVCACHED=perhaps"):
        enabled({"ENABLE_KVCACHED": "perhaps"})


def test_sizes_of_the_command_line() -> None:
    assert [parse_bytes("--capacity", text) for text in ("7", "512M", "2G", "1.5k", "1TiB", "3B")] == [
        7, 512 << 20, 2 << 30, 1536, 1 << 40, 3,
    ]  # fmt: skip
    for text in ("", "G", "-1", "1e9", "0.3", "2 GB of it", "9" * 25):
        with pytest.raises(ConfigError, match="--capacity="):
            parse_bytes("--capacity", text)


def test_the_documentation_agrees_with_the_settings() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == rewrite(text), "run: python -m kvcached_dist.settings_doc docs/settings.md"
    for setting in SETTINGS.values():
        assert f"| `{setting.name}` |" in text
    for preset in PRESETS:
        assert preset in text


def test_a_document_without_markers_is_not_rewritten() -> None:
    with pytest.raises(ValueError, match="settings: begin"):
        rewrite("# Settings\n")
