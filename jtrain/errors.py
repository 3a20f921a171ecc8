"""The errors that a user can meet, each with the exit code it ends the program with.

A message names the field or file, the value it has, and what to write instead. `jtrain` prints it without a
traceback (`--debug` shows one). Everything that is not a `JtrainError` is a bug of ours: exit code 70.
"""

from __future__ import annotations

from enum import IntEnum

LOST_PEER_SIGNS = (
    "gloo",
    "remote process exited",  # NCCL
    "connection closed by peer",
    "connection reset by peer",
    "failed to connect to all addresses",
    "socket closed",
    "heartbeat",
    "barrier timed out",
    "coordination service",
    "coordination agent",
)
"""What stands in the messages of jax when a peer or the coordinator is gone."""


class Exit(IntEnum):
    """Exit codes of every `jtrain` program. Supervisors and job scripts decide by them whether to restart."""

    DONE = 0
    PREEMPTED_SAVED = 10
    PREEMPTED_NOT_SAVED = 11
    PEER_LOST = 12
    HUNG = 13
    STORAGE = 14
    NUMBERS = 15
    CONFIG = 64
    DATA = 65
    CHECKPOINT = 66
    BUG = 70


INTERRUPTED = 130
"""Exit code of a program that Ctrl-C ended, as shells have it."""


class JtrainError(Exception):
    """Base of all errors with a remedy.

    Args:
      message: what is wrong: the field or file, and the value it has.
      remedy: what to write or do instead; printed on a line of its own.
    """

    exit_code: Exit = Exit.BUG

    def __init__(self, message: str, remedy: str | None = None):
        super().__init__(message if remedy is None else f"{message}\n  {remedy}")
        self.message = message
        self.remedy = remedy


class ConfigError(JtrainError):
    """A config value, or a run directory that is another run's or in use."""

    exit_code = Exit.CONFIG


class DataError(JtrainError):
    """Missing, empty, unreadable or malformed data; a tokenizer that does not fit."""

    exit_code = Exit.DATA


class CheckpointError(JtrainError):
    """A checkpoint that is missing, damaged, or of another model."""

    exit_code = Exit.CHECKPOINT


class StorageError(JtrainError):
    """A directory that can't be written, or a disk that is full."""

    exit_code = Exit.STORAGE


class NumbersError(JtrainError):
    """The loss or the gradients are not finite, or training diverged."""

    exit_code = Exit.NUMBERS


class PeerLostError(JtrainError):
    """Another process of the run, or the coordinator, was lost."""

    exit_code = Exit.PEER_LOST


class Preempted(JtrainError):
    """The run was asked to stop (SIGTERM). `saved` says whether the last step is durable."""

    def __init__(self, message: str, *, saved: bool):
        super().__init__(message)
        self.saved = saved
        self.exit_code = Exit.PREEMPTED_SAVED if saved else Exit.PREEMPTED_NOT_SAVED
