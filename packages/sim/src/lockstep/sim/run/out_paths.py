"""Checks of output paths before a run, so that a long run is not lost because its result cannot be written."""

from __future__ import annotations

from pathlib import Path

from lockstep.core.contract.errors import ConfigError


def check_file(path: Path, option: str = "--out") -> None:
    """Create the folder of a file and verify that the file can be written there.

    Raises: ConfigError with the option if it cannot be written.
    """
    if path.is_dir():
        raise ConfigError(f"`{option}`: `{path}` is a folder, expected a file\nhint: name a file in it")
    part = path.with_name(f".part-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        part.unlink()
    except OSError as error:
        raise _cannot(option, path, error) from error


def check_folder(path: Path, option: str = "--out") -> None:
    """Verify that a folder can be created and written to. Folders created for the check are removed again.

    Raises: ConfigError with the option if it cannot be written.
    """
    made: list[Path] = []
    try:
        for place in (*reversed(path.parents), path):
            if not place.exists():
                place.mkdir(mode=0o700)
                made.append(place)
        part = path / ".part-probe"
        part.touch()
        part.unlink()
    except OSError as error:
        raise _cannot(option, path, error) from error
    finally:
        for place in reversed(made):
            place.rmdir()


def _cannot(option: str, path: Path, error: OSError) -> ConfigError:
    place = next((place for place in path.parents if place.exists()), path)
    why = f"`{place}` is a file" if place.is_file() else error.strerror or str(error)
    return ConfigError(f"`{option}`: `{path}` cannot be written: {why}\nhint: choose another place")
