"""A causal language model that transformers' code computes, with our attention: see the package."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from lockstep.core.contract.errors import ConfigError
from lockstep.runtime.attention.base import AttentionBackend
from lockstep.runtime.checkpoint import TensorSpec
from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.from_transformers.attending import NAME, CurrentPass, register
from lockstep.runtime.from_transformers.latent import is_latent, restore, take_latents
from lockstep.runtime.from_transformers.media_encoder import LibraryEncoder
from lockstep.runtime.from_transformers.mixers import take_mixers
from lockstep.runtime.from_transformers.routing import routed_experts
from lockstep.runtime.from_transformers.settings import read_library_model
from lockstep.runtime.from_transformers.split import Plan, RankLinear, follow, replace_linear
from lockstep.runtime.from_transformers.tensors import CheckpointNames, Held
from lockstep.runtime.from_transformers.trial import try_out
from lockstep.runtime.lora.slots import LoraTarget
from lockstep.runtime.models.language_model import CountedExperts, LanguageModel
from lockstep.runtime.models.layers import Maker
from lockstep.runtime.quantized.activations import choose_activations

log = logging.getLogger("lockstep.runtime")


class TransformersDecoder(LanguageModel):
    """A model of transformers on one rank. `prepare` must be called when its weights are in place."""

    def __init__(self, config: Mapping[str, Any], make: Maker) -> None:
        found = read_library_model(config)
        super().__init__(make, found.settings)
        choose_activations(make.fp8_activations, None, make.device)  # raises if rounded rows are required
        register()
        perceiving = bool(found.settings.media)
        made = made_on_meta(found.config, found.kind, perceiving=perceiving)
        plan = Plan(made, self.parallel.ranks)
        self.current = CurrentPass()
        held = materialise(made, plan, make)
        self.names = CheckpointNames(made, held, self.parallel.rank, self.parallel.ranks)
        follow(made, plan.styles, self.parallel, self.current)
        self.base = made.base_model
        self.decoder = self.base.get_decoder() if perceiving else self.base
        inside = next((f"{name}." for name, one in self.base.named_modules() if one is self.decoder and name), "")
        self.media_encoder = LibraryEncoder(self.base, self.dtype, self.device) if perceiving else None
        self.embedding_size = _embedding_size(self.decoder, self.base)
        self.embeds_apart = perceiving and bool(self.embedding_size)
        of_width = make.device.type == "cpu"  # kernels of GPUs have no heads of this width yet
        self.latents = tuple(take_latents(self.decoder)) if of_width else ()
        self.mixers = tuple(take_mixers(self.decoder, self.current))
        self.head: nn.Module | None = None
        self._decoded = _Decoded(self.base)
        if found.settings.generates:
            setattr(made, made.base_model_prefix, self._decoded)
            self.head = made
        self.prefix = (f"{made.base_model_prefix}." if found.settings.generates else "") + inside
        sizes = found.settings
        self.layers, self.head_dim = sizes.layers, sizes.head_dim
        self.heads, self.kv_heads = sizes.heads, sizes.kv_heads  # until `prepare` finds this rank's
        self.scale = sizes.head_dim**-0.5
        if not made._can_compile_fullgraph:
            self.uncapturable_because = f"transformers' {sizes.architecture} is not said to run without the host"

    def prepare(self) -> None:
        """Run the trial: take heads, scale and rules of attention from it. All ranks call this at the same time.

        Raises: ConfigError, see `trial.try_out`.
        """
        if self.kv_scales is not None:  # they are of keys and values, not of latents
            restore(self.latents)
        logits = self.logits if self.settings.generates else None
        with_states = [mixer.layer for mixer in self.mixers]
        calls = try_out(self.decoder, logits, self.current, self.settings, self.dtype, self.device, with_states)
        one = calls[0]
        self.layers, self.current.places = len(calls), {call.layer: place for place, call in enumerate(calls)}
        if self.kv_scales is not None:
            self.kv_scales = tuple(self.kv_scales[call.layer] for call in calls)
        self.states = tuple(part for mixer in self.mixers for part in mixer.parts)
        if slow := [str(mixer.layer) for mixer in self.mixers if mixer.by_token]:
            log.warning(
                "the library's code of %s computes a later chunk of a prompt token by token in layers %s, which is "
                "slow: chunks as long as prompts avoid it",
                self.settings.architecture,
                ", ".join(slow),
            )
        if self.states:
            self.uncapturable_because = "its layers keep states, whose slots graphs do not follow"
        self.heads, self.kv_heads = one.heads, one.kv_heads
        self.head_dim = self.current.head_dim = max(one.head_dim, one.value_dim)
        self.scale, self.shares_kv = one.rules.scale, one.latent
        if any(call.rules.beyond(self.scale) for call in calls):
            self.rules = tuple(call.rules for call in calls)

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> Tensor:
        """Return the hidden states behind the last norm, [tokens, hidden].

        The backend must be planned for this batch.
        """
        if not batch.tokens:
            return torch.empty(0, self.settings.hidden, dtype=self.dtype, device=self.device)
        given: dict[str, Any] = {}
        if batch.embedded is not None:
            given["inputs_embeds"] = batch.embedded[None]
        elif self.media_encoder is None and batch.media is None:
            given["input_ids"] = batch.token_ids[None]
        else:
            given |= self._with_media(batch)
        return run_pass(self.decoder, self.current, batch, attention, given)

    def expert_layers(self) -> Iterable[CountedExperts]:
        """Return the layers with experts, in their order."""
        return list(routed_experts(self.decoder))

    def _with_media(self, batch: ForwardBatch) -> dict[str, Any]:
        """Return the arguments of the decoder for a pass in which embeddings may take the place of tokens."""
        if batch.media is None:
            return {"input_ids": batch.token_ids.clamp(min=0)[None]}
        given: dict[str, Any] = {"inputs_embeds": self.embed(batch)[None]}
        if batch.media.deeper:
            is_media = torch.zeros(batch.tokens, dtype=torch.bool, device=batch.token_ids.device)
            given["visual_pos_masks"] = is_media.index_fill_(0, batch.media.at, True)[None]
            given["deepstack_visual_embeds"] = list(batch.media.deeper)
        return given

    def embed(self, batch: ForwardBatch) -> Tensor:
        """Return the embeddings of the new tokens, those of media in their places, [tokens, embedding size]."""
        ids = batch.token_ids.clamp(min=0)  # placeholders, and drafts that repeat them
        found: Tensor = self.base.get_input_embeddings()(ids)
        if batch.media is None:
            return found
        return found.index_copy(0, batch.media.at, batch.media.embeddings.to(found.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [samples, vocab] of hidden states [samples, hidden] that `forward` returned.

        The library's model computes them, with its scale and cap. Its decoder is replaced by these hidden states.
        Raises: ConfigError for any sample, if the model has no output projection.
        """
        if self.head is None and len(hidden):
            raise ConfigError(f"{self.settings.architecture} without `lm_head` has no logits")
        if self.head is None or not len(hidden):
            return hidden.new_empty((0, self.settings.vocab), dtype=torch.float32)
        self._decoded.hidden = hidden[None]
        try:
            out = self.head(input_ids=hidden.new_zeros((1, len(hidden)), dtype=torch.int64), use_cache=False)
        finally:
            self._decoded.hidden = None
        logits: Tensor = out.logits[0].float()
        return logits

    def _adapted(self, slots: int, rank: int) -> Iterator[LoraTarget]:
        """Allocate adapter slots, and yield the linear layers that adapters may change."""
        modules = dict(self.decoder.named_modules())
        # adapters follow neither weights that are multiplied elsewhere, nor layers that get a pass's tokens in groups
        left_out = {id(module.kv_b_proj) for module in modules.values() if is_latent(module)}
        left_out |= {id(one) for mixer in self.mixers for one in mixer.module.modules()}
        for name, module in modules.items():
            if id(module) in left_out:
                continue
            if type(module) is nn.Linear:
                module = RankLinear(module, "", self.parallel, self.current)
                replace_linear(modules, name, module)
            if isinstance(module, RankLinear):
                yield module.take_adapters(self.prefix + name, slots, rank)

    def tensors(self) -> Iterator[TensorSpec]:
        """Yield the tensors of a checkpoint that fill the model."""
        return self.names.specs()

    def named_as(self, stored: Collection[str], wanted: Sequence[TensorSpec]) -> list[TensorSpec]:
        """Return what `tensors` yielded, under the names by which a source stores the tensors."""
        return self.names.named_as(stored, wanted)

    def surplus(self, name: str) -> bool:
        """Return whether a checkpoint may hold this tensor although it is not read, because it follows from others."""
        return self.names.surplus(name)


