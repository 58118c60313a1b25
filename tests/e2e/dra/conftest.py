"""The device classes of GPUs and of their proofs."""

from collections.abc import AsyncIterator

import pytest

from tests.e2e.dra.gpus import GPU_DRIVER, device_classes
from tests.e2e.kube import Kube
from webhook.core.proof_devices import DRIVER


@pytest.fixture
async def classes(kube: Kube) -> AsyncIterator[None]:
    async with device_classes(kube, GPU_DRIVER, DRIVER):
        yield
