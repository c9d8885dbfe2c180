"""`make closest-family NAME=Olmo2`: finds the supported family that computes the same as a
transformers class. For developers who add a model.

It creates a tiny checkpoint of the class with random weights and loads it with each family's
schema. Families that have all of the tensors run a prompt, and their logits and layer outputs are
compared with transformers'. For each family, the report lists the config.json keys that its schema
rejects, the tensors that are missing, and the first layer that differs.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from tests.support.checkpoints.specimen import VOCAB_SIZE, Specimen, write
from tests.support.engines.plan_driver import Request, generate, make_runner
from worker.models.architectures.decoder import DecoderModel
from worker.models.config.families import FAMILIES
from worker.models.config.family import FamilyConfig
from worker.models.config.model_config import load_model_config
from worker.models.loading.loader import build_without_weights

EQUAL = 1e-3
"""Maximum difference between logits (which are about 5), and between layer outputs relative to the
largest output, that counts as equal. Test checkpoints of supported families differ by at most
5e-5."""
PROMPT_TOKENS = 45
"""Longer than the test checkpoints' windows and original context lengths."""
WEIGHTS = "model.safetensors"
_ANY_NUMBER = re.compile(r"\.\d+\.")
"""Index of a layer or an expert in a tensor's name."""


@dataclass(kw_only=True)
class Attempt:
    """Comparison of a checkpoint with one family."""

    family: str
    rejected: list[str] = field(default_factory=list)
    """config.json keys that the family's schema rejects; they are removed."""
    problem: str = ""
    """Why the family cannot be built or loaded; empty if it ran or if only tensors differ."""
    missing: list[str] = field(default_factory=list)
    """Tensors of the family that are missing from the checkpoint or have another shape there."""
    unknown: list[str] = field(default_factory=list)
    """Tensors of the checkpoint that the family does not have."""
    difference: float = math.inf
    """Maximum difference between the logits after the prompt; infinite if the family did not
    run."""
    first_layer: str = ""
    """First part of the model whose output differs; empty if there is none."""

    @property
    def is_equal(self) -> bool:
        """Whether the family computes the same logits."""
        return self.difference < EQUAL

    @property
    def distance(self) -> tuple[float, ...]:
        """Sort key of attempts: equal logits first, then by differing tensors, keys and logits."""
        tensors = len(self.missing) + len(self.unknown)
        return (not self.is_equal, bool(self.problem), tensors, len(self.rejected), self.difference)

    def __str__(self) -> str:
        parts = list[str]()
        if math.isfinite(self.difference):
            parts.append(f"logits differ by {self.difference:.1e}")
        parts += [f"first in {self.first_layer}"] if self.first_layer else []
        for title, names in (
            ("rejected keys", self.rejected),
            ("missing tensors", self.missing),
            ("unknown tensors", self.unknown),
        ):
            shown = dict.fromkeys(_ANY_NUMBER.sub(".*.", name) for name in names)
            parts += [f"{title}: {', '.join(shown)}"] if names else []
        parts += [self.problem] if self.problem else []
        return f"{self.family}: {'; '.join(parts)}"


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Outputs of a model for a prompt."""

    layers: list[torch.Tensor]
    """Embedding [tokens, hidden], then each layer's output for the last token [hidden]."""
    logits: torch.Tensor
    """[vocabulary], after the last token."""


def closest_families(
    specimen: Specimen, folder: Path, names: Iterable[str] = tuple(FAMILIES)
) -> list[Attempt]:
    """Compares a transformers class with families; returns the closest one first.

    Args:
        specimen: the class, and its configuration.
        folder: empty folder for checkpoints.
        names: architectures of the families.
    """
    (folder / "source").mkdir()
    model = write(specimen, folder / "source")
    prompt = np.random.default_rng(5).integers(0, VOCAB_SIZE, PROMPT_TOKENS).tolist()
    expected = _outputs_of_transformers(model, prompt)
    attempts = []
    for name in names:
        target = folder / name
        target.mkdir()
        attempt = _read(folder / "source", FAMILIES[name], target)
        if not (attempt.problem or attempt.missing or attempt.unknown):
            _run(attempt, target, prompt, expected)
        attempts.append(attempt)
    return sorted(attempts, key=lambda attempt: attempt.distance)


