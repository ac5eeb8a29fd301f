"""New processes of tests, forked from one server for each worker of pytest, which imports the libraries once."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import torch

IMPORTED = ["accelerate", "transformers.trainer", "hf_stitch.training", "hf_stitch.adapters.libraries.torch"]
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
MPIRUN = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE")
"""Names of the environment variables that the launchers set."""
LONGEST = 300
"""Seconds, so many that only processes that hang are stopped."""


def start(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Start a process that calls a function of a module."""
    context = multiprocessing.get_context("forkserver")  # forks before threads start
    context.set_forkserver_preload(IMPORTED)
    process = context.Process(target=target, args=arguments)
    process.start()
    return process


def exit_codes(*processes: BaseProcess) -> list[int | None]:
    for process in processes:
        process.join(LONGEST)
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run_ranks(
    count: int,
    target: Callable[..., None],
    *arguments: Any,
    names: tuple[str, str, str] = TORCHRUN,
    codes: list[int] | None = None,
) -> None:
    """Call ``target(rank, *arguments)`` in several processes, with the environment variables that a launcher sets.

    Raises:
        AssertionError: a process ended with another exit code than that of ``codes``, by default 0.

    """
    port = free_port()
    places = [dict(zip(names, map(str, (rank, rank, count)), strict=True)) for rank in range(count)]
    started = [start(run_rank, place, port, target, rank, *arguments) for rank, place in enumerate(places)]
    assert exit_codes(*started) == (codes or [0] * count)


def run_rank(place: dict[str, str], port: int, target: Callable[..., None], *arguments: Any) -> None:
    """Call ``target(*arguments)`` as one of several processes."""
    torch.set_num_threads(1)
    os.environ.update(place, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACCELERATE_USE_CPU="true")
    target(*arguments)
    torch.distributed.barrier()  # with torch 2.7, a process that is left alone hangs in the next line
    torch.distributed.destroy_process_group()
