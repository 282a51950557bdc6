"""Settings: wrong ones are refused at once, the environment counts only when asked, and the token stays unseen."""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from rankmesh.config import GIB, KIB, MIB, Config, TlsFiles
from rankmesh.errors import ConfigError

SECRET = "s3cret-cluster-token"


@pytest.fixture
def pem(tmp_path: Path) -> dict[str, str]:
    for part in ("cert", "key", "ca"):
        (tmp_path / part).write_text("PEM")
    return {part: str(tmp_path / part) for part in ("cert", "key", "ca")}


def test_defaults_are_the_documented_ones() -> None:
    config = Config()
    assert (config.timeout, config.heartbeat_interval, config.heartbeat_timeout) == (30.0, 1.0, 5.0)
    assert (config.max_message_bytes, config.max_rpc_bytes) == (4 * GIB, 1 * GIB)
    assert (config.token, config.tls, config.allow_pickle) == ("", None, False)
    assert Config.from_env({}) == config


WRONG: list[tuple[dict[str, Any], str]] = [
    *(
        ({name: value}, rf"^Config\.{name} must be a positive number of seconds, not {re.escape(repr(value))}\.$")
        for name in ("timeout", "handshake_timeout", "close_timeout", "idle_timeout", "heartbeat_interval")
        for value in (0, -1.0, math.nan)
    ),
    ({"heartbeat_timeout": 1.9}, r"heartbeat_timeout \(1\.9 s\) must be at least twice heartbeat_interval \(1\.0 s\)"),
    ({"heartbeat_timeout": math.nan}, r"heartbeat_timeout \(nan s\) must be at least twice"),
    ({"heartbeat_interval": 3.0}, r"heartbeat_timeout \(5\.0 s\) must be at least twice heartbeat_interval \(3\.0 s\)"),
    ({"spin": -1e-6}, r"spin must be between 0 and 0\.01 seconds, not -1e-06\.$"),
    ({"spin": 1}, r"spin must be between 0 and 0\.01 seconds, not 1\.$"),
    ({"spin": math.nan}, r"spin must be between 0 and 0\.01 seconds, not nan\.$"),
    ({"connect_backoff": (0, 1)}, r"connect_backoff must be \(first, last\) with 0 < first <= last, not \(0, 1\)\.$"),
    ({"connect_backoff": (2.0, 1.0)}, r"connect_backoff must be \(first, last\)"),
    ({"eager_bytes": 0}, r"must hold two messages of eager_bytes .* Raise the first or lower the second\.$"),
    ({"eager_bytes": 1 * MIB}, r"must hold two messages of eager_bytes .* Raise the first or lower the second\.$"),
    ({"lane_credit_bytes": 17 * MIB}, r"lane_credit_bytes must not exceed peer_credit_bytes\.$"),
    *(
        ({name: value}, rf"^Config\.{name} must be at least 1, not {value}\.$")
        for name in ("max_message_bytes", "max_rpc_bytes", "send_queue_bytes", "rpc_inflight_bytes", "max_handshakes")
        for value in (0, -5)
    ),
]


@pytest.mark.parametrize("changes, message", WRONG, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_setting_that_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(**changes)
    with pytest.raises(ConfigError, match=message):
        Config().override(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"heartbeat_interval": 0.1, "heartbeat_timeout": 0.2},
        {"spin": 0},
        {"spin": 0.01},
        {"connect_backoff": (0.5, 0.5)},
        {"eager_bytes": 511 * KIB},
        {"lane_credit_bytes": 16 * MIB},
        {"max_handshakes": 1},
        {"timeout": math.inf},
    ],
    ids=str,
)
def test_settings_at_their_bounds_work(changes: dict[str, Any]) -> None:
    config = Config(**changes)
    assert {name: getattr(config, name) for name in changes} == changes


def test_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().timeout = 1  # type: ignore[misc]  # this is what must not work
    assert hash(Config(timeout=3)) == hash(Config(timeout=3))


def test_override_changes_what_is_given_and_leaves_none_alone() -> None:
    base = Config(timeout=3, token=SECRET)
    changed = base.override(timeout=None, interface="eth*", spin=0)
    assert (changed.timeout, changed.interface, changed.spin, changed.token) == (3, "eth*", 0, SECRET)
    assert (base.interface, base.spin) == ("", Config().spin)


