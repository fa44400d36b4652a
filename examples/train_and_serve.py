"""A trainer for reinforcement learning with one running engine: generate, train, load new weights, generate again.

    python examples/train_and_serve.py FOLDER        # an empty folder, for the weights of each step

In each step the engine generates answers, which are scored. The engine releases its memory while the trainer works.
Then it loads the new weights, a folder as `save_pretrained` writes it, and each answer has the version of the weights
that drew it. In this example the reward is the share of letters in a text. The trainer is a random search over one
vector, which keeps a change if the mean reward rises.
"""

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from lockstep.runtime import LLM, Params
from lockstep.runtime.demo_model import demo_model_folder

PROMPTS = ["def ", "class ", "import ", "return "]
ASKED = Params(n=2, max_new_tokens=16, temperature=1.0, seed=7)
STEPS = 2


def reward(text: str) -> float:
    """Return the share of letters in a text."""
    return sum(letter.isalpha() for letter in text) / max(len(text), 1)


def rollouts(llm: LLM) -> tuple[float, set[int]]:
    """Return the mean reward of answers, and the versions of the weights that drew them."""
    answers = [one for answer in llm.generate(PROMPTS, ASKED) for one in (answer, *answer.others)]
    versions = {version for answer in answers for _, version in answer.weights}
    return sum(reward(answer.text or "") for answer in answers) / len(answers), versions


def main(folder: Path) -> None:
    """Run STEPS training steps."""
    tensors = load_file(demo_model_folder() / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    with LLM() as llm:
        best, versions = rollouts(llm)
        print(f"step 0: reward {best:.3f} by weights {versions}")
        for step in range(1, STEPS + 1):
            llm.release_memory()  # frees the device for the trainer
            before = tensors["model.norm.weight"]
            noise = 0.3 * torch.randn(before.shape, generator=generator).to(before.dtype)
            tensors["model.norm.weight"] = before + noise
            there = folder / f"step-{step}"
            shutil.copytree(demo_model_folder(), there)
            save_file(tensors, there / "model.safetensors")
            llm.resume_memory()

            llm.update_weights(there)
            found, versions = rollouts(llm)
            print(f"step {step}: reward {found:.3f} by weights {versions}")
            if found < best:
                tensors["model.norm.weight"] = before
            best = max(best, found)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/train_and_serve.py FOLDER")
    main(Path(sys.argv[1]))
