"""Services of a host beside its engine and executor: functions of a model, device operations, an earlier state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from lockstep.core.contract.commands import BatchPlan, Command, CompileGrammar, Step
from lockstep.core.contract.events import ObservedEvent, RequestArrived
from lockstep.host.adapters import AdapterLoader, AdaptersLog
from lockstep.host.cache_moves import PageMover
from lockstep.host.handover.results import Handover
from lockstep.host.media.encoding import MediaEncoder
from lockstep.host.rank_agreement import RankAgreement
from lockstep.host.weights import WeightLoader, WeightsLog

Observer = Callable[[ObservedEvent, Step], None]
GrammarCompiler = Callable[[CompileGrammar, Callable[[str], None]], None]
"""Compiles a grammar off the loop, then calls its second argument, from any thread, with the error or ""."""


class TextWatch(Protocol):
    """The text of one request with stop texts or stop regexes."""

    def push(self, number: int, token: int) -> tuple[bool, int]:
        """Append output token `number`, counted from 0. A number that was pushed before resets the text to that place.

        Returns: whether the text contains a stop text, and how many of the newest tokens may begin one.
        """


class Profiler(Protocol):
    """A profiler of the device. Its methods never raise: a failure of the profiler does not stop serving."""

    def start(self) -> None:
        """Profile from the next launch on."""

    def stop(self) -> None:
        """Stop after all batches launched so far and write the trace. No effect if no profile was started."""

    def batch(self, plan: BatchPlan) -> AbstractContextManager[None]:
        """Return a context for the launch of a plan."""


@dataclass(frozen=True, slots=True)
class RequestServices:
    """How requests are received, and functions of the model and its tokenizer that they need.

    Args:
        check: raises ConfigError for a request that this runtime cannot serve; the message rejects it.
        watch_text: makes the watch of a request with stop texts; without it such requests are rejected.
        compile_grammar: without it, a request under a grammar is rejected with that reason.
        receive_interval: decodes between two receptions of messages while batches run, at most; see `ReceiveSkipper`.
    """

    check: Callable[[RequestArrived], None] | None = None
    watch_text: Callable[[RequestArrived], TextWatch] | None = None
    compile_grammar: GrammarCompiler | None = None
    receive_interval: int = 1


@dataclass(frozen=True, slots=True)
class DeviceServices:
    """Operations on the device besides batches.

    Args:
        profiler: without one a request for a profile is logged and ignored.
        weight_loader: changes weights and releases memory; without one such commands are refused.
        adapters: loads adapters on the device; without it a load fails.
        mover: moves KV between the device, host memory and storage; without it the engine must have no tiers.
        handover: transfers of requests between prefill and decode engines; without it the engine must be mixed.
        encoder: encodes media; without it no content can be encoded.
        agreement: with the other data-parallel ranks; without it the engine must have one rank.
    """

    profiler: Profiler | None = None
    weight_loader: WeightLoader | None = None
    adapters: AdapterLoader | None = None
    mover: PageMover | None = None
    handover: Handover | None = None
    encoder: MediaEncoder | None = None
    agreement: RankAgreement | None = None


@dataclass(frozen=True, slots=True)
class EarlierGeneration:
    """State of an earlier generation of the engine, which the host continues.

    Args:
        weights: the weights log. None: a new one.
        adapters: the adapters log. None: a new one.
        orders: commands that are performed first: those of the engine's step at its restart.
    """

    weights: WeightsLog | None = None
    adapters: AdaptersLog | None = None
    orders: Sequence[Command] = ()