def test_override_refuses_unknown_names() -> None:
    with pytest.raises(ConfigError, match=r"^Config has no field tiemout, tokne\. See rankmesh\.Config for the list"):
        Config().override(tokne="x", tiemout=3)


ENVIRONMENT: list[tuple[str, str, Any]] = [
    ("TOKEN", SECRET, SECRET),
    ("TIMEOUT", "2.5", 2.5),
    ("HEARTBEAT_TIMEOUT", "60", 60.0),
    ("MAX_MESSAGE_BYTES", "1048576", 1 * MIB),
    ("MAX_HANDSHAKES", "9", 9),
    ("SPIN", "0", 0.0),
    ("INTERFACE", "eth0,^docker*", "eth0,^docker*"),
    ("ALLOW_PICKLE", "1", True),
    ("ALLOW_PICKLE", "true", True),
    ("ALLOW_PICKLE", "0", False),
    ("ALLOW_PICKLE", "False", False),
]


@pytest.mark.parametrize("name, text, value", ENVIRONMENT)
def test_variable_sets_its_field(name: str, text: str, value: Any) -> None:
    config = Config.from_env({f"RANKMESH_{name}": text, "TIMEOUT": "99", "rankmesh_spin": "7"})
    assert config == Config(**{name.lower(): value})
    assert type(getattr(config, name.lower())) is type(value)


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("TIMEOUT", "soon", r"^RANKMESH_TIMEOUT must be a float, not 'soon'\.$"),
        ("TIMEOUT", "0", r"^Config\.timeout must be a positive number of seconds, not 0\.0\.$"),
        ("MAX_HANDSHAKES", "1.5", r"^RANKMESH_MAX_HANDSHAKES must be a int, not '1\.5'\.$"),
        ("ALLOW_PICKLE", "yes", r"^RANKMESH_ALLOW_PICKLE must be 0 or 1, not 'yes'\.$"),
    ],
)
def test_variable_that_cannot_be_read_is_named(name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.from_env({f"RANKMESH_{name}": text})


def test_environment_counts_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKMESH_TIMEOUT", "7")
    assert Config().timeout == 30.0
    assert Config.from_env().timeout == 7.0
    assert Config.from_env({}).timeout == 30.0


def test_tls_files_come_from_the_environment_together(pem: dict[str, str]) -> None:
    variables = {f"RANKMESH_TLS_{part.upper()}": path for part, path in pem.items()}
    assert Config.from_env(variables).tls == TlsFiles(**pem)
    del variables["RANKMESH_TLS_KEY"]
    with pytest.raises(ConfigError, match=r"TLS needs all of cert, key and ca: set RANKMESH_TLS_KEY too\.$"):
        Config.from_env(variables)


@pytest.mark.parametrize("part", ["cert", "key", "ca"])
def test_missing_tls_file_is_named(part: str, pem: dict[str, str]) -> None:
    missing = pem | {part: "/nowhere/node.pem"}
    message = rf"^TLS {part} file '/nowhere/node\.pem' does not exist\. `rankmesh certs` makes a set\.$"
    with pytest.raises(ConfigError, match=message):
        TlsFiles(**missing)


def test_token_is_never_shown() -> None:
    config = Config(token=SECRET, timeout=3)
    assert repr(config) == "Config(token=…, timeout=3)"
    for text in (str(config), f"{config}", repr([config]), repr(config.override(spin=0)), f"{config!a}"):
        assert SECRET not in text
    with pytest.raises(ConfigError) as caught:
        config.override(timeout=-1)
    assert SECRET not in str(caught.value)


def test_repr_shows_what_differs_from_the_defaults() -> None:
    assert repr(Config()) == "Config()"
    assert repr(Config(spin=0, interface="10.0.0.0/8")) == "Config(spin=0, interface='10.0.0.0/8')"


def test_config_survives_pickling_to_a_rank() -> None:
    config = Config(token=SECRET, timeout=3)
    assert pickle.loads(pickle.dumps(config)) == config


def test_what_a_full_queue_does_is_one_of_two() -> None:
    assert Config(rpc_when_full="wait").rpc_when_full == "wait"
    with pytest.raises(ConfigError, match=r"rpc_when_full must be 'busy' or 'wait', not 'never'"):
        Config(rpc_when_full="never")
