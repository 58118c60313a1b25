"""The steps of a rotation, conflicts between processes, and the files of the certificate."""

import asyncio
import os
from datetime import timedelta
from pathlib import Path

import pytest
from attrs import define, field

from webhook.commands.certs import (
    CertificateSnapshot,
    ConfigurationListener,
    OvertakenError,
    RotationStep,
    replace_files,
    rotate_once,
    rotate_repeatedly,
    rotate_until_done,
    rules_of,
)
from webhook.kube.install.policies import Installation, certs
from webhook.runtime.settings import Settings, SettingsError, load
from webhook.runtime.tls.rotation import DATA_KEYS, CertificateState, RotationRules
from webhook.web.probes import Probes

RULES = RotationRules(
    names=("gpuwarden",),
    leaf_life=timedelta(days=90),
    renew_before=timedelta(days=15),
    ca_life=timedelta(days=365),
    settle=timedelta(0),
)
FILES = {"tls.crt": b"one", "tls.key": b"key of one"}


@define
class Shared:
    """A place where somebody else is always a little faster, so many times."""

    faster: int = 0
    state: CertificateState | None = None
    published: bytes = b""
    writes: list[str] = field(factory=list)
    looked: asyncio.Semaphore = field(factory=lambda: asyncio.Semaphore(0))

    async def look(self) -> CertificateSnapshot:
        self.looked.release()
        return CertificateSnapshot((), None if self.state is None else "1", self.state)

    async def keep(self, seen: CertificateSnapshot, state: CertificateState) -> None:
        if self.faster:
            self.faster -= 1
            raise OvertakenError
        self.state = state
        self.writes.append("keep")

    async def publish(self, seen: CertificateSnapshot, bundle: bytes) -> None:
        self.published = bundle


async def test_replica_that_loses_the_race_writes_nothing_and_reads_again() -> None:
    place = Shared(faster=3)
    assert await rotate_once(place, RULES) == RotationStep(None, is_done=False)
    assert place.writes == []
    state = await rotate_until_done(place, RULES)
    assert state is not None
    assert state.leaf is not None
    assert place.writes == ["keep"]


async def test_replica_with_a_certificate_and_no_work_is_done() -> None:
    place = Shared()
    first = await rotate_once(place, RULES)
    assert (first.state, first.is_done) == (place.state, False)
    assert await rotate_once(place, RULES) == RotationStep(place.state, is_done=True)


async def test_new_object_is_read_at_once() -> None:
    """A webhook configuration without a CA bundle has every pod refused that asks for GPUs."""
    settings = Settings(ui_port=0, certs_look_interval=timedelta(hours=1))
    place, news = Shared(), ConfigurationListener()
    async with Probes(settings).listening() as probes:
        looking = asyncio.create_task(rotate_repeatedly(settings, place, probes, news.event))
        async with asyncio.timeout(30):
            await place.looked.acquire()
            await place.looked.acquire()  # that was the last thing to be done
            news.changed({"metadata": {"name": "gpuwarden"}})
            await place.looked.acquire()
        looking.cancel()


def contents(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in FILES}


def test_all_files_change_at_the_same_time(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "files"
    replace_files(directory, FILES)
    assert contents(directory) == FILES
    assert {os.readlink(directory / name) for name in FILES} == {"..data/tls.crt", "..data/tls.key"}
    links = {name: (directory / name).lstat().st_ino for name in FILES}
    other = {name: content + b" more" for name, content in FILES.items()}
    replace_files(directory, other)
    assert contents(directory) == other
    assert {name: (directory / name).lstat().st_ino for name in FILES} == links  # only `..data` has moved
    assert (directory / "tls.key").stat().st_mode & 0o077 == 0
    assert len(list(directory.glob("..*"))) == 2  # the link and what it leads to: nothing old is left


def test_unchanged_files_are_not_written(tmp_path: Path) -> None:
    replace_files(tmp_path, FILES)
    before = os.readlink(tmp_path / "..data")
    replace_files(tmp_path, FILES)
    assert os.readlink(tmp_path / "..data") == before


def test_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    replace_files(tmp_path, FILES)
    (tmp_path / "..half-done").mkdir()
    (tmp_path / "..half-done" / "tls.crt").write_bytes(b"h")
    (tmp_path / "..new-data").symlink_to("nowhere")
    assert contents(tmp_path) == FILES
    other = {name: content + b" more" for name, content in FILES.items()}
    replace_files(tmp_path, other)
    assert contents(tmp_path) == other
    assert not (tmp_path / "..half-done").exists()


def test_certificate_has_the_names_of_the_service_and_the_requested_names() -> None:
    flags = {"certs_service": "hook", "certs_namespace": "wardens", "certs_names": "10.0.0.1,hook.example.org"}
    names = rules_of(load(flags, {})).names
    assert names[:4] == ("hook", "hook.wardens", "hook.wardens.svc", "hook.wardens.svc.cluster.local")
    assert names[4:] == ("10.0.0.1", "hook.example.org")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            {"certs_renew_before": "2160h"},
            "flag --certs-renew-before, --certs-leaf-life (default): a certificate must outlast",
        ),
        ({"certs_ca_life": "2520h"}, "flag --certs-ca-life: a CA must last longer than certificate and renewal"),
        ({"certs_leaf_life": "0s"}, "is not a duration above 0"),
        ({"certs_ca_life": "87601h"}, "is too long"),
        ({"certs_names": "a b"}, "is neither an IP address nor a host name"),
        ({"certs_configurations": "One"}, "is not the name of an object"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_invalid_lifetimes_and_names_are_refused(flags: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load(flags, {})
    assert said in str(refused.value)


def test_role_of_the_account_has_only_the_needed_permissions() -> None:
    rules = [rule for one in certs(Installation(namespace="wardens")) for rule in one.get("rules", ())]
    assert [(rule["resources"], rule.get("resourceNames"), rule["verbs"]) for rule in rules] == [
        (
            ["mutatingwebhookconfigurations", "validatingwebhookconfigurations"],
            ["gpuwarden"],
            ["get", "list", "watch", "patch"],
        ),
        (["secrets"], None, ["create"]),
        (["secrets"], [Settings().certs_secret], ["get", "patch"]),
    ]
    assert "rotation.json" in DATA_KEYS
