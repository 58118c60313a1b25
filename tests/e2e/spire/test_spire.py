"""A real SPIRE Server and a real agent, if both are on PATH."""

import asyncio
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from tests.evidence.certificates import key_usage, names
from tests.evidence.doubles import until
from webhook.core.agent_naming import naming_of
from webhook.core.evidence import state_of
from webhook.core.evidence_id import DEFAULT_TEMPLATE, EvidenceId, EvidenceIdParts
from webhook.evidence import EvidenceUnavailableError
from webhook.evidence.jwt.jwt_svid import TokenVerifier, check_signature
from webhook.evidence.jwt.jwt_workload_api import JwtWorkloadApi, WorkloadBundles
from webhook.evidence.jwt.nonce import Nonces, process_key
from webhook.evidence.spire.attested import AgentRules
from webhook.evidence.spire.spire_server import SpireServer, TcpServer
from webhook.evidence.spire.workload_api import OwnIdentity
from webhook.runtime.clock import utc_now

pytestmark = pytest.mark.skipif(
    not (shutil.which("spire-server") and shutil.which("spire-agent")),
    reason="spire-server and spire-agent are not on PATH",
)

TRUST_DOMAIN = "example.org"
OURS = f"spiffe://{TRUST_DOMAIN}/gpuwarden"
HASH = "26" * 32
SKEW = timedelta(seconds=5)
SERVER = """\
server {{
  bind_address = "127.0.0.1"
  bind_port = "{port}"
  socket_path = "{directory}/server.sock"
  trust_domain = "{trust_domain}"
  data_dir = "{directory}/server"
  log_level = "WARN"
  agent_ttl = "10m"
  admin_ids = ["{ours}"]
}}
plugins {{
  DataStore "sql" {{ plugin_data {{
    database_type = "sqlite3"
    connection_string = "{directory}/server/data.sqlite3"
  }} }}
  KeyManager "memory" {{ plugin_data {{}} }}
  NodeAttestor "x509pop" {{ plugin_data {{
    ca_bundle_path = "{directory}/ca.pem"
    agent_path_template = "/x509pop/node/{{{{ index .URISanSelectors \\"node-name\\" }}}}"
  }} }}
}}
"""
AGENT = """\
agent {{
  server_address = "127.0.0.1"
  server_port = "{port}"
  socket_path = "{directory}/agent.sock"
  trust_domain = "{trust_domain}"
  trust_bundle_path = "{directory}/bundle.pem"
  data_dir = "{directory}/agent"
  log_level = "WARN"
}}
plugins {{
  KeyManager "memory" {{ plugin_data {{}} }}
  WorkloadAttestor "unix" {{ plugin_data {{}} }}
  NodeAttestor "x509pop" {{ plugin_data {{
    private_key_path = "{directory}/node.key"
    certificate_path = "{directory}/node.pem"
  }} }}
}}
"""


class Spire:
    """Server and agent processes in their own directory."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self._stack = stack
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def write(self, name: str, text: str) -> Path:
        path = self.directory / name
        path.write_text(text)
        return path

    def configure(self, name: str, template: str) -> Path:
        text = template.format(directory=self.directory, port=self.port, trust_domain=TRUST_DOMAIN, ours=OURS)
        return self.write(name, text)

    def start(self, *command: str) -> None:
        log = self._stack.enter_context((self.directory / f"{command[0]}.log").open("w"))
        process = subprocess.Popen(command, stdout=log, stderr=log)
        self._stack.callback(process.wait, 30)
        self._stack.callback(process.terminate)

    def run_command(self, *arguments: str) -> str:
        """Runs the server's command line over its socket."""
        command = ["spire-server", *arguments, "-socketPath", str(self.directory / "server.sock")]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout

    def answers(self, *arguments: str) -> bool:
        try:
            self.run_command(*arguments)
        except subprocess.CalledProcessError:
            return False
        return True


