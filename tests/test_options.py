"""`GroupOptions`: precedence over environment variables, refused values, and sources of the job key."""

import logging
import math
import os
from datetime import timedelta

import pytest

from aiocoll.options import GroupOptions, job_key, read_key_file, seconds

KEY = "0123456789abcdef"
DEFAULTS = {
    "transport": "auto",
    "interface": None,
    "bind": None,
    "port_range": None,
    "advertise": None,
    "connections": None,
    "single_copy": True,
    "encryption": "auto",
    "job_key": None,
    "spin_us": 50.0,
    "warn_after": 30.0,
    "debug": "off",
    "allow_pickle": False,
    "host_id": None,
    "tuning": None,
    "dump_dir": None,
    "stats": True,
    "top_dir": None,
}
ELSEWHERE = ("PORT", "STORE", "SINGLETON", "JOB_KEY", "JOB_KEY_FD", "JOB_KEY_FILE", "TEST_LOOP")


def test_options_have_the_documented_defaults() -> None:
    options = GroupOptions.resolve(None, {"PATH": "/bin"})
    assert {name: getattr(options, name) for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize(
    ("name", "text", "value", "other"),
    [
        ("transport", "tcp", "tcp", "unix"),
        ("interface", "eth0", "eth0", "lo"),
        ("bind", "any", "any", "10.0.0.1"),
        ("port_range", "31000-31009", (31000, 31009), (1, 65535)),
        ("port_range", "31000", (31000, 31000), None),
        ("advertise", "203.0.113.5", "203.0.113.5", "::1"),
        ("connections", "1", 1, None),
        ("single_copy", "0", False, True),
        ("encryption", "none", "none", "tls"),
        ("spin_us", "0", 0.0, 7),
        ("warn_after", "inf", math.inf, 1.5),
        ("allow_pickle", "1", True, False),
        ("allow_pickle", "No", False, True),
        ("host_id", "a", "a", "b"),
        ("tuning", "a.json", "a.json", "b.json"),
        ("dump_dir", "dumps", "dumps", "others"),
        ("top_dir", "top", "top", "others"),
        ("stats", "0", False, True),
        ("stats", "yes", True, False),
    ],
)
def test_explicit_option_takes_precedence_over_environment_and_default(
    name: str, text: str, value: object, other: object
) -> None:
    environ = {f"AIOCOLL_{name.upper()}": text}
    assert getattr(GroupOptions.resolve(None, environ), name) == value
    assert getattr(GroupOptions.resolve(GroupOptions(), environ), name) == value
    assert getattr(GroupOptions.resolve(GroupOptions(**{name: other}), environ), name) == other


def test_option_with_explicit_none_takes_precedence_over_the_environment() -> None:
    assert GroupOptions.resolve(GroupOptions(interface=None), {"AIOCOLL_INTERFACE": "eth0"}).interface is None


def test_resolved_options_are_not_changed_by_a_second_resolve() -> None:
    options = GroupOptions.resolve(GroupOptions(job_key=KEY), {"AIOCOLL_TRANSPORT": "tcp"})
    assert GroupOptions.resolve(options, {}) == options
    assert options.job_key == KEY


@pytest.mark.parametrize("name", ELSEWHERE)
def test_aiocoll_variables_that_name_no_group_option_are_ignored(name: str) -> None:
    environ = {f"AIOCOLL_{name}": "x"}
    assert GroupOptions.resolve(None, environ) == GroupOptions.resolve(None, {})
    assert environ == {f"AIOCOLL_{name}": "x"}


def test_option_values_in_the_environment_can_be_upper_case() -> None:
    assert GroupOptions.resolve(None, {"AIOCOLL_DEBUG": "DETAIL", "AIOCOLL_TRANSPORT": "Shm"}) == GroupOptions.resolve(
        GroupOptions(debug="detail", transport="shm"), {}
    )


@pytest.mark.parametrize(
    ("variable", "text", "allowed"),
    [
        ("AIOCOLL_TRANSPORT", "infiniband", "'auto', 'tcp', 'unix'"),
        ("AIOCOLL_ENCRYPTION", "rot13", "'auto', 'none', 'tls'"),
        ("AIOCOLL_DEBUG", "on", "'off', 'detail'"),
        ("AIOCOLL_SPIN_US", "fast", "must be a number"),
        ("AIOCOLL_SPIN_US", "-1", ">= 0"),
        ("AIOCOLL_SPIN_US", "inf", "must be finite"),
        ("AIOCOLL_WARN_AFTER", "nan", ">= 0"),
        ("AIOCOLL_ALLOW_PICKLE", "perhaps", "1, true, yes, 0, false, no"),
        ("AIOCOLL_INTERFACE", "", "must not be empty"),
        ("AIOCOLL_PORT_RANGE", "many", "must be two ports from 1 to 65535, the first and the last, like 31000-31099"),
        ("AIOCOLL_PORT_RANGE", "0-9", "must be two ports from 1 to 65535"),
        ("AIOCOLL_PORT_RANGE", "9-8", "must be two ports from 1 to 65535"),
        ("AIOCOLL_PORT_RANGE", "9-65536", "must be two ports from 1 to 65535"),
        ("AIOCOLL_ADVERTISE", "node-1", "must be an IPv4 or IPv6 address"),
        ("AIOCOLL_ADVERTISE", "", "must not be empty"),
        ("AIOCOLL_TRANSPROT", "tcp", "unknown variable; use one of .*AIOCOLL_TRANSPORT"),
    ],
)
def test_error_names_an_environment_variable_with_an_unusable_value(variable: str, text: str, allowed: str) -> None:
    with pytest.raises(ValueError, match=allowed) as caught:
        GroupOptions.resolve(None, {variable: text})
    assert str(caught.value).startswith(f"{variable}=")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"transport": "udp"}, ValueError, "transport='udp': must be one of"),
        ({"spin_us": "50"}, TypeError, "spin_us must be a number, not str"),
        ({"spin_us": True}, TypeError, "spin_us must be a number, not bool"),
        ({"warn_after": -1}, ValueError, "warn_after=-1: must be >= 0"),
        ({"allow_pickle": 1}, TypeError, "allow_pickle must be True or False, not 1"),
        ({"interface": 3}, TypeError, "interface must be a str or None, not int"),
        ({"host_id": ""}, ValueError, "host_id='': must not be empty"),
        ({"port_range": 31000}, TypeError, "port_range must be a tuple of two ports"),
        ({"port_range": (1, 2, 3)}, TypeError, "port_range must be a tuple of two ports"),
        ({"port_range": (True, 2)}, TypeError, "port_range must be a tuple of two ports"),
        ({"port_range": (5, 4)}, ValueError, r"port_range=\(5, 4\): must be two ports from 1 to 65535"),
        ({"advertise": 5}, TypeError, "advertise must be a str or None, not int"),
        ({"advertise": "far"}, ValueError, "advertise='far': must be an IPv4 or IPv6 address"),
        ({"connections": 0}, ValueError, "connections=0: must be at least 1"),
        ({"connections": True}, TypeError, "connections must be an int or None, not bool"),
        ({"connections": 1.0}, TypeError, "connections must be an int or None, not float"),
        ({"tuning": 1}, TypeError, "tuning must be a str or None, not int"),
        ({"job_key": 5}, TypeError, "job_key must be bytes or str, not int"),
        ({"job_key": "short"}, ValueError, "job key has 5 bytes, but at least 16 are required; make a key with"),
    ],
)
def test_error_names_an_option_with_an_unusable_value(given: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        GroupOptions(**given)


@pytest.mark.parametrize("port_range", [None, (31000, 31001)])
def test_advertised_port_requires_a_single_port(port_range: tuple[int, int] | None) -> None:
    said = r"advertise='10\.0\.0\.1:40000' names a port, but port_range=.* set port_range=\(40000, 40000\), or the "
    options = GroupOptions(advertise="10.0.0.1:40000", port_range=port_range)
    with pytest.raises(ValueError, match=said):
        GroupOptions.resolve(options, {})
    with pytest.raises(ValueError, match=said):
        GroupOptions.resolve(GroupOptions(port_range=port_range), {"AIOCOLL_ADVERTISE": "10.0.0.1:40000"})
    known = GroupOptions(advertise="10.0.0.1:40000", port_range=(31000, 31000))
    assert GroupOptions.resolve(known, {}).port_range == (31000, 31000)


def test_repr_of_options_shows_given_options_but_never_the_job_key() -> None:
    options = GroupOptions(transport="tcp", job_key=KEY)
    assert repr(options) == "GroupOptions(transport='tcp', job_key=<hidden>)"
    assert KEY not in repr(GroupOptions.resolve(options, {}))


def test_error_about_an_invalid_job_key_does_not_show_the_key() -> None:
    with pytest.raises(ValueError, match="job_key") as caught:
        GroupOptions(job_key="secret")
    assert "'secret'" not in str(caught.value)


def test_explicit_job_key_takes_precedence_and_is_encoded_as_utf8() -> None:
    environ = {"AIOCOLL_JOB_KEY": KEY}
    assert job_key(environ, "ä" * 8) == b"\xc3\xa4" * 8
    assert job_key(environ, b"\xff" * 16) == b"\xff" * 16
    assert environ == {"AIOCOLL_JOB_KEY": KEY}


def test_job_key_is_none_if_no_source_provides_a_key() -> None:
    assert job_key({}, None) is None


def test_job_key_from_the_environment_is_removed_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"AIOCOLL_JOB_KEY": KEY}
    with caplog.at_level(logging.WARNING, "aiocoll"):
        assert job_key(environ, None) == KEY.encode()
    assert environ == {}
    assert "AIOCOLL_JOB_KEY was removed from the environment" in caplog.text
    assert KEY not in caplog.text