def run_pass(
    decoder: nn.Module, current: CurrentPass, batch: ForwardBatch, attention: AttentionBackend, given: dict[str, Any]
) -> Tensor:
    """Run a decoder of the library over a pass.

    Args:
        given: its arguments but for positions: tokens, or embeddings.
    Returns: the hidden states behind its last norm, [tokens, hidden].
    """
    positions = batch.positions[None]
    if batch.rope_offsets is not None:  # of text, time, height and width
        positions = torch.cat((positions, batch.positions + batch.rope_offsets))[:, None]
    current.batch, current.attention = batch, attention
    try:
        out = decoder(**given, position_ids=positions, use_cache=False)
    finally:
        current.batch = current.attention = None
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


def _embedding_size(decoder: Any, base: Any) -> int:
    """Return the numbers of an embedding that takes the place of a token; 0 if a layer needs the token as well."""
    accepted = inspect.signature(inspect.unwrap(decoder.forward)).parameters
    if "inputs_embeds" not in accepted or "per_layer_inputs" in accepted:
        return 0
    return int(base.get_input_embeddings().embedding_dim)


class _Decoded(nn.Module):
    """Takes the place of a decoder in the library's model, and returns hidden states that were computed before."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self.hidden: Tensor | None = None
        self._replaced = (replaced,)  # in a tuple, so that it is not a part of this module

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the decoder that its output projection reads, such as a factor (Falcon-H1)."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._replaced[0], name)

    @property
    def decoder(self) -> _Decoded:
        """This module, for models whose decoder lies inside of another one (OPT)."""
        return self

    def forward(self, *_: Any, **__: Any) -> Any:
        """Return the hidden states as the library's decoder would."""
        return _Output(last_hidden_state=self.hidden)


