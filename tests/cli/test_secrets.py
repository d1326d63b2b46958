"""Secrecy of keys, which must not appear in logs, errors, `repr`, dumps, or the output of `ps`."""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ..certificates import Authority, as_options, as_variables, secret_of

if TYPE_CHECKING:
    from tests.cli.conftest import Launch

KEY = b"of this test and no other, 0123456789"

#: A rank that prints the texts of all its objects and errors.
TALK = """
    import asyncio, logging, os, signal, sys, traceback
    from pathlib import Path

    import numpy as np

    import aiocoll
    from aiocoll.options import job_key

    logging.basicConfig(level=logging.DEBUG)


    def show(what, *more):
        print(repr(what), str(what), *more, flush=True)


    async def fail(what):
        try:
            await what
        except (aiocoll.AiocollError, ValueError) as error:
            show(error, *error.args, vars(error))
            traceback.print_exception(error)
        else:
            raise AssertionError("the call did not fail")


    async def main():
        key = job_key(os.environ, None)
        files = {name: os.environ["AIOCOLL_" + name.upper()] for name in ("tls_ca", "tls_certificate", "tls_key")}
        options = aiocoll.GroupOptions(job_key=key, **files)
        show(options)
        show(aiocoll.GroupOptions.resolve(options, os.environ))
        async with aiocoll.new_group(options=options) as pg:
            show(pg)
            total = await pg.allreduce(np.full(100_000, pg.rank() + 1.0))
            assert (total == 3).all()
            await pg.allgather_object({"rank": pg.rank()})
            show(pg.recorder)
            where, job = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), os.environ["AIOCOLL_JOB_ID"]
            good = {"key": key, "job": job, "encryption": "tls", "timeout": 1, **files}
            another = {name: path.replace("own", "another") for name, path in files.items()}
            wrong = {
                "key": {"key": bytes(32)},
                "job": {"job": "other"},
                "certificate": {"tls_certificate": another["tls_certificate"]},
                "CA": {**another, "tls_ca": os.environ["ANOTHER_CA"]},
                "file": {"tls_key": os.environ["OPEN_KEY"]},
                "text": {"tls_certificate": files["tls_key"]},
                "plain": {"encryption": "none"},
            }
            for change in wrong.values():
                store = aiocoll.TCPStore(*where, **{**good, **change})
                show(store)
                await fail(store.open())
            os.kill(os.getpid(), signal.SIGUSR2)
            await pg.barrier()
            for process in (os.getpid(), os.getppid()):
                for file in ("cmdline", "environ"):
                    seen = Path(f"/proc/{process}/{file}").read_bytes()
                    assert seen
                    Path(f"{pg.rank()}-{process}.{file}").write_bytes(seen)
            await pg.barrier()
            pg.abort("to see the error of an abort")
            await fail(pg.allreduce(1))


    try:
        asyncio.run(main())
    except aiocoll.AiocollError as error:
        show(error)
"""


def forms(key: bytes) -> list[bytes]:
    """Return the forms in which a key could be printed."""
    return [key, key.hex().encode(), base64.b64encode(key).rstrip(b"="), repr(list(key)).encode()]


def texts_with(secrets: list[bytes], texts: dict[str, bytes]) -> set[str]:
    """Return the names of the texts that contain one of the secrets."""
    return {name for name, text in texts.items() if any(secret in text for secret in secrets)}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_job_keys_are_neither_printed_nor_written_to_files(launch: Launch, tmp_path: Path) -> None:
    authority, another = Authority(tmp_path), Authority(tmp_path, "another CA")
    names = ("aiocoll://train/rank/*", "aiocoll://train/store")
    files = authority.make(*names)
    others = [another.make(*names, file="another"), authority.make(*names, file="open")]
    os.chmod(others[1].key, 0o644)
    (tmp_path / "job.key").touch(mode=0o600)
    (tmp_path / "job.key").write_bytes(KEY)
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    environment = {
        "AIOCOLL_ENCRYPTION": "tls",
        "AIOCOLL_TRANSPORT": "tcp",
        "AIOCOLL_JOB_ID": "train",
        "AIOCOLL_DEBUG": "detail",
        "AIOCOLL_DUMP_DIR": str(dumps),
        "ANOTHER_CA": str(another.file),
        "OPEN_KEY": others[1].key,
        **as_variables(files),
    }
    job = launch("-n", 2, "--job-key-file", tmp_path / "job.key", script=TALK, env=environment, text=False)
    done = job.finish()
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    texts = {"stdout": done.stdout, "stderr": done.stderr}
    given = {tmp_path / "job.key", *(Path(each.key) for each in (files, *others))}
    written = {path for path in tmp_path.rglob("*") if path.is_file()} - given
    texts |= {str(path.relative_to(tmp_path)): path.read_bytes() for path in written}
    secrets = [*forms(KEY), *(form for each in (files, *others) for form in secret_of(each))]
    assert texts_with(secrets, texts) == set()
    # The texts must include all outputs in which a key could appear.
    assert sum(name.startswith("dumps/") for name in texts) >= 2
    assert sum(name.endswith((".cmdline", ".environ")) for name in texts) == 8
    assert texts_with([b"AIOCOLL_TLS_KEY"], texts) >= {name for name in texts if name.endswith(".environ")}
    for words in (
        "job_key=<hidden>",
        "DEBUG",
        as_options(files)["tls_key"],
        "does not match",
        "not signed by",
        "did not",
    ):
        assert texts_with([words.encode()], texts) & {"stdout", "stderr"}, words
    for path in given - {tmp_path / "job.key"}:
        assert texts_with(secrets, {"": path.read_bytes()})
