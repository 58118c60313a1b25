"""`gpuwarden certs ensure` and `keep`: write a CA and a certificate to a Secret, and the CA to webhook configurations.

Any number of processes may run at once: a write that conflicts with another is not repeated; the process reads again.
"""

import asyncio
import base64
import os
import shutil
import tempfile
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog
from attrs import frozen

from webhook.core.errors import GpuwardenError
from webhook.core.raw import Raw
from webhook.kube.client import REQUEST_TIMEOUT, ApiClient, connect
from webhook.kube.json_objects import object_in
from webhook.kube.requests import JSON, JSON_PATCH, MERGE_PATCH, REQUEST_ERRORS, request_json
from webhook.kube.watch import Watch
from webhook.runtime.clock import utc_now
from webhook.runtime.process import run_until, stop_signal, wait_for_change
from webhook.runtime.settings import Settings
from webhook.runtime.telemetry import configure_logging
from webhook.runtime.tls.rotation import (
    BUNDLE,
    CERT,
    DATA_KEYS,
    KEY,
    BadStateError,
    CertificateState,
    PublishBundle,
    RotationRules,
    WriteSecret,
    decode_state,
    encode_state,
    next_step,
)
from webhook.web.probes import Probes

log = structlog.get_logger(__name__)


NOT_FOUND, CONFLICT = 404, 409
SECRETS_PATH = "/api/v1/namespaces/{namespace}/secrets"
CONFIGURATIONS_PATH = "/apis/admissionregistration.k8s.io/v1/{kind}webhookconfigurations"
CONFIGURATION_PATH = f"{CONFIGURATIONS_PATH}/{{name}}"
KINDS = ("mutating", "validating")
OPAQUE = "Opaque"
# Pause between two steps.
SOON = timedelta(seconds=0.05)


class CertificatesError(GpuwardenError):
    """The certificates cannot be read or written; the message says why."""


class OvertakenError(GpuwardenError):
    """The object has changed since it was read."""


@frozen
class WebhookConfiguration:
    """A webhook configuration as it was read, with the CA bundle of each webhook."""

    kind: str
    name: str
    version: str
    bundles: tuple[bytes, ...]


@frozen
class CertificateSnapshot:
    """Configurations and Secret. The configurations were read before the Secret."""

    configurations: tuple[WebhookConfiguration, ...]
    # Of the Secret; None: it does not exist.
    version: str | None
    state: CertificateState | None

    @property
    def bundles(self) -> tuple[bytes, ...]:
        return tuple(bundle for one in self.configurations for bundle in one.bundles)


class CertificateStore(Protocol):
    """Stores state and bundles. Writes raise OvertakenError; every method raises CertificatesError."""

    async def look(self) -> CertificateSnapshot: ...

    async def keep(self, seen: CertificateSnapshot, state: CertificateState) -> None: ...

    async def publish(self, seen: CertificateSnapshot, bundle: bytes) -> None: ...


@frozen
class RotationStep:
    """The state after one step, and whether no further step is due."""

    state: CertificateState | None
    is_done: bool


async def rotate_once(place: CertificateStore, rules: RotationRules) -> RotationStep:
    """Reads the state and takes the step that is due."""
    seen = await place.look()
    state = seen.state
    try:
        match next_step(state, seen.bundles, rules, utc_now()):
            case None:
                return RotationStep(state, is_done=state is not None and state.leaf is not None)
            case WriteSecret(new, why):
                await place.keep(seen, new)
                log.info("certificates", step=why)
                return RotationStep(new, is_done=False)
            case PublishBundle(bundle):
                await place.publish(seen, bundle)
                log.info("certificates", step="CA bundle written", configurations=len(seen.configurations))
    except OvertakenError:
        log.debug("certificates changed by another process")
    return RotationStep(state, is_done=False)


async def ensure(settings: Settings) -> None:
    """Creates the certificate. Afterwards every existing webhook configuration trusts it."""
    configure_logging(settings.log_level)
    async with await connect(settings) as api:
        state = await rotate_until_done(ApiCertificateStore(api, settings), rules_of(settings))
    write_files(settings, state)


async def rotate_until_done(place: CertificateStore, rules: RotationRules) -> CertificateState | None:
    """Steps until none is due. If another CA was trusted before, this takes --certs-settle."""
    done = RotationStep(None, is_done=False)
    while not done.is_done:
        done = await rotate_once(place, rules)
        await asyncio.sleep(SOON.total_seconds())
    return done.state