class _Output(MoeModelOutputWithPast):
    """What a decoder returns, with None for everything that only some of them have."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def made_on_meta(config: Any, kind: Any, *, perceiving: bool = False) -> Any:
    """Return the library's model without memory for its weights. Our attention is that of its decoder only."""
    attention: Any = NAME
    if perceiving:
        inner = config.get_text_config()
        attention = {one: NAME for one in config.sub_configs if getattr(config, one, None) is inner}
        if not attention:
            raise ConfigError(f"{kind.__name__} cannot run by transformers' code here: it has no config of its text")
    try:
        with torch.device("meta"), torch.no_grad():
            return kind._from_config(config, attn_implementation=attention).eval()
    except (ValueError, ImportError, NotImplementedError) as error:
        why = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{kind.__name__} cannot run by transformers' code here: {why}") from error


def materialise(model: Any, plan: Plan, make: Maker) -> list[Held]:
    """Allocate this rank's parameters and all buffers, compute what is not stored, and list what is."""
    wide = tuple(model._keep_in_fp32_modules_strict or ())
    if make.dtype == torch.float16:
        wide += tuple(model._keep_in_fp32_modules or ())
    made: dict[int, nn.Parameter] = {}  # by the parameter on meta: tied ones stay one
    places: dict[str, tuple[tuple[int, ...], Any]] = {}
    for prefix, module in list(model.named_modules()):
        for last, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            name = f"{prefix}.{last}" if prefix else last
            if id(parameter) not in made:
                part, whole = plan.part(name, parameter), tuple(parameter.shape)
                shape = part.shape(whole, plan.ranks, name)
                dtype = _dtype(parameter, name, wide, make)
                empty = torch.empty(shape, dtype=dtype, device=make.device)
                made[id(parameter)] = nn.Parameter(empty, requires_grad=False)
                places[name] = (whole, part)
            module._parameters[last] = made[id(parameter)]
        for last, buffer in list(module._buffers.items()):
            if buffer is not None:
                persistent = last not in module._non_persistent_buffers_set
                dtype = _dtype(buffer, f"{prefix}.{last}", wide, make) if persistent else buffer.dtype
                module._buffers[last] = torch.zeros(buffer.shape, dtype=dtype, device=make.device)
    if make.device.type != "meta":
        _initialise(model)
    stored = model.state_dict(keep_vars=True)
    held = []
    for name, tensor in stored.items():
        if name in places:
            shape, part = places[name]
            held.append(Held(name, tensor.data, shape, part, _constant(tensor)))
        elif not isinstance(tensor, nn.Parameter):
            held.append(Held(name, tensor, tuple(tensor.shape), plan.part("", tensor), _constant(tensor)))
    return held


def _dtype(tensor: Tensor, name: str, wide: tuple[str, ...], make: Maker) -> torch.dtype:
    if not tensor.is_floating_point():
        return tensor.dtype
    return torch.float32 if any(f".{one}." in f".{name}." for one in wide) else make.dtype


def _initialise(model: Any) -> None:
    """Let the library compute buffers that no checkpoint has, and the first values of norms and biases."""

    matrices = [one for one in model.parameters() if one.dim() > 1]
    for one in matrices:  # they are filled later; the library passes over what is marked so
        one._is_hf_initialized = True

    def visit(module: nn.Module, owner: Any) -> None:
        owner = module if hasattr(module, "_init_weights") else owner
        for child in module.children():
            visit(child, owner)
        decoder = hasattr(module, "_init_weights")  # which may fill buffers of its layers (Falcon-H1)
        if decoder or module._buffers or any(one.dim() < 2 for one in module.parameters(recurse=False)):
            owner._init_weights(module)

    with torch.no_grad():
        visit(model, model)


def _constant(tensor: Tensor) -> float | None:
    """Return the value of a vector that holds one value only, as a norm before training; None for others."""
    if tensor.dim() > 1 or not tensor.numel() or not tensor.is_floating_point() or tensor.device.type == "meta":
        return None
    first = float(tensor.flatten()[0])
    return first if bool((tensor == first).all()) else None
