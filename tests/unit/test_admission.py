"""Admission turns of a physical GPU: exclusion, fairness, dead holders, and clear errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvcached_dist.admission import POLL_S, YIELD_S, AdmissionTurn
from kvcached_dist.coord.core.errors import ConfigError, WaitTimeout

CARD = "0000:3b:00.0"


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


def test_file_name_is_made_from_the_card_id_and_open_to_the_group(tmp_path: Path) -> None:
    turn = AdmissionTurn(str(tmp_path), CARD)
    assert [p.name for p in tmp_path.iterdir()] == ["kvcached_dist-growth-0000_3b_00_0.lock"]
    assert turn.path.stat().st_mode & 0o777 == 0o660


def test_turns_of_one_card_exclude_one_another_and_other_cards_do_not_wait(tmp_path: Path) -> None:
    ours, theirs = AdmissionTurn(str(tmp_path), CARD), AdmissionTurn(str(tmp_path), CARD)
    other_card = AdmissionTurn(str(tmp_path), "0000:5e:00.0")
    with ours.take(0):
        with pytest.raises(WaitTimeout), theirs.take(0):
            pytest.fail("two turns of one card at the same time")
        with pytest.raises(WaitTimeout), ours.take(0):
            pytest.fail("one object gave two turns")
        with other_card.take(0):
            pass
    with theirs.take(0):
        pass


def test_a_wait_ends_at_its_deadline_and_names_card_and_holder(tmp_path: Path) -> None:
    fake = FakeTime()
    waiter = AdmissionTurn(str(tmp_path), CARD, seed=7, clock=fake.clock, sleep=fake.sleep)
    with AdmissionTurn(str(tmp_path), CARD).take(0), pytest.raises(WaitTimeout) as caught, waiter.take(0.05):
        pass
    assert fake.now == pytest.approx(100.05)
    assert all(0 < pause <= 0.0015 for pause in fake.sleeps)
    assert len(set(fake.sleeps)) > 10, "the pauses carry jitter"
    assert CARD in str(caught.value)
    assert f"held by pid {os.getpid()}" in str(caught.value)


def test_jitter_follows_the_seed(tmp_path: Path) -> None:
    def pauses(seed: int) -> list[float]:
        fake = FakeTime()
        waiter = AdmissionTurn(str(tmp_path), CARD, seed=seed, clock=fake.clock, sleep=fake.sleep)
        with holder.take(0), pytest.raises(WaitTimeout), waiter.take(0.01):
            pass
        return fake.sleeps

    holder = AdmissionTurn(str(tmp_path), CARD)
    assert pauses(1) == pauses(1)
    assert pauses(1) != pauses(2)


def test_an_error_inside_a_turn_gives_it_back(tmp_path: Path) -> None:
    turn = AdmissionTurn(str(tmp_path), CARD)
    with pytest.raises(ZeroDivisionError), turn.take(0):
        raise ZeroDivisionError
    with turn.take(0):
        pass


def test_the_last_holder_steps_back_once_for_a_waiter(tmp_path: Path) -> None:
    # R10: neither of two engines that always want the turn may get more than 70 % of them.
    order: list[int] = []
    start = threading.Barrier(2)

    def contend(me: int) -> None:
        turn = AdmissionTurn(str(tmp_path), CARD, seed=me)
        start.wait()
        while len(order) < 40:
            with turn.take(5):
                order.append(me)
                time.sleep(0.0005)

    threads = [threading.Thread(target=contend, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    share = order[:40].count(0) / 40
    assert 0.3 <= share <= 0.7, order


def test_stepping_back_ends_with_the_turn_of_the_waiter_or_after_its_time(tmp_path: Path) -> None:
    fake = FakeTime()
    ours = AdmissionTurn(str(tmp_path), CARD, clock=fake.clock, sleep=fake.sleep)
    waiter = AdmissionTurn(str(tmp_path), CARD, clock=fake.clock, sleep=lambda _: pytest.fail("has to wait"))
    with ours.take(0):
        token = int.from_bytes(ours.path.read_bytes()[8:16], "little")

    def waits(somebody: int) -> None:
        record = somebody.to_bytes(8, "little") + time.monotonic_ns().to_bytes(8, "little")
        ours.path.write_bytes(ours.path.read_bytes()[:32].ljust(32, b"\0") + record.ljust(32, b"\0"))

    waits(token ^ 2)
    with ours.take(1):
        assert fake.sleeps == pytest.approx([POLL_S] * round(YIELD_S / POLL_S))
    fake.sleeps.clear()
    waits(token)
    with ours.take(1):
        assert fake.sleeps == [], "does not wait for itself"
    waits(token ^ 2)
    with waiter.take(0):
        pass
    with ours.take(1):
        assert fake.sleeps == [], "somebody has had a turn in between"


def test_a_waiter_that_gave_up_is_not_waited_for(tmp_path: Path) -> None:
    fake = FakeTime()
    ours = AdmissionTurn(str(tmp_path), CARD, clock=fake.clock, sleep=fake.sleep)
    theirs = AdmissionTurn(str(tmp_path), CARD, clock=fake.clock, sleep=fake.sleep)
    with ours.take(0), pytest.raises(WaitTimeout), theirs.take(0.005):
        pass
    fake.sleeps.clear()
    with ours.take(1):
        assert fake.sleeps == []


def test_a_rank_alone_never_steps_back(tmp_path: Path) -> None:
    fake = FakeTime()
    turn = AdmissionTurn(str(tmp_path), CARD, clock=fake.clock, sleep=fake.sleep)
    for _ in range(3):
        with turn.take(1):
            pass
    assert fake.sleeps == []


def test_capacity_is_never_overdrawn_by_ranks_of_one_card(tmp_path: Path) -> None:
    # R10, R13: the check and the creation lie in one turn, so every check sees all creations before it.
    free, created, refused = [10], [], []
    start = threading.Barrier(4)

    def rank(me: int) -> None:
        turn = AdmissionTurn(str(tmp_path), CARD, seed=me)
        start.wait()
        with turn.take(5):
            seen = free[0]
            time.sleep(0.002)
            if seen >= 3:
                free[0] = seen - 3
                created.append(me)
            else:
                refused.append(me)

    threads = [threading.Thread(target=rank, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (free[0], len(created), len(refused)) == (1, 3, 1)


HOLD = """
import sys, time
from kvcached_dist.admission import AdmissionTurn
with AdmissionTurn(sys.argv[1], sys.argv[2]).take(5):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_killed_holder_does_not_block(tmp_path: Path) -> None:
    # R12 c
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path), CARD], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        turn = AdmissionTurn(str(tmp_path), CARD)
        with pytest.raises(WaitTimeout, match=f"held by pid {holder.pid}"), turn.take(0.01):
            pass
        holder.send_signal(signal.SIGKILL)
        started = time.monotonic()
        with turn.take(1):
            assert time.monotonic() - started < 1
    finally:
        holder.kill()
        holder.communicate()
    turn.close()
    assert list(tmp_path.iterdir()) == []


