"""A layer for multi-token prediction (MTP) in torch: transformers' own layer, and drafts computed without an engine.

position    0        1        2        3 = stand   4
token       t0       t1       t2       t3          draft 1
features    -        f0       f1       f2          own features of t3
                                       draft 1     draft 2
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lockstep.runtime.draft_tree import TreeShape
from lockstep.runtime.drafting import DraftingRows

STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class TorchMtp(nn.Module):
    """The layer under its names in a checkpoint, without `mtp.`, for a model of transformers."""

    def __init__(self, model: Any, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        decoder, config = decoder_of(model), copy.deepcopy(model.config.get_text_config())
        config._attn_implementation = "eager"
        hidden, norm = config.hidden_size, type(decoder.norm)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (norm(hidden, config.rms_norm_eps) for _ in range(2))
        layer = type(decoder.layers[0])(config, config.layer_types.index("full_attention"))
        self.layers, self.norm = nn.ModuleList([layer]), norm(hidden, config.rms_norm_eps)
        for parameter in self.parameters():
            parameter.data = torch.randn_like(parameter) * 0.3
        self.eval()

    def repeat(self, token: int, model: Any) -> None:
        """Change the projection so that the layer drafts a token behind itself, whatever else it was given."""
        with torch.no_grad():
            embedding = self.pre_fc_norm_embedding(model.get_input_embeddings().weight[token])
            wanted = model.lm_head.weight[token] / (1 + self.norm.weight)
            strength = 100 / (wanted.norm() * embedding.square().sum())
            self.fc.weight[:, : len(embedding)] += strength * torch.outer(wanted, embedding)

    def forward(self, embeddings: Tensor, before: Tensor, rotation: Any) -> Tensor:
        """Return features [tokens, hidden] of one sequence from embeddings and features of the tokens before."""
        joined = torch.cat((self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(before)), -1)
        mask = torch.full((len(joined), len(joined)), torch.finfo(torch.float32).min).triu(1)
        mixed = self.layers[0](self.fc(joined)[None], position_embeddings=rotation, attention_mask=mask[None, None])
        out: Tensor = self.norm(mixed[0])
        return out


def decoder_of(model: Any) -> Any:
    """Return the decoder of a model of transformers, without the output projection and without encoders."""
    return model.model.get_decoder() if hasattr(model.model, "language_model") else model.model


def stored_mtp(layer: TorchMtp, *, by_expert: bool) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint; `by_expert`: the matrices of each expert under names of their own."""
    found = {}
    for name, tensor in layer.state_dict().items():
        owner, _, last = name.rpartition(".")
        if not by_expert or last not in STACKED:
            found[f"mtp.{name}"] = tensor.contiguous()
            continue
        for number, expert in enumerate(tensor):
            parts = expert.chunk(len(STACKED[last]))
            found |= {
                f"mtp.{owner}.{number}.{part}.weight": one.contiguous()
                for part, one in zip(STACKED[last], parts, strict=True)
            }
    return found


def add_mtp(folder: Path, layer: TorchMtp, *, by_expert: bool) -> None:
    """Add a layer to the checkpoint of its saved model; `by_expert`: see `stored_mtp`."""
    add_tensors(folder, stored_mtp(layer, by_expert=by_expert))


def add_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Add tensors to a checkpoint, in place of those of a layer that drafts."""
    file = folder / "model.safetensors"
    others = {name: one for name, one in load_file(file).items() if not name.startswith("mtp.")}
    save_file({**others, **tensors}, file, metadata={"format": "pt"})


class DirectDrafts:
    """What a layer drafts in a sequence, computed at once from transformers' hidden states.

    Args:
        inputs: of the prompt, as transformers' processor makes them; `input_ids` [1, tokens].
        answer: the tokens behind it.
    """

    def __init__(self, model: Any, layer: TorchMtp, inputs: Mapping[str, Any], answer: Sequence[int]) -> None:
        self._model, self._layer = model, layer
        more, spare = len(answer), 16
        prompt = inputs["input_ids"]
        self.ids = torch.cat((prompt, torch.tensor([list(answer)], dtype=torch.int64)), 1)
        given = {name: one for name, one in inputs.items() if name not in ("input_ids", "attention_mask")}
        kinds = given.pop("mm_token_type_ids", None)
        with torch.inference_mode():
            if kinds is not None:
                given["mm_token_type_ids"] = nn.functional.pad(kinds, (0, more))
                model.model.rope_deltas = None
            out = model.model(input_ids=self.ids, use_cache=False, **given)
            self.features: Tensor = out.last_hidden_state[0]
            self.embeddings: Tensor = model.get_input_embeddings()(self.ids[0]).clone()
            length = self.ids.shape[1] + spare
            places = torch.arange(length)[None]
            if kinds is not None:
                longer = nn.functional.pad(self.ids, (0, spare))
                of_kinds = nn.functional.pad(kinds, (0, more + spare))
                grids = given.get("image_grid_thw")
                places, _ = model.model.get_rope_index(longer, mm_token_type_ids=of_kinds, image_grid_thw=grids)
                if grids is not None:
                    found = model.model.get_image_features(given["pixel_values"], grids).pooler_output
                    parts = [found] if isinstance(found, Tensor) else list(found)
                    self.embeddings[self.ids[0] == model.config.image_token_id] = torch.cat(parts)
            decoder = decoder_of(model)
            of_features = torch.cat((places[..., :1] - 1, places[..., :-1]), -1)  # those of the token before
            cos, sin = decoder.rotary_emb(self.embeddings[None], of_features)
            self._rotation = cos, sin

    def drafts(self, stand: int, count: int) -> list[int]:
        """Return the drafts behind the token at a position."""
        embeddings = self.embeddings[: stand + 1]
        before = torch.cat((torch.zeros_like(self.features[:1]), self.features[:stand]))
        found: list[int] = []
        with torch.inference_mode():
            for _ in range(count):
                cos, sin = (one[:, : len(embeddings)] for one in self._rotation)
                own = self._layer(embeddings, before, (cos, sin))[-1:]
                found.append(int(self._model.lm_head(own).argmax()))
                embeddings = torch.cat((embeddings, self._model.get_input_embeddings()(torch.tensor(found[-1:]))))
                before = torch.cat((before, own))
        return found


class DraftRecorder:
    """Records the drafts of an engine's drafter: (request, position of the newest token, newest token, drafts).

    Args:
        executor: of an engine that computes each plan when it is launched, as on a CPU.
    """

    def __init__(self, executor: Any) -> None:
        self.found: list[tuple[int, int, int, list[int]]] = []
        self._requests: dict[int, int] = {}  # by row, as of the newest plan
        launch, draft = executor.launch, executor.drafter.draft

        def launching(plan: Any, **more: Any) -> None:
            self._requests |= dict(zip(plan.rows.tolist(), plan.request_ids.tolist(), strict=True))
            launch(plan, **more)

        def drafting(rows: DraftingRows, *shape: TreeShape) -> Tensor:
            guessed: Tensor = draft(rows, *shape)
            columns = (rows.rows.tolist(), rows.stands.tolist(), rows.newest.tolist(), rows.drafts, guessed.tolist())
            for row, stand, newest, count, guesses in zip(*columns, strict=True):
                self.found.append((self._requests[row], stand, newest, guesses[:count]))
            return guessed

        executor.launch, executor.drafter.draft = launching, drafting
