"""Session, start-up barrier and epoch register, and the store facts on which they rest."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from kvcached_dist.coord.core.errors import AmbiguousOutcome, ConfigError, WaitTimeout
from kvcached_dist.coord.core.types import Epoch, Rank
from kvcached_dist.coord.links.bounded import STUCK_MAX, StoreConnections, StoreLost, run_bounded
from kvcached_dist.coord.links.gloo import GlooLink
from kvcached_dist.coord.links.store import (
    BLOB_BYTES_MAX,
    EpochRegister,
    EpochValue,
    StartBarrier,
    agree_session,
    connect_store,
)
from kvcached_dist.coord.links.torchrun import TorchrunWorld
from tests.links.peer import ROOT, Peer

pytestmark = pytest.mark.slow

TIMEOUT_S = 15.0
"""Deadline of calls that must succeed: longer than a name lookup that gets no answer."""


class TestCompareSet:
    """What the epoch register relies on."""

    def test_creates_with_an_empty_expectation(self, store: Any, session: int) -> None:
        assert store.compare_set(f"cas/{session}", "", "n:1") == b"n:1"
        assert store.get(f"cas/{session}") == b"n:1"

    def test_loser_gets_the_value_of_the_winner(self, store: Any, session: int) -> None:
        store.compare_set(f"cas/{session}", "", "n:1")
        assert store.compare_set(f"cas/{session}", "", "n:2") == b"n:1"
        assert store.compare_set(f"cas/{session}", "n:0", "n:2") == b"n:1"
        assert store.compare_set(f"cas/{session}", "n:1", "n:3") == b"n:3"

    def test_missing_key_answers_as_if_it_had_matched(self, store: Any, session: int) -> None:
        """Success is a reply equal to the desired value, never one equal to the expected value."""
        assert store.compare_set(f"cas/{session}", "n:x", "n:y") == b"n:x"
        assert not store.check([f"cas/{session}"])


def test_one_connection_serves_one_call_at_a_time(store: Any, session: int) -> None:
    """Why each bounded call has a connection of its own."""
    own = store.clone()

    def wait_in_vain() -> None:
        with pytest.raises(RuntimeError):
            own.wait([f"never/{session}"], timedelta(seconds=0.6))

    thread = threading.Thread(target=wait_in_vain)
    thread.start()
    time.sleep(0.1)
    started = time.monotonic()
    store.set(f"other/{session}", "x")
    assert time.monotonic() - started < 0.3
    thread.join(5)
    assert not thread.is_alive()


class TestSession:
    def test_all_ranks_get_the_id_that_the_leader_chose(self, connections: StoreConnections, session: int) -> None:
        name = f"run-{session}"
        with ThreadPoolExecutor(3) as pool:
            followers = [pool.submit(agree_session, connections, name, False, TIMEOUT_S) for _ in range(2)]
            leader = pool.submit(agree_session, connections, name, True, TIMEOUT_S)
            ids = {future.result(10) for future in [leader, *followers]}
        assert len(ids) == 1
        assert 0 < ids.pop() < 1 << 64

    def test_name_that_is_taken_is_refused(self, connections: StoreConnections, session: int) -> None:
        agree_session(connections, f"run-{session}", True, TIMEOUT_S)
        with pytest.raises(ConfigError, match=f"run-{session}.*new session name"):
            agree_session(connections, f"run-{session}", True, TIMEOUT_S)

    def test_leader_that_never_comes_is_named(self, connections: StoreConnections, session: int) -> None:
        with pytest.raises(WaitTimeout, match=rf"rank 0: session id \(key .*run-{session}"):
            agree_session(connections, f"run-{session}", False, 0.2)


class TestStartBarrier:
    def test_exchanges_blobs_of_all_ranks(self, connections: StoreConnections, session: int) -> None:
        def one(rank: int) -> dict[Rank, bytes]:
            barrier = StartBarrier(connections, f"s{session}", Rank(rank), 3)
            return barrier.exchange("hello", bytes([rank, 0, 255]), TIMEOUT_S)

        with ThreadPoolExecutor(3) as pool:
            results = list(pool.map(one, range(3), timeout=20))
        assert results == [{rank: bytes([rank, 0, 255]) for rank in range(3)}] * 3

    def test_works_behind_a_prefix(self, store: Any, session: int) -> None:
        """Engines hand over their own store, which has a prefix."""
        barrier = StartBarrier(StoreConnections(PrefixStore("engine", store)), f"s{session}", Rank(0), 1)
        assert barrier.exchange("hello", b"", TIMEOUT_S) == {0: b""}

    def test_names_all_ranks_that_are_missing_at_once(self, connections: StoreConnections, session: int) -> None:
        barrier = StartBarrier(connections, f"s{session}", Rank(1), 5)
        barrier.put("hello", b"x", TIMEOUT_S)
        started = time.monotonic()
        with pytest.raises(WaitTimeout, match="0, 2, 3, 4") as error:
            barrier.gather("hello", 0.3)
        assert time.monotonic() - started < 1.5
        assert error.value.who == "rank(s) 0, 2, 3, 4"

    def test_waits_for_the_ranks_named(self, connections: StoreConnections, session: int) -> None:
        barrier = StartBarrier(connections, f"s{session}", Rank(2), 5)
        barrier.put("hello", b"x", TIMEOUT_S)
        assert barrier.gather("hello", TIMEOUT_S, ranks=[2]) == {2: b"x"}

    def test_second_rank_of_the_same_number_is_noticed(self, store: Any, session: int) -> None:
        class Overwritten:
            """A store in which another process always writes last."""

            def __init__(self, inner: Any) -> None:
                self.inner = inner

            def clone(self) -> Overwritten:
                return self

            def set(self, key: str, value: str) -> None:
                self.inner.set(key, value)
                self.inner.set(key, "b:00")

            def check(self, keys: list[str]) -> bool:
                return bool(self.inner.check(keys))

            def get(self, key: str) -> bytes:
                return bytes(self.inner.get(key))

            def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
                return bytes(self.inner.compare_set(key, expected_value, desired_value))

        barrier = StartBarrier(StoreConnections(Overwritten(store.clone())), f"s{session}", Rank(1), 2)
        with pytest.raises(StoreLost, match="two ranks 1"):
            barrier.put("hello", b"mine", TIMEOUT_S)

    def test_blob_is_bounded(self, connections: StoreConnections, session: int) -> None:
        barrier = StartBarrier(connections, f"s{session}", Rank(0), 1)
        with pytest.raises(ValueError, match=f"at most {BLOB_BYTES_MAX}"):
            barrier.put("hello", bytes(BLOB_BYTES_MAX + 1), TIMEOUT_S)


class TestEpochRegister:
    def test_only_one_of_many_writers_wins(self, connections: StoreConnections, session: int) -> None:
        """Eight writers with a connection each, as eight processes have."""
        registers = [EpochRegister(connections, session, Rank(rank), TIMEOUT_S) for rank in range(8)]
        gate = threading.Barrier(8)

        def write(register: EpochRegister) -> EpochValue | None:
            gate.wait(10)
            return register.advance(None, Epoch(1))

        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(write, registers, timeout=20))
        winners = [value for value in results if value is not None]
        assert len(winners) == 1
        assert all(register.read() == winners[0] for register in registers)

    def test_advances_from_the_value_in_force_only(self, connections: StoreConnections, session: int) -> None:
        register = EpochRegister(connections, session, Rank(0), TIMEOUT_S)
        assert register.read() is None
        first = register.advance(None, Epoch(1))
        assert first is not None
        second = register.advance(first, Epoch(2))
        assert second is not None
        assert register.advance(first, Epoch(3)) is None
        assert register.read() == second
        with pytest.raises(ValueError, match="epochs grow"):
            register.advance(second, Epoch(2))

    def test_missing_key_with_an_expectation_is_a_failure(self, connections: StoreConnections, session: int) -> None:
        register = EpochRegister(connections, session, Rank(0), TIMEOUT_S)
        assert register.advance(EpochValue(Epoch(1), Rank(0), "nx"), Epoch(2)) is None
        assert register.read() is None

    def test_values_are_unique_and_never_numbers(self, connections: StoreConnections, session: int) -> None:
        register = EpochRegister(connections, session, Rank(3), TIMEOUT_S)
        value = register.advance(None, Epoch(1))
        assert value is not None
        assert not str(value).replace(":", "").isdigit()
        assert EpochValue.parse(str(value).encode()) == value
        other = EpochRegister(connections, session + (1 << 32), Rank(3), TIMEOUT_S).advance(None, Epoch(1))
        assert other != value


class TestServerTrouble:
    """The server in another process, stopped or dead."""

    @pytest.fixture
    def server(self, new_peer: Callable[..., Peer]) -> tuple[Peer, Any]:
        peer = new_peer(connect=False)
        port = peer.connect(0, serve=True)
        return peer, connect_store("127.0.0.1", port, False, 2, 10.0)

    def test_every_call_on_a_stopped_server_is_bounded(self, server: tuple[Peer, Any]) -> None:
        peer, store = server
        connections = StoreConnections(store)
        register = EpochRegister(connections, 1, Rank(1), 0.3)
        barrier = StartBarrier(connections, "s", Rank(1), 2)
        peer.stop()
        calls: list[tuple[Callable[[], Any], type[Exception], str]] = [
            (lambda: register.advance(None, Epoch(1)), AmbiguousOutcome, "rank 1 cannot tell whether 1:1:n"),
            (register.read, WaitTimeout, "store server 127.0.0.1.*read the epoch"),
            (lambda: barrier.put("hello", b"", 0.3), WaitTimeout, "store server 127.0.0.1.*hello/1"),
            (lambda: barrier.gather("hello", 0.3), WaitTimeout, r"store server .*rank\(s\) 0, 1"),
            (lambda: agree_session(connections, "run", False, 0.3), WaitTimeout, "session id"),
            (lambda: connect_store("127.0.0.1", store.port, False, 2, 0.3), WaitTimeout, "accept a connection"),
            (lambda: open_link(connections, 0.3), WaitTimeout, "rank 0: its end of the link of epoch 1"),
        ]
        for call, kind, text in calls:
            started = time.monotonic()
            with pytest.raises(kind, match=text):
                call()
            assert time.monotonic() - started < 2.0

    def test_dead_server_is_lost_at_once(self, server: tuple[Peer, Any]) -> None:
        peer, store = server
        connections = StoreConnections(store)
        register = EpochRegister(connections, 1, Rank(1), TIMEOUT_S)
        assert register.advance(None, Epoch(1)) is not None
        peer.kill()
        peer.wait(10)
        store.set("lost", "x")  # the fact behind reading again: it reports success although nobody is there
        started = time.monotonic()
        with pytest.raises((StoreLost, WaitTimeout), match="store server"):
            StartBarrier(connections, "s", Rank(1), 2).put("hello", b"", 1.0)
        assert time.monotonic() - started < 2.0

    def test_process_with_a_call_stuck_in_the_server_exits(
        self, server: tuple[Peer, Any], new_peer: Callable[..., Peer]
    ) -> None:
        peer, store = server
        client = new_peer(connect=False, interpreter=True)
        client.connect(store.port)
        peer.stop()
        client.open(session=1, epoch=1, connect_s=0.3)
        assert client.expect("refused")["error"] == "WaitTimeout"
        client.tell("exit")
        client.expect("exiting")
        assert client.wait(30) == 0

    def test_waiting_for_a_server_that_dies_ends(self, server: tuple[Peer, Any]) -> None:
        peer, store = server
        connections = StoreConnections(store)
        barrier = StartBarrier(connections, "s", Rank(1), 2)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(barrier.gather, "hello", 20.0)
            time.sleep(0.2)
            peer.kill()
            started = time.monotonic()
            with pytest.raises((StoreLost, WaitTimeout), match="store server"):
                waiting.result(25)
        assert time.monotonic() - started < 3.0


def open_link(connections: StoreConnections, connect_s: float) -> GlooLink:
    return GlooLink.open(
        connections,
        session=1,
        epoch=Epoch(1),
        rank=Rank(1),
        leader=Rank(0),
        follower=Rank(1),
        lease_s=1.0,
        connect_s=connect_s,
    )


class TestConnecting:
    def test_absent_server_is_named(self) -> None:
        probe = connect_store("127.0.0.1", 0, True, 1, 5.0)
        port = probe.port
        del probe
        with pytest.raises(WaitTimeout, match=f"127.0.0.1:{port}"):
            connect_store("127.0.0.1", port, False, 2, 0.5)

    def test_port_that_is_taken_is_a_configuration_error(self, store: Any) -> None:
        with pytest.raises(ConfigError, match="free MASTER_PORT"):
            connect_store("127.0.0.1", store.port, True, 2, 2.0)


def test_bounded_call_passes_results_and_errors_on(connections: StoreConnections) -> None:
    assert run_bounded(lambda: 5, 1.0, who="nobody", what="return") == 5

    def fail(own: object) -> None:
        raise KeyError("why")

    with pytest.raises(KeyError, match="why"):
        connections.call(fail, 5.0, what="look up")


EXIT_WITH_LATE_CALLS = """
from datetime import timedelta
from torch.distributed import HashStore
from kvcached_dist.coord.core.errors import WaitTimeout
from kvcached_dist.coord.links import bounded

