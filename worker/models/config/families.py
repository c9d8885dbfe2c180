"""Supported model families, collected from the modules of their vendors. Imports no torch."""

from __future__ import annotations

from worker.models.config.family import FamilyConfig
from worker.models.config.multimodal import MultimodalConfig, TensorNames
from worker.models.config.schema import RawConfig, architectures
from worker.models.config.vendors import (
    ai2,
    arcee,
    baichuan,
    baidu,
    bigcode,
    bytedance,
    cohere,
    deepseek,
    google,
    huggingface,
    ibm,
    inclusionai,
    internlm,
    iquest,
    kyutai,
    lg,
    liquid,
    meituan,
    meta,
    microsoft,
    minimax,
    mistral,
    nvidia,
    openai,
    openbmb,
    orion,
    qwen,
    stability,
    swiss_ai,
    tencent,
    tii,
    upstage,
    xiaomi,
    zai,
)

_VENDORS = (
    *(meta, qwen, deepseek, google, mistral, zai, openai, microsoft, minimax, cohere, ibm, ai2),
    *(baidu, tencent, bytedance, huggingface, inclusionai, internlm, lg, liquid, meituan, nvidia),
    *(openbmb, upstage, xiaomi, arcee, baichuan, bigcode, iquest, kyutai, orion, stability),
    *(swiss_ai, tii),
)
FAMILIES: dict[str, type[FamilyConfig]] = {
    family.architecture: family for vendor in _VENDORS for family in vendor.FAMILIES
}
"""Families by value of `architectures` in config.json."""
_BY_ALL_NAMES = FAMILIES | {
    name: family for family in FAMILIES.values() for name in family.other_architectures
}

MULTIMODAL: dict[str, MultimodalConfig] = {
    name: config
    for vendor in _VENDORS
    for config in getattr(vendor, "MULTIMODAL", ())
    for name in config.architectures
}
"""Multimodal checkpoints, of which the text model is served, by value of `architectures`."""


def read_family(raw: RawConfig) -> tuple[FamilyConfig, TensorNames | None]:
    """Reads config.json, or its text model's part, by the schema of its family.

    Returns:
        The family's configuration, and the text model's names of tensors in the checkpoint; None if
        it is not multimodal.

    Raises:
        ValueError: no architecture in config.json is supported, or a key is not; the message names
            it.
    """
    names, tensors = architectures(raw), None
    if multimodal := next((MULTIMODAL[name] for name in names if name in MULTIMODAL), None):
        raw, tensors = multimodal.text_config(raw), multimodal.tensors
        names = architectures(raw)
    for name in names:
        if name in _BY_ALL_NAMES:
            return _BY_ALL_NAMES[name].read(raw), tensors
    raise ValueError(
        f"architectures {names} in config.json are not supported: use a checkpoint of one of "
        f"{', '.join(FAMILIES)}"
    )
