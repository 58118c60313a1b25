"""An installed chart without kubelets: its Pods are simulated. Their processes run here with the rendered command
lines, files, accounts and permissions."""

import asyncio
import base64
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import field, frozen

from scripts.chart_values import CHART
from scripts.controlplane.cluster import Cluster
from scripts.controlplane.components import free_ports
from tests.chart.rendering import HELM, unfolded
from tests.e2e.kube import CONFIG_MAPS, DEPLOYMENTS, Kube, Raw, Resource, wait_until
from tests.e2e.profile import Scheduler, configuration, launched
from tests.running import GPUWARDEN

SECRETS = Resource("api/v1", "secrets")
# For a busy machine.
START_TIMEOUT = 60.0
HELM_TIMEOUT = 180.0
MOUNTED_AT = "/etc/gpuwarden"
# Without a cluster network no Service works; this post-renderer leads it to loopback.
POST_RENDERER = f"""#!{sys.executable}
import sys, yaml
documents = [*filter(None, yaml.load_all(sys.stdin, yaml.CSafeLoader))]
for one in documents:
    if (one["kind"], one["metadata"]["name"]) == ("Service", "gpuwarden"):
        one["spec"] = {{"type": "ExternalName", "externalName": "localhost", "ports": one["spec"]["ports"]}}
yaml.dump_all(documents, sys.stdout, yaml.CSafeDumper)
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@frozen(eq=False)
class Process:
    """The process of a Pod's container."""

    process: asyncio.subprocess.Process
    log: Path
    urls: dict[str, str] = field(factory=dict)

    async def is_ready(self) -> None:
        """Waits until the process reports that it is ready, and reads its addresses."""
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT):
                line = await self.process.stdout.readline()
        except TimeoutError:
            line = b""
        assert line.startswith(b"ready "), f"not ready: {self.log.read_text()[-3000:]}"
        self.urls.update((name, url) for name, _, url in (part.partition("=") for part in line.decode().split()[1:]))

    def cpu_seconds(self) -> float:
        """CPU time used so far."""
        words = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mib(self) -> float:
        """Resident memory."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.partition("VmRSS:")[2].split()[0]) / 1024

    async def stop(self) -> int:
        with suppress(ProcessLookupError):
            self.process.terminate()
        return await self.process.wait()

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


@frozen(eq=False)
class Release:
    """A release of the chart on the test cluster."""

    cluster: Cluster
    kube: Kube
    directory: Path
    name: str = "gpuwarden"
    namespace: str = "gpuwarden"
    port: int = field(factory=free_port)
    http_port: int = field(factory=free_port)
    running: dict[str, Process] = field(factory=dict)
    schedulers: list[Scheduler] = field(factory=list)

    def helm(self, *words: str, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
        """Runs helm as the cluster's administrator, with helm's own files in the test's directory."""
        home = self.directory / "helm"
        places = {f"HELM_{what}_HOME": str(home / what.lower()) for what in ("CACHE", "CONFIG", "DATA")}
        given = [] if values is None else ["-f", "-"]
        command = [HELM, *words, "--kubeconfig", str(self.cluster.kubeconfig), "-n", self.namespace, *given]
        return subprocess.run(
            command,
            input=json.dumps(unfolded(values or {})),
            env={"PATH": "/usr/bin:/bin", "HOME": str(home), **places},
            capture_output=True,
            text=True,
            check=False,
            timeout=HELM_TIMEOUT,
        )

    async def install(self, values: Mapping[str, Any], chart: Path = CHART, command: str = "install") -> str:
        """Runs `helm install` with a Service that leads to this machine. Returns helm's output."""
        accepted = {"webhooks.acceptUnverifiedCallers": True} if chart == CHART else {}
        said = {"service.port": self.port, **accepted, **values}
        post_renderer = self.directory / "leading-here"
        post_renderer.write_text(POST_RENDERER)
        post_renderer.chmod(0o700)
        words = [command, self.name, str(chart), *(["--create-namespace"] if command == "install" else [])]
        done = await asyncio.to_thread(self.helm, *words, "--post-renderer", str(post_renderer), values=said)
        assert done.returncode == 0, done.stderr
        return done.stdout

    async def upgrade(self, values: Mapping[str, Any], chart: Path = CHART) -> str:
        return await self.install(values, chart, command="upgrade")

    async def start(self, component: str) -> Process:
        """Starts the process of a Deployment's Pod and waits until it is ready."""
        name = self.name if component == "serve" else f"{self.name}-{component}"
        spec = (await self.kube.get(DEPLOYMENTS, name, self.namespace))["spec"]["template"]["spec"]
        started = await self.launch(spec, f"{component}-{len(self.running)}", {"--port": self.port})
        self.running[f"{component}-{len(self.running)}"] = started
        if component != "export":  # its stdout carries records
            await started.is_ready()
        return started

    async def schedule(self, serve: Process) -> Scheduler:
        """Starts the container of kube-scheduler, with the token that the controller manager created."""
        spec = (await self.kube.get(DEPLOYMENTS, self.name, self.namespace))["spec"]["template"]["spec"]
        (container,) = (each for each in spec["containers"] if each["name"] == "scheduler")
        (token,) = (each["secret"] for each in spec["volumes"] if each["name"] == "scheduler-token")
        directory = serve.log.parent
        secret = await self._secret(token)
        user = {"token": secret["token"].decode()}
        kubeconfig = self.cluster.credentials.kubeconfig(f"{directory.name}:scheduler", self.cluster.url, user)
        config = (await self.kube.get(CONFIG_MAPS, f"{self.name}-scheduler", self.namespace))["data"]["config.yaml"]
        (port,) = free_ports(1)
        path = configuration(config, kubeconfig, directory / "scheduler", serve.urls["scheduler"], port, directory)
        started = launched(container["command"], path, port)
        self.schedulers.append(started)
        return started

    async def launch(self, spec: Raw, name: str, ports: Mapping[str, int]) -> Process:
        """Starts the process that a kubelet would start for a Pod, on the given ports and otherwise on free ones."""
        directory = self.directory / name
        directory.mkdir()
        await self._mount(spec, directory)
        for each in spec.get("initContainers", ()):
            words = [word.replace(MOUNTED_AT, str(directory)) for word in each["args"]]
            await asyncio.to_thread(subprocess.run, [GPUWARDEN, *words], check=True, stdout=subprocess.DEVNULL)
        container = spec["containers"][0]
        take = self._kubeconfig if container["name"] == "export" else self._account
        account = await asyncio.to_thread(take, spec["serviceAccountName"], directory)
        args = [
            word for each in container["args"] for word in self._argument_outside_pod(each, directory, account, ports)
        ]
        fields = {"metadata.name": directory.name, "metadata.namespace": self.namespace}
        environment = {"PATH": "/usr/bin:/bin"} | {
            one["name"]: one.get("value") or fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in container.get("env", ())
        }
        log = directory / "log"
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                GPUWARDEN, *args, cwd=directory, env=environment, stdout=asyncio.subprocess.PIPE, stderr=stderr
            )
        return Process(process, log)

    def _account(self, name: str, directory: Path) -> list[str]:
        """The flags that replace `--in-cluster` outside of a Pod."""
        token = directory / "token"
        token.write_text(self.cluster.service_account_token(self.namespace, name))
        return [
            f"--kubernetes-url={self.cluster.url}",
            f"--access-token={token}",
            f"--ca-certificate={self.cluster.ca}",
        ]

    def _kubeconfig(self, name: str, _place: Path) -> list[str]:
        return [f"--kubeconfig={self.cluster.service_account_kubeconfig(self.namespace, name)}"]

    def _argument_outside_pod(
        self, word: str, directory: Path, account: Sequence[str], ports: Mapping[str, int]
    ) -> list[str]:
        """Translates an argument for a process outside of a Pod: loopback, free ports, files in the test's
        directory."""
        match flag := word.partition("=")[0]:
            case "--in-cluster":
                return list(account)
            case "--host":
                return ["--host=127.0.0.1"]
            case "--port" | "--ui-port" | "--extender-port" | "--scheduler-port" | "--server-port":
                return [f"{flag}={ports.get(flag, 0)}"]
            case "--config" if "export" in word:
                # The exporter uses the Pod's account by default.
                return [word.replace(MOUNTED_AT, str(directory)), *account]
            case _:
                return [word.replace(MOUNTED_AT, str(directory))]

    async def _mount(self, spec: Raw, directory: Path) -> None:
        """Writes volumes as files. Like a Pod, it waits for a Secret that does not exist yet."""
        mounts = {each["name"]: each["mountPath"] for each in spec["containers"][0]["volumeMounts"]}
        for volume in (each for each in spec["volumes"] if each["name"] in mounts):
            if "configMap" in volume:
                found = await self.kube.get(CONFIG_MAPS, volume["configMap"]["name"], self.namespace)
                content = {key: text.encode() for key, text in found["data"].items()}
            elif "secret" in volume:
                content = await self._secret(volume["secret"])
            else:
                continue
            target = directory / Path(mounts[volume["name"]]).relative_to(MOUNTED_AT)
            target.mkdir(parents=True)
            for key, data in content.items():
                (target / key).write_bytes(self._file_outside_pod(data, directory))

    def _file_outside_pod(self, data: bytes, directory: Path) -> bytes:
        """Translates paths and ports in a file."""
        moved = {
            MOUNTED_AT: str(directory),
            "/var/lib/gpuwarden": str(directory / "var"),
            ": :8000": f": :{self.http_port}",
        }
        for inside, outside in moved.items():
            data = data.replace(inside.encode(), outside.encode())
        return data

    async def _secret(self, volume: Raw) -> dict[str, bytes]:
        items = {each["key"]: each["path"] for each in volume.get("items", ())}

        async def content() -> dict[str, bytes]:
            found = await self.kube.find(SECRETS, volume["secretName"], self.namespace)
            data = (found or {}).get("data", {})
            return {
                items.get(key, key): base64.b64decode(text) for key, text in data.items() if not items or key in items
            }

        return await wait_until(content, lambda seen: bool(seen) and set(items.values()) <= seen.keys(), START_TIMEOUT)

    async def end(self) -> None:
        """Kills all processes."""
        for scheduler in self.schedulers:
            scheduler.kill()
        for one in self.running.values():
            await one.kill()