async def keep(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT."""
    configure_logging(settings.log_level)
    stop = stop_signal()
    changes = ConfigurationListener()
    async with await connect(settings) as api, Probes(settings).listening() as probes:
        looking = rotate_repeatedly(settings, ApiCertificateStore(api, settings), probes, changes.event)
        watches = (watch.run() for watch in watches_of(settings, api, changes))
        await run_until(stop, all_of(looking, *watches))
    log.info("stopped")


async def all_of(*work: Coroutine[Any, Any, None]) -> None:
    await asyncio.gather(*work)


class ConfigurationListener:
    """Sets an event when a webhook configuration is created or changed. It gets its CA bundle at once: without one, the
    API server refuses every pod that asks for GPUs."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        self.event.set()

    def changed(self, raw: Raw) -> None:
        self.event.set()

    def deleted(self, raw: Raw) -> None:
        """A deleted configuration needs no bundle."""


def watches_of(settings: Settings, api: ApiClient, changes: ConfigurationListener) -> list[Watch]:
    return [
        Watch(api, CONFIGURATIONS_PATH.format(kind=kind), changes, only={"fieldSelector": f"metadata.name={name}"})
        for kind in KINDS
        for name in settings.certs_configurations
    ]


async def rotate_repeatedly(
    settings: Settings, place: CertificateStore, probes: Probes, changes: asyncio.Event
) -> None:
    """Runs for ever and retries after errors, such as an unreachable API server or a missing right: the certificate is
    valid for weeks."""
    rules, has_begun = rules_of(settings), False
    while True:
        changes.clear()
        pause = settings.certs_look_interval
        try:
            done = await rotate_once(place, rules)
            write_files(settings, done.state)
            if not done.is_done:
                pause = SOON
            elif not has_begun:
                has_begun = True
                probes.begin()
            show_certificates(probes, done.state)
        except (CertificatesError, OSError) as exc:
            probes.metrics.count_provider_error("certificates")
            log.warning("certificates cannot be rotated", problem=str(exc))
        await wait_for_change(changes, pause.total_seconds(), SOON.total_seconds())


def show_certificates(probes: Probes, state: CertificateState | None) -> None:
    if state is None:
        return
    for name, pair in (("issued", state.leaf), ("issuing-ca", state.signing)):
        if pair is not None:
            probes.metrics.show_certificate(name, pair.end)


def rules_of(settings: Settings) -> RotationRules:
    service, namespace = settings.certs_service, settings.certs_namespace
    full = f"{service}.{namespace}"
    names = (service, full, f"{full}.svc", f"{full}.svc.cluster.local", *settings.certs_names)
    return RotationRules(
        names=tuple(dict.fromkeys(names)),
        leaf_life=settings.certs_leaf_life,
        renew_before=settings.certs_renew_before,
        ca_life=settings.certs_ca_life,
        settle=settings.certs_settle,
    )


# The API server.


class ApiCertificateStore:
    """The Secret and the webhook configurations of the API server."""

    def __init__(self, api: ApiClient, settings: Settings) -> None:
        self._api = api
        self._namespace, self._secret = settings.certs_namespace, settings.certs_secret
        self._names = settings.certs_configurations

    async def look(self) -> CertificateSnapshot:
        configurations = [await self._configuration(kind, name) for kind in KINDS for name in self._names]
        secret = await self._answer("GET", f"{SECRETS_PATH}/{{name}}", self._own_names, accepted=(NOT_FOUND,))
        there = tuple(one for one in configurations if one is not None)
        if secret is None:
            return CertificateSnapshot(there, None, None)
        # The API server requires keys of other types that a rotation removes for a moment.
        if secret.get("type") != OPAQUE:
            raise CertificatesError(
                f"Secret {self._namespace}/{self._secret} is not gpuwarden's, because it is of type "
                f"{secret.get('type')}: "
                "name another by --certs-secret"
            )
        data = {name: base64.b64decode(text) for name, text in (secret.get("data") or {}).items()}
        try:
            return CertificateSnapshot(there, secret["metadata"]["resourceVersion"], decode_state(data))
        except BadStateError as exc:
            raise CertificatesError(
                f"Secret {self._namespace}/{self._secret}: {exc}; delete it to start again"
            ) from exc

    async def keep(self, seen: CertificateSnapshot, state: CertificateState) -> None:
        data: dict[str, bytes | str] = {
            name: base64.b64encode(text).decode() for name, text in encode_state(state).items()
        }
        if seen.version is None:
            body = {"metadata": {"name": self._secret}, "type": OPAQUE, "data": data}
            await self._answer("POST", SECRETS_PATH, self._own_names, body)
            return
        patch = {"metadata": {"resourceVersion": seen.version}, "data": {**dict.fromkeys(DATA_KEYS), **data}}
        await self._answer("PATCH", f"{SECRETS_PATH}/{{name}}", self._own_names, patch, kind=MERGE_PATCH)

    async def publish(self, seen: CertificateSnapshot, bundle: bytes) -> None:
        text = base64.b64encode(bundle).decode()
        for one in seen.configurations:
            wrong = [number for number, found in enumerate(one.bundles) if found != bundle]
            if not wrong:
                continue
            # With the version, the patch fails if the configuration has changed since it was read.
            patch = [{"op": "replace", "path": "/metadata/resourceVersion", "value": one.version}]
            patch += [{"op": "add", "path": f"/webhooks/{k}/clientConfig/caBundle", "value": text} for k in wrong]
            names = {"kind": one.kind, "name": one.name}
            await self._answer("PATCH", CONFIGURATION_PATH, names, patch, kind=JSON_PATCH)

    async def _configuration(self, kind: str, name: str) -> WebhookConfiguration | None:
        raw = await self._answer("GET", CONFIGURATION_PATH, {"kind": kind, "name": name}, accepted=(NOT_FOUND,))
        if raw is None:
            return None
        bundles = tuple(
            base64.b64decode(one["clientConfig"].get("caBundle") or "") for one in raw.get("webhooks") or ()
        )
        return WebhookConfiguration(kind, name, raw["metadata"]["resourceVersion"], bundles)

    @property
    def _own_names(self) -> dict[str, str]:
        return {"namespace": self._namespace, "name": self._secret}

    async def _answer(
        self,
        method: str,
        path: str,
        names: Mapping[str, str],
        body: object = None,
        *,
        kind: str = JSON,
        accepted: tuple[int, ...] = (),
    ) -> Raw | None:
        """The API server's answer; None for a status in `accepted`."""
        try:
            status, content = await request_json(
                self._api, method, path, names, body, seconds=REQUEST_TIMEOUT, kind=kind
            )
        except REQUEST_ERRORS as exc:
            raise CertificatesError("the API server cannot be reached") from exc
        if status in accepted:
            return None
        if status == CONFLICT:
            raise OvertakenError
        try:
            raw = object_in(content)
        except msgspec.DecodeError as exc:
            raise CertificatesError(f"the API server answered {status} without an object") from exc
        if status >= 400:
            raise CertificatesError(f"the API server answered {status}: {raw.get('message', '')}")
        return raw


# The directory.


def write_files(settings: Settings, state: CertificateState | None) -> None:
    """Writes the files of `serve`, for an installation that does not mount the Secret."""
    if settings.certs_dir is not None and state is not None and state.leaf is not None:
        files = {CERT: state.leaf.cert_pem, KEY: state.leaf.key_pem, BUNDLE: state.bundle}
        replace_files(settings.certs_dir, files)


def replace_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Replaces all files at once, as the kubelet does for a Secret: they are links into `..data`, a link itself."""
    directory.mkdir(parents=True, exist_ok=True)
    data = directory / "..data"
    with suppress(OSError):
        if {name: (data / name).read_bytes() for name in files} == dict(files):
            return
    new = Path(tempfile.mkdtemp(prefix="..", dir=directory))
    for name, content in files.items():
        descriptor = os.open(new / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    put_link(data, new.name)
    for name in files:
        put_link(directory / name, f"..data/{name}")
    for other in directory.glob("..*"):
        if other.is_dir() and not other.is_symlink() and other != new:
            shutil.rmtree(other, ignore_errors=True)


def put_link(link: Path, target: str) -> None:
    """Creates or replaces the link atomically."""
    if link.is_symlink() and os.readlink(link) == target:
        return
    new = link.with_name(f"..new-{link.name.lstrip('.')}")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.replace(link)
