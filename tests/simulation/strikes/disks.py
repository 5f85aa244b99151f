"""How the disks of bookies fail. What loses stored entries strikes the seed's loser alone (options.py)."""

import asyncio
import errno
import random
from collections.abc import Callable, Mapping

from magnetar.runtime.sim.disk import FileFault
from tests.simulation.cluster import Cluster

DATA = "/data/"


def _node(cluster: Cluster, rng: random.Random) -> str:
    return rng.choice(cluster.bookie_names)


def _loser(cluster: Cluster) -> str | None:
    """None when it is gone."""
    names = [f"bookie-{cluster.options.loser + 1}"]
    return names[0] if names[0] in cluster.bookie_names else None


def _fail(cluster: Cluster, rng: random.Random, kind: str) -> None:
    name = _node(cluster, rng)
    cluster.simulation.add_line(f"fault: the next {kind} of {name} fails")
    cluster.simulation.node(name).disk.faults.append(FileFault(kind, DATA, errno.EIO, skip=rng.randint(0, 5)))


def _sync_error(cluster: Cluster, rng: random.Random) -> None:
    _fail(cluster, rng, "fdatasync")


def _write_error(cluster: Cluster, rng: random.Random) -> None:
    _fail(cluster, rng, "pwrite")


def _read_error(cluster: Cluster, rng: random.Random) -> None:
    """While it runs: what a start cannot read counts as lost (bookie/store/state_log.py); only the loser may."""
    name = _node(cluster, rng)
    disk = cluster.simulation.node(name).disk
    fault = FileFault("pread", DATA, errno.EIO, skip=rng.randint(0, 5))
    cluster.simulation.add_line(f"fault: a pread of {name} fails")
    disk.faults.append(fault)

    def dies(node: str, power_loss: bool) -> None:
        if node == name and name != _loser(cluster):
            fault.times = 0

    cluster.simulation.on_crash.append(dies)
    if name not in cluster.serving:
        dies(name, False)
    elif name == _loser(cluster):
        cluster.observer.damage(name)


def _name_error(cluster: Cluster, rng: random.Random) -> None:
    _fail(cluster, rng, rng.choice(("create", "rename", "sync_directory")))


# ---------------------------------------------------------------------------------- room and speed
def _shrink(cluster: Cluster, rng: random.Random, share: float) -> None:
    name = _node(cluster, rng)
    disk = cluster.simulation.node(name).disk
    disk.capacity_bytes = int(disk.used_bytes() / share)
    cluster.simulation.add_line(f"fault: the disk of {name} is {share:.0%} full")
    cluster.later(2.0 + rng.expovariate(1.0 / cluster.options.down_s), _free, cluster, name)


def _free(cluster: Cluster, name: str) -> None:
    cluster.simulation.add_line(f"the disk of {name} has room again")
    cluster.simulation.node(name).disk.capacity_bytes = 1 << 40


def _disk_full(cluster: Cluster, rng: random.Random) -> None:
    _shrink(cluster, rng, 1.0)


def _read_only(cluster: Cluster, rng: random.Random) -> None:
    _shrink(cluster, rng, 0.96)


def _slow_disk(cluster: Cluster, rng: random.Random) -> None:
    name = _node(cluster, rng)
    delays = cluster.simulation.node(name).disk_delays
    healthy_s, delays.mean_s = delays.mean_s, delays.mean_s * rng.choice((10, 100))
    cluster.simulation.add_line(f"fault: the disk of {name} takes {delays.mean_s:.3f} s for a call")

    def recover() -> None:
        delays.mean_s = healthy_s

    cluster.later(rng.expovariate(1.0 / cluster.options.down_s), recover)


def _disk_hangs(cluster: Cluster, rng: random.Random) -> None:
    name = _node(cluster, rng)
    delays = cluster.simulation.node(name).disk_delays
    cluster.simulation.add_line(f"fault: the disk of {name} hangs")
    before = delays.stall_rate, delays.stall_s
    delays.stall_rate, delays.stall_s = 1.0, 6.0

    def recover() -> None:
        delays.stall_rate, delays.stall_s = before

    cluster.later(min(10.0, rng.expovariate(1.0 / cluster.options.down_s)), recover)