def _read(source: Path, family: type[FamilyConfig], target: Path) -> Attempt:
    """Writes the checkpoint in a family's format, and compares its tensors with the family's."""
    attempt = Attempt(family=family.architecture)
    content = json.loads((source / "config.json").read_text())
    content |= {"architectures": [family.architecture], "model_type": family.model_types[0]}
    (target / WEIGHTS).symlink_to(source / WEIGHTS)
    try:
        attempt.rejected = _drop_rejected(family, content)
        (target / "config.json").write_text(json.dumps(content))
        model = build_without_weights(load_model_config(str(target)), 1)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        attempt.problem = f"{type(error).__name__}: {error}"[:200]
        return attempt
    _compare_tensors(attempt, model, source / WEIGHTS)
    return attempt


def _drop_rejected(family: type[FamilyConfig], content: dict[str, Any]) -> list[str]:
    """Removes the keys that a schema rejects from the content of config.json; returns them.

    Raises:
        ValueError: the remaining keys are also rejected.
    """
    rejected = list[str]()
    while True:
        try:
            family.read(content)
            return rejected
        except ValueError as error:
            key = str(error).partition(" ")[0].rstrip(":")  # messages begin with the key
            if content.pop(key, None) is None:
                raise
            rejected.append(key)


def _compare_tensors(attempt: Attempt, model: DecoderModel, weights: Path) -> None:
    slots = {slot.name: slot for slot in model.weight_slots()}
    with safe_open(weights, framework="pt", device="cpu") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.offset_keys()}
    attempt.missing = [
        name
        for name, slot in slots.items()
        if not slot.is_optional and shapes.get(name) != slot.full_shape and not slot.may_lack_ones
    ]
    attempt.unknown = [name for name in shapes if name not in slots]


def _run(attempt: Attempt, folder: Path, prompt: list[int], expected: Outputs) -> None:
    """Runs the prompt and compares the outputs."""
    try:
        runner = make_runner(str(folder), cpu_backend="torch")
        request = Request(prompt=prompt, new_tokens=1)
        with _recorded(runner.model) as layers:
            generate(runner, [request])
    except (ValueError, RuntimeError) as error:
        attempt.problem = f"{type(error).__name__}: {error}"[:200]
        return
    attempt.difference = (request.logits[0] - expected.logits).abs().max().item()
    names = ["the embedding", *(f"layer {index}" for index in range(len(layers) - 1))]
    differing = (
        name
        for name, ours, theirs in zip(names, layers, expected.layers, strict=False)
        if ours.shape != theirs.shape
        or (ours - theirs).abs().max() > EQUAL * theirs.abs().max().clamp(min=1)
    )
    if not attempt.is_equal:
        attempt.first_layer = next(differing, "the final norm or the LM head")


@contextmanager
def _recorded(model: DecoderModel) -> Iterator[list[torch.Tensor]]:
    """Records the first layer's input, and the last row of each layer's output. In families that
    scale a layer's output when the next layer adds it (Granite), the recorded output is
    unscaled."""
    outputs = list[torch.Tensor]()
    for index, layer in enumerate(model.layers):

        def forward(
            hidden: torch.Tensor, *args: Any, run: Any = layer.forward, is_first: bool = not index
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            if is_first:
                outputs.append(hidden.clone())
            hidden, residual = run(hidden, *args)
            outputs.append((hidden if residual is None else hidden + residual)[-1].clone())
            return hidden, residual

        layer.forward = forward  # type: ignore[assignment, method-assign]
    yield outputs


def _outputs_of_transformers(model: Any, prompt: Sequence[int]) -> Outputs:
    with torch.inference_mode():
        result = model(torch.tensor([prompt]), output_hidden_states=True, use_cache=False)
        embedding, *layers = result.hidden_states
    # The last output has passed the final norm; the logits are compared instead.
    return Outputs(
        layers=[embedding[0], *(layer[0, -1] for layer in layers[:-1])], logits=result.logits[0, -1]
    )


def main() -> None:
    """Prints the closest families."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("name", help="transformers class, without ForCausalLM")
    parser.add_argument("--settings", default="{}", help="settings of its configuration, as JSON")
    parser.add_argument("--show", type=int, default=5, help="number of families to print")
    options = parser.parse_args()
    specimen = Specimen(name=options.name, settings=json.loads(options.settings))
    with tempfile.TemporaryDirectory() as folder:
        for attempt in closest_families(specimen, Path(folder))[: options.show]:
            print(attempt)


if __name__ == "__main__":
    main()
