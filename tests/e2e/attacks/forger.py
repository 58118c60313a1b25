"""An attacker on the pod network who posts reviews that the API server has not sent."""

import asyncio
import base64
import ssl
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx
import jsonpatch
import msgspec
from attrs import define, field

from tests import builders
from tests.e2e.kube import Raw, pod
from tests.e2e.processes import Site


def trust(here: Site) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(here.directory / "tls.crt"))
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def wanted(namespace: str, *, gpus: int = 1) -> Raw:
    return {**pod(None, gpus=gpus), "metadata": {"generateName": "train-", "namespace": namespace}}


def patched(raw: Raw, answer: Raw) -> Raw:
    made: Raw = jsonpatch.apply_patch(raw, msgspec.json.decode(base64.b64decode(answer["patch"])))
    return made


@define(eq=False)
class Forger:
    """An attacker on the pod network without credentials."""

    here: Site
    client: httpx.AsyncClient
    answers: Counter[str] = field(factory=Counter)

    async def post(self, path: str, review: Raw) -> Raw:
        answer = (await self.client.post(path, json=review)).raise_for_status().json()
        response: Raw = answer["response"]
        self.answers["admitted" if response["allowed"] else response["status"]["reason"]] += 1
        return response

    async def mutate(self, namespace: str, *, gpus: int = 1, is_dry: bool = False) -> Raw:
        """The answer to a forged creation."""
        raw = wanted(namespace, gpus=gpus)
        return await self.post("/mutate", builders.mutating_create(raw, uid=str(uuid.uuid4()), dry_run=is_dry))

    async def validate(self, raw: Raw, name: str, uid: str) -> Raw:
        return await self.post("/validate", builders.validating_create(raw, uid=uid, name=name))

    async def dressed(self, namespace: str) -> Raw:
        """The pod as gpuwarden would dress it in that namespace."""
        return patched(wanted(namespace), await self.mutate(namespace, is_dry=True))

    async def flood(self, namespace: str, until: float, *, names_uids: bool = False) -> None:
        """Posts forged creations until `until`. With `names_uids`, each reservation is bound to a pod that does not
        exist."""
        while time.monotonic() < until:
            with suppress(httpx.HTTPError):
                got = await self.mutate(namespace)
                if got["allowed"] and names_uids:
                    await self.validate(patched(wanted(namespace), got), "train-abcde", str(uuid.uuid4()))
            await asyncio.sleep(0.05)


@asynccontextmanager
async def forging(here: Site) -> AsyncIterator[Forger]:
    url = here.replicas[0].urls["https"]
    async with httpx.AsyncClient(base_url=url, verify=trust(here), trust_env=False, timeout=30) as client:
        yield Forger(here, client)
