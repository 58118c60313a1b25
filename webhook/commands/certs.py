"""`gpuwarden certs ensure` and `keep`: a CA and a certificate of our own in a Secret, and the CA in the webhook
configurations. Any number may run at once: whoever comes second to a write has seen too little, and looks again.
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
# Between two steps.
SOON = timedelta(seconds=0.05)


class CertificatesError(GpuwardenError):
    """Our certificates cannot be looked after; the message says what stands in the way."""


class OvertakenError(GpuwardenError):
    """Somebody else has written since we looked."""


@frozen
class WebhookConfiguration:
    """A webhook configuration as it was seen: what each of its webhooks has for a CA bundle."""

    kind: str
    name: str
    version: str
    bundles: tuple[bytes, ...]


@frozen
class CertificateSnapshot:
    """All there is. The configurations were read before the Secret."""

    configurations: tuple[WebhookConfiguration, ...]
    # Of the Secret; None: there is none.
    version: str | None
    state: CertificateState | None

    @property
    def bundles(self) -> tuple[bytes, ...]:
        return tuple(bundle for one in self.configurations for bundle in one.bundles)


class CertificateStore(Protocol):
    """Where state and bundles are. Writes raise OvertakenError; everything raises CertificatesError."""

    async def look(self) -> CertificateSnapshot: ...

    async def keep(self, seen: CertificateSnapshot, state: CertificateState) -> None: ...

    async def publish(self, seen: CertificateSnapshot, bundle: bytes) -> None: ...


@frozen
class CertificateRound:
    """What is kept after a look and a step, and whether that was the last step that is due."""

    state: CertificateState | None
    is_done: bool


async def one_round(place: CertificateStore, rules: RotationRules) -> CertificateRound:
    """Look, and take the step that is due."""
    seen = await place.look()
    state = seen.state
    try:
        match next_step(state, seen.bundles, rules, utc_now()):
            case None:
                return CertificateRound(state, is_done=state is not None and state.leaf is not None)
            case WriteSecret(new, why):
                await place.keep(seen, new)
                log.info("certificates", step=why)
                return CertificateRound(new, is_done=False)
            case PublishBundle(bundle):
                await place.publish(seen, bundle)
                log.info("certificates", step="CA bundle written", configurations=len(seen.configurations))
    except OvertakenError:
        log.debug("somebody else was faster")
    return CertificateRound(state, is_done=False)


async def ensure(settings: Settings) -> None:
    """Once: afterwards there is a certificate, and every configuration that is there trusts it."""
    configure_logging(settings.log_level)
    async with await connect(settings) as api:
        state = await all_rounds(ApiCertificateStore(api, settings), rules_of(settings))
    write_out(settings, state)


async def all_rounds(place: CertificateStore, rules: RotationRules) -> CertificateState | None:
    """Until nothing is due. Where another CA was trusted before, that takes as long as ours needs to settle."""
    done = CertificateRound(None, is_done=False)
    while not done.is_done:
        done = await one_round(place, rules)
        await asyncio.sleep(SOON.total_seconds())
    return done.state


async def keep(settings: Settings) -> None:
    """Until SIGTERM or SIGINT."""
    configure_logging(settings.log_level)
    stop = stop_signal()
    news = ConfigurationListener()
    async with await connect(settings) as api, Probes(settings).listening() as probes:
        looking = look_again_and_again(settings, ApiCertificateStore(api, settings), probes, news.there)
        watches = (watch.run() for watch in watches_of(settings, api, news))
        await run_until(stop, all_of(looking, *watches))
    log.info("stopped")


async def all_of(*work: Coroutine[Any, Any, None]) -> None:
    await asyncio.gather(*work)


class ConfigurationListener:
    """Hears that a configuration has come or changed. Until it has its CA bundle, the API server refuses every pod that
    asks for GPUs: it is looked at at once."""

    def __init__(self) -> None:
        self.there = asyncio.Event()

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        self.there.set()

    def changed(self, raw: Raw) -> None:
        self.there.set()

    def deleted(self, raw: Raw) -> None:
        """Nothing is left to be written there."""


def watches_of(settings: Settings, api: ApiClient, news: ConfigurationListener) -> list[Watch]:
    return [
        Watch(api, CONFIGURATIONS_PATH.format(kind=kind), news, only={"fieldSelector": f"metadata.name={name}"})
        for kind in KINDS
        for name in settings.certs_configurations
    ]


async def look_again_and_again(
    settings: Settings, place: CertificateStore, probes: Probes, news: asyncio.Event
) -> None:
    """An API server that is away, or a right that is missing, is waited for: what is served stays good for weeks."""
    rules, has_begun = rules_of(settings), False
    while True:
        news.clear()
        pause = settings.certs_look_interval
        try:
            done = await one_round(place, rules)
            write_out(settings, done.state)
            if not done.is_done:
                pause = SOON
            elif not has_begun:
                has_begun = True
                probes.begin()
            show(probes, done.state)
        except (CertificatesError, OSError) as exc:
            probes.metrics.count_provider_error("certificates")
            log.warning("certificates cannot be looked after", problem=str(exc))
        await wait_for_change(news, pause.total_seconds(), SOON.total_seconds())


def show(probes: Probes, state: CertificateState | None) -> None:
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


# In the API server.


class ApiCertificateStore:
    """The Secret and the webhook configurations of the API server."""

    def __init__(self, api: ApiClient, settings: Settings) -> None:
        self._api = api
        self._namespace, self._secret = settings.certs_namespace, settings.certs_secret
        self._names = settings.certs_configurations

    async def look(self) -> CertificateSnapshot:
        configurations = [await self._configuration(kind, name) for kind in KINDS for name in self._names]
        secret = await self._answer("GET", f"{SECRETS_PATH}/{{name}}", self._own_names, fine=(NOT_FOUND,))
        there = tuple(one for one in configurations if one is not None)
        if secret is None:
            return CertificateSnapshot(there, None, None)
        # Of another type it could never be written: the API server demands of that what we take away meanwhile.
        if secret.get("type") != OPAQUE:
            raise CertificatesError(
                f"Secret {self._namespace}/{self._secret} is of type {secret.get('type')}, so it is somebody else's: "
                "name another by --certs-secret"
            )
        data = {name: base64.b64decode(text) for name, text in (secret.get("data") or {}).items()}
        try:
            return CertificateSnapshot(there, secret["metadata"]["resourceVersion"], decode_state(data))
        except BadStateError as exc:
            raise CertificatesError(
                f"Secret {self._namespace}/{self._secret}: {exc}; delete it, and everything begins anew"
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
            # The version makes the patch fail where somebody has changed the configuration since.
            patch = [{"op": "replace", "path": "/metadata/resourceVersion", "value": one.version}]
            patch += [{"op": "add", "path": f"/webhooks/{k}/clientConfig/caBundle", "value": text} for k in wrong]
            names = {"kind": one.kind, "name": one.name}
            await self._answer("PATCH", CONFIGURATION_PATH, names, patch, kind=JSON_PATCH)

    async def _configuration(self, kind: str, name: str) -> WebhookConfiguration | None:
        raw = await self._answer("GET", CONFIGURATION_PATH, {"kind": kind, "name": name}, fine=(NOT_FOUND,))
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
        fine: tuple[int, ...] = (),
    ) -> Raw | None:
        """What the API server says; None where it refuses in a way that is no mistake."""
        try:
            status, said = await request_json(self._api, method, path, names, body, seconds=REQUEST_TIMEOUT, kind=kind)
        except REQUEST_ERRORS as exc:
            raise CertificatesError("the API server cannot be reached") from exc
        if status in fine:
            return None
        if status == CONFLICT:
            raise OvertakenError
        try:
            raw = object_in(said)
        except msgspec.DecodeError as exc:
            raise CertificatesError(f"the API server answered {status}, and no object") from exc
        if status >= 400:
            raise CertificatesError(f"the API server answered {status}: {raw.get('message', '')}")
        return raw


# In a directory.


def write_out(settings: Settings, state: CertificateState | None) -> None:
    """What `serve` needs, where it is not shown a Secret as files."""
    if settings.certs_dir is not None and state is not None and state.leaf is not None:
        files = {CERT: state.leaf.cert_pem, KEY: state.leaf.key_pem, BUNDLE: state.bundle}
        swap_in(settings.certs_dir, files)


def swap_in(directory: Path, files: Mapping[str, bytes]) -> None:
    """All files change at one moment, as where kubelet shows a Secret: they are links into `..data`, which is one."""
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
    """There at once, whatever was there before."""
    if link.is_symlink() and os.readlink(link) == target:
        return
    new = link.with_name(f"..new-{link.name.lstrip('.')}")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.replace(link)
