"""A fake kubelet that calls a plugin for dynamic resource allocation, with messages of Google's protobuf
library."""

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen
from grpclib.client import Channel, UnaryUnaryMethod

from tests.evidence.doubles import Table, built

# Messages of pluginregistration and dra/v1. On the wire a map is a list of entries.
TABLE: Table = {
    "InfoRequest": (),
    "PluginInfo": (
        (1, "type", "string"),
        (2, "name", "string"),
        (3, "endpoint", "string"),
        (4, "supported_versions", "*string"),
    ),
    "RegistrationStatus": ((1, "plugin_registered", "bool"), (2, "error", "string")),
    "RegistrationStatusResponse": (),
    "Claim": ((1, "namespace", "string"), (2, "uid", "string"), (3, "name", "string")),
    "Request": ((1, "claims", "*Claim"), (99, "added_later", "string")),
    "Device": (
        (1, "request_names", "*string"),
        (2, "pool_name", "string"),
        (3, "device_name", "string"),
        (4, "cdi_device_ids", "*string"),
        (5, "share_id", "string"),
    ),
    "Prepared": ((1, "devices", "*Device"), (2, "error", "string")),
    "PreparedEntry": ((1, "key", "string"), (2, "value", "Prepared")),
    "PrepareResponse": ((1, "claims", "*PreparedEntry"),),
    "Unprepared": ((1, "error", "string"),),
    "UnpreparedEntry": ((1, "key", "string"), (2, "value", "Unprepared")),
    "UnprepareResponse": ((1, "claims", "*UnpreparedEntry"),),
}
MESSAGES = built(TABLE)
V1 = "k8s.io.kubelet.pkg.apis.dra.v1"
V1BETA1 = "k8s.io.kubelet.pkg.apis.dra.v1beta1"
TIMEOUT = 30.0


def claim(name: str, uid: str | None = None, namespace: str = "ml") -> Any:
    """The uid of claim `x` is `uid-x`."""
    return MESSAGES["Claim"](namespace=namespace, uid=f"uid-{name}" if uid is None else uid, name=name)


@frozen
class KubeletDouble:
    """Calls the plugin in the kubelet's directory."""

    directory: Path
    driver: str = "attested.gpuwarden.io"
    version: str = V1

    @property
    def registration(self) -> Path:
        return self.directory / "plugins_registry" / f"{self.driver}-reg.sock"

    async def info(self) -> Any:
        return await self.call(
            self.registration, "pluginregistration.Registration/GetInfo", "InfoRequest", "PluginInfo"
        )

    async def notify(self, error: str = "") -> None:
        status = {"plugin_registered": not error, "error": error}
        name = "pluginregistration.Registration/NotifyRegistrationStatus"
        await self.call(self.registration, name, "RegistrationStatus", "RegistrationStatusResponse", **status)

    async def prepare(self, *claims: Any) -> Mapping[str, Any]:
        """The answers by uid."""
        return await self._by_uid("NodePrepareResources", "PrepareResponse", claims)

    async def unprepare(self, *claims: Any) -> Mapping[str, Any]:
        return await self._by_uid("NodeUnprepareResources", "UnprepareResponse", claims)

    async def _by_uid(self, name: str, answer: str, claims: Iterable[Any]) -> Mapping[str, Any]:
        endpoint = Path((await self.info()).endpoint)
        found = await self.call(endpoint, f"{self.version}.DRAPlugin/{name}", "Request", answer, claims=claims)
        return {one.key: one.value for one in found.claims}

    async def call(self, socket: Path, name: str, request: str, answer: str, **fields: Any) -> Any:
        channel = Channel(path=str(socket))
        try:
            async with asyncio.timeout(TIMEOUT):
                method: Any = UnaryUnaryMethod(channel, f"/{name}", MESSAGES[request], MESSAGES[answer])
                return await method(MESSAGES[request](**fields))
        finally:
            channel.close()