def test_job_key_is_read_from_an_inherited_pipe() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"\n\0" * 16)
    os.close(writer)
    environ = {"AIOCOLL_JOB_KEY_FD": str(reader), "AIOCOLL_JOB_KEY": KEY}
    assert job_key(environ, None) == b"\n\0" * 16
    assert "AIOCOLL_JOB_KEY_FD" not in environ
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reader)


def test_job_key_pipe_that_another_process_has_read_is_refused() -> None:
    reader, writer = os.pipe()
    os.close(writer)
    with pytest.raises(ValueError, match=f"AIOCOLL_JOB_KEY_FD={reader}: another process has read the key; only the"):
        job_key({"AIOCOLL_JOB_KEY_FD": str(reader)}, None)


@pytest.mark.parametrize("text", ["x", "-1", "999999", "9" * 30])
def test_job_key_descriptor_that_was_not_inherited_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"AIOCOLL_JOB_KEY_FD={text}: not a descriptor that this process inherited"):
        job_key({"AIOCOLL_JOB_KEY_FD": text}, None)


def test_job_key_descriptor_of_a_file_that_is_no_pipe_is_refused(tmp_path) -> None:
    (tmp_path / "diary").write_text("dear diary, " * 4)
    with open(tmp_path / "diary", "rb") as diary:
        with pytest.raises(ValueError, match="not a pipe"):
            job_key({"AIOCOLL_JOB_KEY_FD": str(diary.fileno())}, None)
        assert diary.read(4) == b"dear"


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_job_key_is_read_from_a_file(tmp_path, end: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(f"{KEY}{end}".encode())
    path.chmod(0o600)
    environ = {"AIOCOLL_JOB_KEY_FILE": str(path)}
    assert job_key(environ, None) == KEY.encode()
    assert environ == {"AIOCOLL_JOB_KEY_FILE": str(path)}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o601])
