"""Parsers of quantization formats: fp8, mxfp8, fbgemm_fp8, compressed-tensors, ModelOpt, AWQ, GPTQ
and gpt-oss' mxfp4. Does not import torch.

Unknown keys that may affect weights are rejected with an error that names them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.models.config.checkpoint import QUANTIZATION_FILES, read_json
from worker.models.config.quantization import (
    Fp4Config,
    GptOssMxfp4Config,
    GroupedIntConfig,
    QuantizationConfig,
    ScaledConfig,
    WeightConfig,
)
from worker.models.config.schema import short, words

_PLAIN_MODULES = (
    *("lm_head", "norm", "embed_tokens", "word_embeddings", "gate", "router", "conv1d"),
    "e_score_correction_bias",
)
"""Name suffixes of modules that are never quantized; patterns with them are ignored."""
_BESIDE_EXPERTS = ("self_attn", "mlp.router", "embed_tokens", "lm_head")
_NOT_OF_WEIGHTS = (
    *(".input_scale", ".activation_scale", ".input_scale_ub", ".input_global_scale"),
    *(".input_zero_point", ".q_scale", ".weight_shape"),
)
"""Name suffixes of tensors that are not loaded: scales and zero points of activations, shapes."""
CACHE_SCALE_ENDS = (".k_scale", ".v_scale", ".kv_scale")
"""Name suffixes of the scales of keys and values, which only FP8 KV caches need."""
_MIXED = "MIXED_PRECISION"
_MXFP8_BLOCK = (1, 32)
_MODELOPT_FILE = "hf_quant_config.json"
_NEUTRAL_VALUES: tuple[object, ...] = (None, False, "", [], {})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """An object in a checkpoint's files that describes its quantization."""

    where: str
    """Path of the object, for messages."""
    content: Mapping[str, Any]
    """Content of the object."""

    def unsupported(self, what: str, supported: str = "") -> ValueError:
        """The error for a property of the format that is not supported."""
        allowed = f" (supported: {supported})" if supported else ""
        return ValueError(
            f"{self.where} has {what}, which is not supported{allowed}: use the checkpoint's "
            "unquantized version, or one in FP8, INT8, NVFP4, AWQ, GPTQ or compressed-tensors' int4"
        )

    def malformed(self, what: str, required: str, value: object) -> ValueError:
        """The error for a value of the wrong type or form."""
        return ValueError(f"{self.where}: {what} must be {required}, got {short(value)}: fix it")

    def check(self, known: frozenset[str], must: Mapping[str, tuple[object, ...]]) -> None:
        """Checks all keys of the object, except null values, false or empty values of unknown keys,
        and unknown keys that begin with `_`.

        Args:
            known: keys that may have any value.
            must: keys with their supported values.

        Raises:
            ValueError: a key is in neither argument, or its value is not supported.
        """
        for key, value in self.content.items():
            if key in must:
                if value is not None and value not in must[key]:
                    values = " or ".join(map(short, must[key]))
                    raise self.unsupported(f"{key} {short(value)}", values)
            elif key not in known and value not in _NEUTRAL_VALUES and not key.startswith("_"):
                raise self.unsupported(f"the key {key}")

    def modules(self, *keys: str) -> tuple[str, ...]:
        """Patterns of modules in the lists of these keys, without modules that are never
        quantized."""
        named = list[str]()
        for key in keys:
            patterns = self.content.get(key) or []
            if not isinstance(patterns, list) or {type(name) for name in patterns} - {str}:
                raise self.malformed(key, "a list of module names", patterns)
            named += patterns
        for pattern in named:
            self.check_pattern(pattern)
        return tuple(name for name in named if not name.endswith(_PLAIN_MODULES))

    def check_pattern(self, pattern: str) -> None:
        """Raises ValueError if a pattern that begins with "re:" is not a valid regular
        expression."""
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            raise ValueError(
                f"{self.where}: pattern {short(pattern)} is not a valid regular expression "
                f"({error}): fix it"
            ) from None

    def sizes(self, key: str, value: object) -> tuple[int, int]:
        """Shape of a block: two positive integers. Raises ValueError for anything else."""
        if isinstance(value, list) and len(value) == 2:
            first, second = value
            if type(first) is int and type(second) is int and min(first, second) > 0:
                return first, second
        raise self.malformed(key, "a list of two positive integers", value)

    def has_fp8_cache(self) -> bool:
        """Whether an FP8 KV cache with per-tensor scales is specified. Other KV cache formats are
        ignored."""
        scheme = self.content.get("kv_cache_scheme")
        if not isinstance(scheme, dict):
            # AutoFP8 writes "static", ModelOpt writes its name for the format.
            return scheme == "static" or self.content.get("kv_cache_quant_algo") == "FP8"
        return (
            (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
            and scheme.get("strategy", "tensor") == "tensor"
            and not scheme.get("dynamic", False)
        )

    def group_size(self, value: object) -> int:
        """Number of input features per group; 0 if one group spans all of them (`value` is -1 or
        None).

        Raises ValueError unless `value` is a positive integer, -1 or None.
        """
        if value in (None, -1):
            return 0
        if type(value) is not int or value < 1:
            raise self.malformed("group_size", "a positive integer, -1 or null", value)
        return value


def read_quantization(
    raw: Mapping[str, Any], folder: Path, *, mxfp4: bool = False
) -> QuantizationConfig | None:
    """Quantization of a checkpoint; None if its weights are not quantized.

    Args:
        raw: the content of config.json.
        folder: folder of the checkpoint, in which another file may describe the format.
        mxfp4: whether the family's experts may be MXFP4 in gpt-oss' layout.

    Raises:
        ValueError: a format, or a property of it, is not supported; the message names it.
    """
    found = _find(raw, folder)
    if found is None:
        return None
    source, method = found
    if mxfp4 and method == "mxfp4":
        return _parse_gpt_oss(source)
    parse = _PARSERS.get(method) if isinstance(method, str) else None
    if parse is None:
        raise source.unsupported(f"quant_method {short(method)}")
    return parse(source)


def _find(raw: Mapping[str, Any], folder: Path) -> tuple[_Source, object] | None:
    """The object that describes the format, and its `quant_method`; None if there is none."""
    for key in ("quantization_config", "compression_config"):
        content = raw.get(key)
        if content and not _lists_layers_elsewhere(content, folder):
            source = _Source(where=f"{key} in config.json", content=content)
            default = "modelopt" if "quant_algo" in content else None
            return source, content.get("quant_method", default)
    for name, method in QUANTIZATION_FILES.items():
        path = folder / name
        if path.is_file():
            content = read_json(path)
            nested = content.get("quantization", content)
            if not isinstance(nested, dict):
                raise ValueError(f"{name} must contain a JSON object, got {short(nested)}: fix it")
            return _Source(where=name, content=nested), nested.get("quant_method", method)
    return None


def _lists_layers_elsewhere(content: Mapping[str, Any], folder: Path) -> bool:
    """Whether config.json names a mixture of ModelOpt's formats, while only the file next to it
    lists each module's format."""
    is_short = content.get("quant_algo") == _MIXED and "quantized_layers" not in content
    path = folder / _MODELOPT_FILE
    return is_short and path.is_file() and "quantized_layers" in path.read_text(encoding="utf-8")


def _parse_fp8(source: _Source) -> QuantizationConfig:
    """FP8 of DeepSeek and transformers, with a scale per block or per tensor."""
    source.check(
        words("quant_method weight_block_size modules_to_not_convert ignored_layers")
        | words("kv_cache_scheme"),
        {
            "fmt": ("e4m3", "float8_e4m3fn"),
            "activation_scheme": ("dynamic", "static"),
            "dequantize": (False,),
            "store_dtype": ("fp8",),
            # ue8m0: scales are powers of two, but stored as FP32, so nothing changes.
            "scale_fmt": ("ue8m0", "float"),
        },
    )
    block, weights = source.content.get("weight_block_size"), ScaledConfig(block_shape=(0, 0))
    if block is not None:
        shape = source.sizes("weight_block_size", block)
        weights = ScaledConfig(block_shape=shape, scale="weight_scale_inv")
    return QuantizationConfig(
        weights=weights,
        left_out=source.modules("modules_to_not_convert", "ignored_layers"),
        renamed_ends=() if block is not None else ((".weight_scale_inv", ".weight_scale"),),
        skipped_ends=_NOT_OF_WEIGHTS,
        has_fp8_cache=source.has_fp8_cache(),
    )


def _parse_mxfp8(source: _Source) -> QuantizationConfig:
    """FP8 of MiniMax, with one power-of-two scale per 32 input features."""
    source.check(
        words("quant_method ignored_layers modules_to_not_convert"),
        {
            "fmt": ("e4m3", "float8_e4m3fn"),
            "activation_scheme": ("dynamic",),
            "weight_block_size": (list(_MXFP8_BLOCK),),
        },
    )
    return QuantizationConfig(
        weights=ScaledConfig(
            block_shape=_MXFP8_BLOCK, scale="weight_scale_inv", has_exponents=True
        ),
        left_out=source.modules("modules_to_not_convert", "ignored_layers"),
        skipped_ends=_NOT_OF_WEIGHTS,
    )


def _parse_fbgemm(source: _Source) -> QuantizationConfig:
    """FP8 of Meta's FBGEMM, with a scale per output feature."""
    source.check(words("quant_method modules_to_not_convert activation_scale_ub"), {})
    return QuantizationConfig(
        weights=ScaledConfig(block_shape=(1, 0)),
        left_out=source.modules("modules_to_not_convert"),
        skipped_ends=_NOT_OF_WEIGHTS,
    )


def _parse_modelopt(source: _Source) -> QuantizationConfig:
    """FP8, MXFP8 and NVFP4 of NVIDIA's ModelOpt, or a mixture of them."""
    source.check(
        words("quant_method quant_algo producer config_groups ignore exclude_modules")
        | words("kv_cache_scheme kv_cache_quant_algo quantized_layers"),
        {"group_size": (16,)},
    )
    is_mixed = source.content.get("quant_algo") == _MIXED
    return QuantizationConfig(
        weights=None if is_mixed else _modelopt_weights(source),
        by_module=_parse_layers(source) if is_mixed else {},
        left_out=source.modules("ignore", "exclude_modules"),
        skipped_ends=_NOT_OF_WEIGHTS,
        has_fp8_cache=source.has_fp8_cache(),
    )


def _modelopt_weights(source: _Source) -> WeightConfig:
    """Format of the weights according to ModelOpt's `quant_algo`."""
    formats: dict[object, WeightConfig] = {
        "FP8": ScaledConfig(block_shape=(0, 0)),
        "FP8_PER_CHANNEL_PER_TOKEN": ScaledConfig(block_shape=(1, 0)),
        "NVFP4": Fp4Config(layout="modelopt"),
        "MXFP8": ScaledConfig(block_shape=_MXFP8_BLOCK, has_exponents=True),
        # The same weights, for activations that are not quantized.
        "W4A16_NVFP4": Fp4Config(layout="modelopt"),
    }
    algorithm = source.content.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in formats:
        raise source.unsupported(f"quant_algo {short(algorithm)}")
    return formats[algorithm]


def _parse_layers(source: _Source) -> dict[str, WeightConfig]:
    """Formats by module in ModelOpt's `quantized_layers`; other modules are not quantized."""
    layers = source.content.get("quantized_layers")
    if not isinstance(layers, dict) or not layers:
        raise ValueError(
            f'{source.where} has quant_algo "{_MIXED}" without quantized_layers: add the '
            f"checkpoint's {_MODELOPT_FILE}, which lists them, or use another checkpoint"
        )
    formats = {}
    for name, content in layers.items():
        layer = _Source(where=f"quantized_layers of {source.where}", content=content)
        if not isinstance(content, dict):
            raise layer.malformed(short(name), "an object", content)
        layer.check(words("quant_algo"), {"group_size": (16,)})
        formats[name] = _modelopt_weights(layer)
    return formats


def _parse_compressed(source: _Source) -> QuantizationConfig:
    """compressed-tensors with one group, whose modules have the same format."""
    source.check(
        words("quant_method config_groups format ignore kv_cache_scheme quantization_status")
        | words("global_compression_ratio version transform_config"),
        {},
    )
    _check_transforms(source)
    groups = source.content.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise source.unsupported(f"config_groups {short(groups)}", "one group")
    (group,) = groups.values()
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise source.malformed("a group of config_groups", "an object with weights", group)
    inner = _Source(where=source.where, content=group)
    inner.check(words("targets weights input_activations format"), {})
    kind = group.get("format") or source.content.get("format")
    targets = inner.modules("targets")
    return QuantizationConfig(
        weights=_compressed_weights(_Source(where=source.where, content=group["weights"]), kind),
        left_out=source.modules("ignore"),
        targets=() if "Linear" in targets else targets,
        skipped_ends=_NOT_OF_WEIGHTS,
        has_fp8_cache=source.has_fp8_cache(),
    )


def _check_transforms(source: _Source) -> None:
    """Checks that compressed-tensors applied all transforms (rotations such as SpinQuant's R1) to
    the weights before saving them, so that nothing is left to compute: `TransformLocation` in
    `compressed_tensors.transform`. Raises ValueError for transforms of activations."""
    transforms = source.content.get("transform_config") or {}
    where = f"transform_config of {source.where}"
    if not isinstance(transforms, dict):
        raise source.malformed("transform_config", "an object", transforms)
    config = _Source(where=where, content=transforms)
    config.check(words("config_groups"), {})
    groups = transforms.get("config_groups") or {}
    for group in groups.values() if isinstance(groups, dict) else (groups,):
        applied = group.get("apply") if isinstance(group, dict) else None
        if not isinstance(applied, list):
            raise config.malformed(
                "each group of config_groups", "an object with a list `apply`", group
            )
        _Source(where=where, content=group).check(
            words("type apply randomize head_dim precision"), {"requires_grad": (False,)}
        )
        for place in applied:
            location = place.get("location") if isinstance(place, dict) else place
            if location not in ("weight_input", "weight_output"):
                raise config.unsupported(
                    f"location {short(location)}", '"weight_input" or "weight_output"'
                )


def _compressed_weights(source: _Source, kind: object) -> WeightConfig:
    """Format of the weights of a group in compressed-tensors.

    Args:
        source: the group's `weights` object.
        kind: the group's `format`, the packing of codes.
    """
    source.check(
        words("num_bits type strategy group_size symmetric block_structure observer")
        | words("observer_kwargs scale_dtype zp_dtype"),
        {"dynamic": (False,), "actorder": ("static", "weight")},
    )
    content = source.content
    number, bits, strategy = content.get("type"), content.get("num_bits"), content.get("strategy")
    group_size = source.group_size(content.get("group_size"))
    is_symmetric = content.get("symmetric")
    chosen = {"format": kind, "num_bits": bits, "type": number, "strategy": strategy}
    chosen |= {"group_size": content.get("group_size"), "symmetric": is_symmetric}
    described = "weights with " + ", ".join(f"{key} {short(one)}" for key, one in chosen.items())
    match kind, number, bits:
        case ("float-quantized" | "naive-quantized", "float", 8) if is_symmetric is not False:
            shapes = {"tensor": (0, 0), "channel": (1, 0)}
            if strategy == "block":
                shape = source.sizes("block_structure", content.get("block_structure"))
                return ScaledConfig(block_shape=shape)
            if strategy in shapes:
                return ScaledConfig(block_shape=shapes[strategy])
        case ("int-quantized" | "naive-quantized", "int", 8) if is_symmetric is not False:
            shapes = {"tensor": (0, 0), "channel": (1, 0)}
            if strategy in shapes:
                return ScaledConfig(code="int8", block_shape=shapes[strategy])
        case ("pack-quantized", "int", 4 | 8) if strategy in ("group", "channel"):
            return GroupedIntConfig(
                layout="compressed-tensors",
                bits=int(bits),
                group_size=group_size,
                has_zeros=is_symmetric is False,
            )
        case ("nvfp4-pack-quantized", "float", 4) if group_size == 16:
            return Fp4Config(layout="nvfp4")
        case ("mxfp4-pack-quantized", "float", 4) if group_size == 32:
            return Fp4Config(layout="mxfp4")
    raise source.unsupported(described)


def _parse_awq(source: _Source) -> QuantizationConfig:
    """AutoAWQ's GEMM layout."""
    content = {_AWQ_NAMES.get(key, key): value for key, value in source.content.items()}
    source = _Source(where=source.where, content=content)
    source.check(
        words("quant_method group_size modules_to_not_convert backend exllama_config do_fuse")
        | words("fuse_max_seq_len modules_to_fuse"),
        {"bits": (4,), "version": ("gemm", "GEMM"), "zero_point": (True,)},
    )
    if content.get("bits") is None:
        raise ValueError(f"bits is missing from {source.where}: add it; only 4 is supported")
    group_size = source.group_size(content.get("group_size"))
    return QuantizationConfig(
        weights=GroupedIntConfig(layout="awq", group_size=group_size),
        left_out=source.modules("modules_to_not_convert"),
    )


def _parse_gptq(source: _Source) -> QuantizationConfig:
    """AutoGPTQ's and GPTQModel's layout; groups consist of consecutive features unless `desc_act`
    is set."""
    source.check(
        _GPTQ_HARMLESS | words("quant_method bits group_size modules_in_block_to_quantize dynamic"),
        {
            "bits": (4, 8),
            "desc_act": (True, False),
            "checkpoint_format": ("gptq", "gptq_v2"),
            "pack_dtype": ("int32",),
        },
    )
    content, bits = source.content, source.content.get("bits")
    if type(bits) is not int:
        raise source.malformed("bits", "4 or 8", bits)
    key = "modules_in_block_to_quantize"
    named = content.get(key) or []
    if isinstance(named, list):  # of names or of lists of names
        named = [name for part in named for name in (part if isinstance(part, list) else [part])]
    return QuantizationConfig(
        weights=GroupedIntConfig(
            layout="gptq",
            bits=bits,
            group_size=source.group_size(content.get("group_size")),
            zeros_less_one=content.get("checkpoint_format") != "gptq_v2",
            has_index=content.get("desc_act") is True,
        ),
        targets=_Source(where=source.where, content={key: named}).modules(key),
        left_out=_gptq_left_out(source),
    )


def _gptq_left_out(source: _Source) -> tuple[str, ...]:
    """Patterns of modules that GPTQModel's `dynamic` excludes ("-:..."); other per-module settings
    are not supported."""
    patterns = source.content.get("dynamic") or {}
    if not isinstance(patterns, dict):
        raise source.malformed("dynamic", "an object", patterns)
    for pattern, settings in patterns.items():
        is_plain = not settings and pattern.endswith(_PLAIN_MODULES)
        if not pattern.startswith("-:") and not is_plain:
            raise source.unsupported(f"dynamic {short(pattern)}", "patterns that begin with '-:'")
    named = [f"re:{pattern[2:]}" for pattern in patterns if pattern.startswith("-:")]
    for pattern in named:
        source.check_pattern(pattern)
    return tuple(named)


def _parse_gpt_oss(source: _Source) -> QuantizationConfig:
    """MXFP4 of gpt-oss; all modules except the experts must be excluded."""
    modules = source.content.get("modules_to_not_convert")
    names = [str(name) for name in modules] if isinstance(modules, list) else []
    for plain in _BESIDE_EXPERTS:
        if not any(name.endswith(plain) for name in names):
            raise source.unsupported(f"modules_to_not_convert without {plain}")
    others = [name for name in names if not name.endswith(_BESIDE_EXPERTS)]
    others += [
        key
        for key in source.content
        if key not in ("quant_method", "modules_to_not_convert") and not key.startswith("_")
    ]
    if others:
        raise source.unsupported(f"the key or module {others[0]}")
    return QuantizationConfig(weights=GptOssMxfp4Config())


_PARSERS: Mapping[str, Callable[[_Source], QuantizationConfig]] = {
    "fp8": _parse_fp8,
    "mxfp8": _parse_mxfp8,
    "fbgemm_fp8": _parse_fbgemm,
    "compressed-tensors": _parse_compressed,
    "modelopt": _parse_modelopt,
    "modelopt_fp4": _parse_modelopt,
    "awq": _parse_awq,
    "gptq": _parse_gptq,
}
"""Parsers by `quant_method`."""
_AWQ_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}
"""Keys of quant_config.json that have a different name in config.json."""
_GPTQ_HARMLESS = words(
    """
    batch_size block_name_to_quantize cache_block_outputs damp_percent damp_auto_increment dataset
    exllama_config max_input_length meta model_file_base_name model_name_or_path model_seqlen
    module_name_preceding_first_block pad_token_id static_groups sym tokenizer true_sequential
    use_cuda_fp16 use_exllama quantizer mse
    """
)
"""Keys of the quantization process that do not affect the weights' format."""