bounded._EXIT_JOIN_S = 0.1
for index in range(40):
    try:
        bounded.run_bounded(
            lambda: HashStore().wait(["never"], timedelta(milliseconds=300 + 25 * index)), 0.001, who="w", what="w"
        )
    except WaitTimeout:
        continue
"""


def test_calls_that_return_while_the_interpreter_exits_do_not_abort_it() -> None:
    """Some of the calls that were given up come back in the middle of finalisation."""
    exited = subprocess.run([sys.executable, "-c", EXIT_WITH_LATE_CALLS], cwd=ROOT, timeout=50, check=False)
    assert exited.returncode == 0


class CountingStore:
    """A store that counts its connections; ``get`` blocks until it is told to go on."""

    def __init__(self, go_on: threading.Event) -> None:
        self.clones = 0
        self.go_on = go_on

    def clone(self) -> Any:
        self.clones += 1
        return self

    def get(self, key: str) -> bytes:
        self.go_on.wait(10)
        return key.encode()


class TestConnections:
    def test_connection_is_used_again(self) -> None:
        store: Any = CountingStore(threading.Event())
        connections = StoreConnections(store)
        assert [connections.call(lambda own: 1, 5.0, what="one") for _ in range(5)] == [1] * 5
        assert store.clones == 1
        connections.close()
        connections.close()

    def test_calls_at_the_same_time_have_one_each(self) -> None:
        go_on = threading.Event()
        store: Any = CountingStore(go_on)
        connections = StoreConnections(store)
        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(connections.call, lambda own: own.get("k"), 5.0, what="k") for _ in range(3)]
            while store.clones < 3:
                time.sleep(0.001)
            go_on.set()
            assert [call.result(5) for call in calls] == [b"k"] * 3

    def test_calls_that_are_stuck_are_counted_and_bounded(self) -> None:
        go_on = threading.Event()
        store: Any = CountingStore(go_on)
        connections = StoreConnections(store)
        for _ in range(STUCK_MAX):
            with pytest.raises(WaitTimeout):
                connections.call(lambda own: own.get("k"), 0.01, what="k")
        with pytest.raises(StoreLost, match=f"{STUCK_MAX} calls are stuck, not tried: k"):
            connections.call(lambda own: own.get("k"), 0.01, what="k")
        go_on.set()
        until = time.monotonic() + 5
        while time.monotonic() < until:
            try:
                assert connections.call(lambda own: own.get("k"), 5.0, what="k") == b"k"
                break
            except StoreLost:
                time.sleep(0.01)
        else:
            pytest.fail("threads that came back still count as stuck")


TORCHRUN = {"MASTER_ADDR": "h", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "4"}


class TestTorchrun:
    def test_rank_zero_serves_unless_the_agent_does(self) -> None:
        world = TorchrunWorld.from_environment(TORCHRUN)
        assert (world.host, world.port, world.rank, world.world, world.serves) == ("h", 29500, 0, 4, True)
        agent = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "j"}
        assert not TorchrunWorld.from_environment(agent).serves
        assert not TorchrunWorld.from_environment(TORCHRUN | {"RANK": "3"}).serves

    def test_every_restart_has_a_name_of_its_own(self) -> None:
        names = {
            TorchrunWorld.from_environment(
                TORCHRUN | {"TORCHELASTIC_RUN_ID": "j", "TORCHELASTIC_RESTART_COUNT": str(count)}
            ).run_name
            for count in range(3)
        }
        assert names == {"j/0", "j/1", "j/2"}

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set.*127.0.0.1"),
            ({"MASTER_PORT": "http"}, "MASTER_PORT='http'.*29500"),
            ({"MASTER_PORT": "65536"}, "MASTER_PORT='65536'"),
            ({"RANK": "4"}, "RANK='4' is unusable; it is an integer from 0 to 3"),
            ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ],
    )
    def test_unusable_variables_are_named(self, change: dict[str, str], text: str) -> None:
        with pytest.raises(ConfigError, match=text):
            TorchrunWorld.from_environment(TORCHRUN | change)

    def test_connects(self) -> None:
        port = connect_store("127.0.0.1", 0, True, 1, 5.0).port
        world = TorchrunWorld.from_environment(TORCHRUN | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        store = world.connect(5.0)
        store.set("here", "x")
        assert store.get("here") == b"x"