# ---------------------------------------------------------------------------------- what was stored is lost
def _log(cluster: Cluster, rng: random.Random) -> tuple[str, str] | None:
    """The loser, and one of its logs of entries that holds something."""
    name = _loser(cluster)
    if name is None:
        return None
    disk = cluster.simulation.node(name).disk
    logs = [path for path in disk.list_paths() if path.endswith(".log") and disk.find_inode(path).durable.size]
    return (name, rng.choice(logs)) if logs else None


def _bit_flip(cluster: Cluster, rng: random.Random) -> None:
    found = _log(cluster, rng)
    if found is None:
        return
    name, path = found
    disk = cluster.simulation.node(name).disk
    pages = [number for number, _ in disk.find_inode(path).durable.numbered_pages()]
    if not pages:
        return
    offset = rng.choice(pages) * 4096 + rng.randrange(4096)
    cluster.simulation.add_line(f"fault: a bit of {path} flips at {offset}")
    cluster.observer.damage(name)
    disk.flip_bit(path, offset, rng.randrange(8))


def _truncated_log(cluster: Cluster, rng: random.Random) -> None:
    found = _log(cluster, rng)
    if found is None:
        return
    name, path = found
    disk = cluster.simulation.node(name).disk
    size = rng.randrange(disk.find_inode(path).durable.size)
    cluster.simulation.add_line(f"fault: {path} ends at {size} of {disk.find_inode(path).durable.size}")
    cluster.observer.damage(name)
    disk.truncate_file(path, size)


def _replaced(cluster: Cluster, rng: random.Random) -> None:
    name = _loser(cluster)
    if name is not None and name in cluster.bookies:
        cluster.background(cluster.replace(name))


def _rolled_back(cluster: Cluster, rng: random.Random) -> None:
    name = _loser(cluster)
    if name is not None:
        within = rng.random() < 0.5
        cluster.background((_roll_back_within if within else _roll_back)(cluster, name, rng.uniform(0.5, 4.0)))


async def _roll_back_within(cluster: Cluster, name: str, after_s: float) -> None:
    """A crash-consistent copy of a bookie that runs; it goes on, dies, and the copy is put in place. Only a copy that
    the bookie's last note in the metadata is past: another one looks as any disk after a crash."""
    bookie = cluster.bookies.get(name)
    if bookie is None or not cluster.simulation.is_node_running(name):
        return
    copied = bookie.store.journal_position
    disk = cluster.simulation.node(name).disk
    backup = disk.take_snapshot()
    await asyncio.sleep(after_s)
    if name in cluster.gone or cluster.healed or cluster.bookies.get(name) is not bookie:
        return
    if not cluster.simulation.is_node_running(name) or bookie.journal_position_recorder.noted <= copied:
        return
    cluster.simulation.crash(name, power_loss=True)
    cluster.simulation.add_line(f"fault: the disk of {name} is a copy that was made {after_s:.3f} s ago, while it ran")
    cluster.observer.disk_rolled_back(name)
    disk.restore_snapshot(backup)


async def _roll_back(cluster: Cluster, name: str, after_s: float) -> None:
    """A backup of a stopped bookie; it starts, goes on, dies, and the backup is put back: to the same bookie. One of a
    predecessor that the operator had forgotten would be refused at its start, and rightly."""
    identity = cluster.bookies[name].id if name in cluster.bookies else None
    cluster.simulation.crash(name, power_loss=True)
    disk = cluster.simulation.node(name).disk
    backup = disk.take_snapshot()
    starts = cluster.starts[name]
    while cluster.starts[name] == starts or not cluster.simulation.is_node_running(name):
        await asyncio.sleep(0.1)
        if name in cluster.gone or cluster.healed:
            return
    await asyncio.sleep(after_s)
    if name in cluster.gone or cluster.healed or cluster.bookies[name].id != identity:
        return
    cluster.simulation.crash(name, power_loss=True)
    cluster.simulation.add_line(f"fault: the disk of {name} is a copy that was made {after_s:.3f} s ago")
    cluster.observer.disk_rolled_back(name)
    disk.restore_snapshot(backup)


DISKS: Mapping[str, Callable[[Cluster, random.Random], None]] = {
    "sync-error": _sync_error,
    "write-error": _write_error,
    "read-error": _read_error,
    "name-error": _name_error,
    "disk-full": _disk_full,
    "read-only": _read_only,
    "slow-disk": _slow_disk,
    "disk-hangs": _disk_hangs,
    "bit-flip": _bit_flip,
    "truncated-log": _truncated_log,
    "replaced": _replaced,
    "rolled-back": _rolled_back,
}
