"""Sampling by rows: penalties, masks, temperature, top-k, top-p, min-p, and our own counter-based draw."""

from lockstep.runtime.sampling.logprobs import Logprobs, logprobs_of
from lockstep.runtime.sampling.processors import LogitProcessor, LogitProcessorFactory
from lockstep.runtime.sampling.sampler import Sampled, Sampler
from lockstep.runtime.sampling.table import SamplingTable, check_allowed, check_sampling

__all__ = [
    "SamplingTable",
    "Sampler",
    "Sampled",
    "check_sampling",
    "check_allowed",
    "Logprobs",
    "logprobs_of",
    "LogitProcessor",
    "LogitProcessorFactory",
]
