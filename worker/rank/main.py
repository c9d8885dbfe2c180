"""Main loop of one rank: loads its shard, then executes Plans until a Stop message."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import msgspec

from worker.config import EngineConfig
from worker.memory import freeze_gc
from worker.niceness import RANK_NICENESS, yield_cpu_to_others
from worker.plan.channel import RankChannel
from worker.plan.messages import (
    Drafts,
    Failure,
    Fetch,
    PlanMessage,
    Result,
    Sample,
    Start,
    Stop,
)
from worker.plan.rendezvous import Rendezvous, published
from worker.protocol.analyzed import analyzed
from worker.protocol.log import log_as
from worker.protocol.retry import may_heal

if TYPE_CHECKING:
    from worker.rank.rank import Rank, RankStep

logger = logging.getLogger(__name__)


def run_rank(
    rank: int, config: EngineConfig, directory: str, rendezvous: Rendezvous | None = None
) -> None:
    """Runs one rank until the coordinator stops it; blocks.

    Args:
        rank: index of this rank in the group; on CPU, rank 0 may also run here.
        config: the group's engine configuration, equal on all ranks.
        directory: the group's private folder, with plan sockets and the rendezvous file.
        rendezvous: how ranks on several nodes connect to each other; None if all are on one node
            and use `directory`.

    Raises:
        Exception: the error that ended the rank, after notifying the coordinator.
    """
    with closing(RankChannel(directory, rendezvous)) as channel, ExitStack() as at_last:
        try:
            _load_and_serve(rank, config, directory, rendezvous, channel, at_last)
        except Exception as error:
            # Sent before shutting down the group, which takes a long time while peers wait in a
            # collective.
            channel.send(Failure(rank=rank, error=_root_cause(error), heals=may_heal(error)))
            raise


def _load_and_serve(
    number: int,
    config: EngineConfig,
    directory: str,
    rendezvous: Rendezvous | None,
    channel: RankChannel,
    at_last: ExitStack,
) -> None:
    """Loads the rank and executes Plans; `at_last` gets a callback that closes the rank."""
    # Imported lazily: the coordinator on CPU imports this module's package and must stay
    # torch-free.
    from worker.models.layers.tensor_parallel import TensorParallelGroup
    from worker.rank.memory import await_free_memory
    from worker.rank.rank import Rank, select_device

    device = select_device(config, number)
    if device.type == "cpu":
        yield_cpu_to_others(RANK_NICENESS)
    rank = Rank(config)
    await_free_memory(device, config.cache.gpu_memory_utilization)
    group = TensorParallelGroup.create(
        number, config.tensor_parallel_size, device, directory, rendezvous=rendezvous
    )
    at_last.callback(_close, rank)
    process = os.getpid() if rendezvous is None else 0
    channel.send(msgspec.structs.replace(rank.load(group), process=process))
    start = channel.receive()
    if isinstance(start, Start):
        ready = rank.allocate(start)
        freeze_gc()
        channel.send(ready)
        _execute_plans(number, rank, channel)


def _close(rank: Rank) -> None:
    """Closes the rank. If its group does not shut down, exits the process, which would otherwise
    hold the device's memory forever."""
    if not rank.close():
        logger.error("the process group did not shut down; exiting the process")
        os._exit(1)


def _execute_plans(number: int, rank: Rank, channel: RankChannel) -> None:
    held: RankStep | None = None  # a round ahead, whose result is sent after the next launch
    while True:
        message = channel.receive()
        step: RankStep | None = None
        match message:
            case PlanMessage(plan=plan):
                step = rank.launch(plan)
                if number == 0 and plan.masked and plan.drafts_under_grammar:
                    channel.send(Drafts(seq=plan.seq, token_ids=rank.drafts(plan.seq)))
            case Sample(seq=seq, masks=masks):
                step = rank.sample(seq, masks)
            case Fetch():
                pass
            case Stop():
                return
            case _:
                raise AssertionError(f"unexpected message to rank {number}: {message!r}")
        if number != 0:
            continue
        if held is not None:
            channel.send(Result(step=held.result()))
            held = None
        if step is not None and step.is_ahead:
            held = step
        elif step is not None and step.sampled is not None:
            channel.send(Result(step=step.result()))


def _root_cause(error: Exception) -> str:
    return "".join(traceback.format_exception(error))


def _exit_with_parent() -> None:
    """Ends this process when its parent exits, which closes the other end of stdin."""

    def watch() -> None:
        # Use the raw descriptor: a thread holding sys.stdin's lock would break a clean exit.
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main() -> None:
    """Entry point of a rank that runs as a child process: RANK DIRECTORY CONFIG_JSON [FD] in argv.

    FD is the listening socket of the rendezvous store, for rank 0 of a group on several nodes.
    """
    _exit_with_parent()
    rank, directory, config_json, *store_fd = sys.argv[1:]
    log_as(f"rank {rank} step")
    try:
        config = msgspec.json.decode(config_json, type=analyzed(EngineConfig))
        rendezvous = published(directory, int(store_fd[0])) if store_fd else None
        run_rank(int(rank), config, directory, rendezvous)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception:
        # The coordinator has the traceback and reports it once, at the end.
        sys.exit(1)


if __name__ == "__main__":
    main()