def attest(spire: Spire) -> None:
    """Issues a certificate of the attestation CA with the node and its hash."""
    now, keys = utc_now(), [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    ca = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "attestation CA")])
    for number, (file, subject) in enumerate((("ca", ca), ("node", x509.Name([])))):
        uris = names(*(f"x509pop://{TRUST_DOMAIN}/{part}" for part in ("node-name/node-1", f"attestation-hash/{HASH}")))
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(ca)
            .public_key(keys[number].public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=file == "ca", path_length=None), critical=True)
            .add_extension(key_usage(is_ca=file == "ca"), critical=True)
        )
        if file == "node":
            builder = builder.add_extension(uris, critical=True)
        made = builder.sign(keys[0], hashes.SHA256())
        spire.write(f"{file}.pem", ssl.DER_cert_to_PEM_cert(made.public_bytes(Encoding.DER)))
        raw_key = keys[number].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        spire.write(f"{file}.key", raw_key.decode())


@pytest.fixture
def spire(tmp_path: Path) -> Iterator[Spire]:
    with ExitStack() as stack:
        yield Spire(tmp_path, stack)


async def start_spire(spire: Spire) -> str:
    """Starts server and agent; returns the agent's ID once it is attested."""
    attest(spire)
    spire.start("spire-server", "run", "-config", str(spire.configure("server.conf", SERVER)))
    await until(lambda: spire.answers("healthcheck"))
    spire.write("bundle.pem", spire.run_command("bundle", "show"))
    spire.start("spire-agent", "run", "-config", str(spire.configure("agent.conf", AGENT)))
    agent_id = f"spiffe://{TRUST_DOMAIN}/spire/agent/x509pop/node/node-1"
    await until(lambda: spire.answers("agent", "show", "-spiffeID", agent_id))
    return agent_id


def register(spire: Spire, agent_id: str, spiffe_id: str, *options: str) -> None:
    """Registers the user of this test as that workload."""
    selector = f"unix:uid:{spire.directory.stat().st_uid}"
    spire.run_command("entry", "create", "-parentID", agent_id, "-spiffeID", spiffe_id, "-selector", selector, *options)


async def test_real_agent_is_valid_evidence_until_it_is_banned(spire: Spire) -> None:
    agent_id = await start_spire(spire)
    register(spire, agent_id, OURS)
    rules = AgentRules(
        trust_domain=TRUST_DOMAIN,
        attestors=frozenset({"x509pop"}),
        node=naming_of("x509pop:san:node-name", "node"),
        hash=naming_of("x509pop:san:attestation-hash", "hash"),
        agent_ttl=timedelta(minutes=10),
        max_age=timedelta(minutes=8),
        skew=SKEW,
    )
    identity = OwnIdentity(str(spire.directory / "agent.sock"), TRUST_DOMAIN, utc_now, own_id=OURS)
    server = TcpServer("127.0.0.1", spire.port, TRUST_DOMAIN, identity)
    provider = SpireServer(server, rules, utc_now, timedelta(milliseconds=100))

    async def state() -> str | None:
        try:
            word = (await provider.poll()).get("node-1")
        except EvidenceUnavailableError as exc:
            sys.stderr.write(f"{exc}\n")
            return None
        return None if word is None else f"{state_of(word, utc_now()).value} {word.hash}"

    async def is_fresh() -> bool:
        return await state() == f"fresh {HASH}"

    async def is_banned() -> bool:
        return await state() == "banned "

    await until(is_fresh)
    await asyncio.to_thread(spire.run_command, "agent", "ban", "-spiffeID", agent_id)
    await until(is_banned)
    await identity.close()


async def test_real_token_with_a_challenge_proves_its_node(spire: Spire) -> None:
    own = f"spiffe://{TRUST_DOMAIN}/evidence/node-1/{HASH}"
    register(spire, await start_spire(spire), own, "-jwtSVIDTTL", "60")
    api, nonces = JwtWorkloadApi(str(spire.directory / "agent.sock")), Nonces(process_key(), SKEW)

    async def tokens() -> list[str]:
        try:
            found = await api.jwt_svids(nonces.issue("node-1", utc_now()).text)
        except EvidenceUnavailableError as exc:
            sys.stderr.write(f"{exc}\n")
            return []
        return [one.token for one in found if one.spiffe_id == own]

    async def has_one() -> bool:
        return len(await tokens()) == 1

    await until(has_one)
    (token,) = await tokens()
    proof = TokenVerifier(EvidenceId(DEFAULT_TEMPLATE, TRUST_DOMAIN), nonces, SKEW).check_claims(token, utc_now())
    assert proof.evidence_id == EvidenceIdParts("node-1", HASH)
    bundle = await WorkloadBundles(api, TRUST_DOMAIN).fetch()
    check_signature(proof, bundle.keys.get(proof.token.key_id))