def test_a_symbolic_link_is_refused_at_start_and_at_a_turn(tmp_path: Path) -> None:
    # R12 a
    target = tmp_path / "elsewhere"
    target.touch()
    locks = tmp_path / "locks"
    locks.mkdir()
    turn = AdmissionTurn(str(locks), CARD)
    turn.path.unlink()
    turn.path.symlink_to(target)
    with pytest.raises(ConfigError, match="symbolic link"):
        AdmissionTurn(str(locks), CARD)
    with pytest.raises(ConfigError, match="symbolic link"), turn.take(0):
        pass
    turn.path.unlink()
    with turn.take(0):
        pass


@pytest.mark.parametrize("directory", ["/proc/self", "/nonexistent/locks", "/etc/hostname"])
def test_an_unusable_directory_is_refused_at_start(directory: str) -> None:
    # R12 d; /proc/self refuses new files even to root
    with pytest.raises(ConfigError) as caught:
        AdmissionTurn(directory, CARD)
    text = str(caught.value)
    assert text.startswith(f"KVCACHED_PHYSICAL_GROWTH_LOCK_DIR={directory}: ")
    assert text.endswith("KVCACHED_PHYSICAL_GROWTH_LOCK_DIR=/tmp")
    assert "\n" not in text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere; /proc/self above covers it")
def test_a_directory_without_write_permission_is_refused_at_start(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        AdmissionTurn(str(tmp_path), CARD)


def test_a_fifo_in_place_of_the_file_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "kvcached_dist-growth-G0.lock")
    with pytest.raises(ConfigError, match="not a regular file"):
        AdmissionTurn(str(tmp_path), "G0")


@pytest.mark.parametrize("left_over", [b"8 bytes.", b"\xff" * 200, b""])
def test_a_file_of_another_layout_is_accepted(tmp_path: Path, left_over: bytes) -> None:
    # R12 e
    (tmp_path / "kvcached_dist-growth-G0.lock").write_bytes(left_over)
    turn = AdmissionTurn(str(tmp_path), "G0")
    with turn.take(0), pytest.raises(WaitTimeout, match=f"pid {os.getpid()}"), turn.take(0):
        pass


def test_a_card_without_id_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="card id"):
        AdmissionTurn(str(tmp_path), " ")


def test_a_removed_file_does_not_make_two_turns(tmp_path: Path) -> None:
    first, second = AdmissionTurn(str(tmp_path), CARD), AdmissionTurn(str(tmp_path), CARD)
    with first.take(0):
        second.close()
        assert first.path.exists(), "a held file is not removed"
    stale = os.open(first.path, os.O_RDWR)
    first.close()
    assert not first.path.exists()
    first.close()
    with second.take(0):
        # A waiter that had opened the removed file would lock it now; it has to notice.
        assert not second._is_current(stale)
        assert second.path.exists()
    os.close(stale)


def test_a_waiter_moves_to_the_new_file(tmp_path: Path) -> None:
    first, second = AdmissionTurn(str(tmp_path), CARD), AdmissionTurn(str(tmp_path), CARD)
    got = threading.Event()

    def wait() -> None:
        with second.take(5):
            got.set()

    with first.take(0):
        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(0.003)
        first.path.unlink()
        assert not got.is_set()
    assert got.wait(5)
    waiter.join()
    assert second.path.exists(), "the turn was taken on a new file"
