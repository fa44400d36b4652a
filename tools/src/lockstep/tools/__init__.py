"""Commands over a journal. Each module is one subcommand of `lockstep`, declared in this package's pyproject.toml."""
