"""`lockstep demo-model`: argument parsing only."""

from __future__ import annotations

from pathlib import Path

import click

from lockstep.runtime.demo_model import copy_demo_model


@click.command("demo-model")
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--train", is_flag=True, help="Train the model from this Python's documentation; takes a few minutes.")
@click.option("--head", is_flag=True, help="Train a head that drafts for the model (EAGLE-3); takes a few minutes.")
def demo_model(folder: Path, train: bool, head: bool) -> None:
    """Write a small model in the Hugging Face layout to DIR, without any download.

    DIR then holds config, weights in bfloat16, and a tokenizer with a chat template; transformers loads it too. Without
    --train it is a copy of the model that is part of Lockstep. An equal model in DIR is kept. With --head DIR holds a
    head for that model instead, for --draft-model.
    """
    if train and head:
        raise click.UsageError("--train makes the model, --head a head for it: give one of them")

    def progress(line: str) -> None:
        click.echo(line, err=True)

    if head:
        from lockstep.runtime.demo_model.head import train_head

        train_head(folder, progress=progress)
        click.echo(f"{folder}")
        return
    if not train:
        made = copy_demo_model(folder)
    else:
        from lockstep.runtime.demo_model.train import train_demo_model

        made = train_demo_model(folder, progress=progress)
    click.echo(f"{folder}" if made else f"{folder} (was there already)")