def test_job_key_file_that_other_users_can_read_is_refused(tmp_path, mode: int) -> None:
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(mode)
    with pytest.raises(ValueError, match=r"AIOCOLL_JOB_KEY_FILE='.*key': other users may access it; chmod 600 it"):
        job_key({"AIOCOLL_JOB_KEY_FILE": str(path)}, None)


def test_unusable_job_key_file_is_refused(tmp_path) -> None:
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(0o600)
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    for name, message in [
        ("link", "symbolic links are not followed"),
        ("missing", "No such file"),
        ("pipe", "is not a regular file"),
        (".", "is not a regular file"),
    ]:
        with pytest.raises(ValueError, match=message):
            read_key_file(str(tmp_path / name))
    path.write_text("short")
    with pytest.raises(ValueError, match="job key has 5 bytes, but at least 16 are required"):
        read_key_file(str(path))


def test_job_key_file_of_another_user_is_refused(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(0o600)
    owner = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    with pytest.raises(ValueError, match=f"belongs to user {owner}, not to this user"):
        read_key_file(str(path))


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, 0.0), (3, 3.0), (0.5, 0.5), (timedelta(minutes=2), 120.0), (math.inf, math.inf), (10**400, math.inf)],
)
def test_seconds_parser_accepts_real_numbers(value: float | timedelta, expected: float) -> None:
    assert seconds(value, "timeout") == expected
    assert type(seconds(value, "timeout")) is float


def test_seconds_parser_returns_the_default_for_none() -> None:
    assert seconds(None, "timeout") == math.inf
    assert seconds(None, "timeout", 300.0) == 300.0


@pytest.mark.parametrize("value", [-1, -0.001, math.nan, -math.inf, timedelta(seconds=-1)])
def test_seconds_parser_refuses_values_out_of_range(value: float | timedelta) -> None:
    with pytest.raises(ValueError, match=r"timeout=.* must be >= 0 seconds"):
        seconds(value, "timeout")


@pytest.mark.parametrize("value", ["3", True, [1]])
def test_seconds_parser_refuses_values_of_another_type(value: object) -> None:
    with pytest.raises(TypeError, match=f"timeout must be seconds, a timedelta or None, not {type(value).__name__}"):
        seconds(value, "timeout")
