"""The rows of an evaluation's table: the split, the models compared on it, and their names.

Compared models must have been trained on the same split, else their figures are not comparable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..data.base import Dataset
from ..data.protocols import Split, load_split, make_split
from ..encoder import Encoder
from ..errors import DataError, MismatchError, UsageError
from ..methods.registry import ARRAY_METHODS, find_method, make_method, method_names

# Method -> its usual preset, which tables do not name.
_USUAL_PRESET = {"gpq": "gpq", "posterior": "recommended"}


def model_name(description: Mapping[str, Any]) -> str:
    """Table name of a model, from its ``config.json``: its method, and its preset unless that is the usual one: ``gpq (paper)``."""
    method, used = str(description.get("method", "gpq")), str(description["config"].get("preset", "paper"))
    return method if _USUAL_PRESET.get(method) == used else f"{method} ({used})"


def _trained_on(encoder: Encoder) -> tuple[str, str, str, int]:
    """Fingerprint of the data of a model's training; hash, protocol and seed of its split. Raises DataError: they are not known."""
    about = encoder.model.description
    try:
        split = about["split"]
        return str(about["data"]["fingerprint"]), split["hash"], str(split["protocol"]), int(split["seed"])
    except (KeyError, TypeError, ValueError):
        raise DataError(
            f"{encoder.source}: config.json does not say what the model was trained on: copy or train the model again"
        ) from None


def open_compared(
    first: Encoder, compare: Sequence[str], dataset: Dataset, device: str
) -> dict[str, Encoder | None]:
    """Rows of the table, the first model first: name -> model, or None for a method that is fitted here.

    A name of an array method means the method, even if a folder has that name. Models of equal name are shown with their folders.

    Raises:
        DataError, DeviceError, MismatchError, UsageError: as :func:`.evaluate.evaluate`.
    """
    entries: list[tuple[str, Encoder | None]] = [(str(first.source), first)]
    seen: set[object] = {first.source.resolve()}
    for name in compare:
        folder = Path(name)
        of_method = name in method_names() and (not find_method(name).deep or not folder.is_dir())
        own = name if of_method else folder.resolve()
        if own in seen:
            raise UsageError(f"--compare {name}: it has a row already: name it once")
        seen.add(own)
        if of_method:
            make_method(name, first.bits)
            entries.append((name, None))
            continue
        if not folder.is_dir():
            raise UsageError(
                f"--compare {name}: neither the folder of a model nor a method: train it, or choose from {', '.join(ARRAY_METHODS)}"
            )
        other = Encoder.load(name, device)
        (*split, protocol, seed), (*other_split, other_protocol, other_seed) = (
            _trained_on(first),
            _trained_on(other),
        )
        if split != other_split:
            raise MismatchError(
                f"--compare {name}: it was trained on other data or another split (protocol {other_protocol}, seed {other_seed}) than "
                f"{first.source} (protocol {protocol}, seed {seed}): train it on the same data with the same --protocol, --seed, "
                "--labelled and --queries"
            )
        other.check(dataset)
        entries.append((name, other))
    names = [path if one is None else model_name(one.model.description) for path, one in entries]
    return {
        f"{name}: {path}" if one is not None and names.count(name) > 1 else name: one
        for name, (path, one) in zip(names, entries, strict=True)
    }


def resolve_split(
    encoder: Encoder, dataset: Dataset, protocol: str | None, seed: int | None, labelled: str | None
) -> tuple[Split, list[str]]:
    """The split to evaluate on: the training split for the training data, else a new one; and notes for the user.

    Raises:
        MismatchError: another protocol or seed for the training data: its queries may have been trained on.
    """
    data, _, *trained = _trained_on(encoder)
    if data != dataset.fingerprint:
        split = make_split(dataset, protocol or "1", seed=seed or 0, labelled=labelled)
        return split, [
            f"{dataset.name} is not the data of the training: queries and database are drawn from it instead"
        ]
    for name, asked, found in zip(("protocol", "seed"), (protocol, seed), trained, strict=True):
        if asked not in (None, found):
            raise MismatchError(
                f"{encoder.source} was trained with {name} {found}: with {name} {asked} it may have seen the labels of queries. "
                f"Leave out the {name}, or train with it"
            )
    # The labels of the training decide which items are the database.
    ignored = labelled is not None and labelled != "all"
    notes = ["labelled items are those of the training: labelled has no effect"] if ignored else []
    return load_split(encoder.source / "split.json"), notes
