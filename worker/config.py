"""Configuration of a worker's engine, in groups of options. The fields of all groups are also the
CLI's flags, the keys of config files and the arguments of `LLM`; see `worker.protocol.options`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import msgspec

from worker.protocol.admission import IN_SCHEDULER_CONFIG, AdmissionOptions
from worker.protocol.analyzed import analyzed
from worker.protocol.diffusion import DllmAlgorithm, DllmFeature
from worker.protocol.host_cache import HostCachePolicy
from worker.protocol.hub import at_revision, commit_of
from worker.protocol.options import from_options, group, option_name, option_values
from worker.protocol.pooling import PoolingOptions

Device = Literal["auto", "cpu", "cuda"]
CPUBackend = Literal["auto", "native", "torch"]
AttentionBackendName = Literal["auto", "triton", "flash", "torch"]
StructuredOutputsBackend = Literal["auto", "xgrammar", "guidance"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDType = Literal["auto", "bfloat16", "fp8", "fp8_e4m3"]
Quantization = Literal["auto", "fp8"]
LoadFormat = Literal["auto", "dummy"]
SpeculativeMethod = Literal["none", "ngram", "draft", "mtp", "eagle3"]

_SPECULATIVE = {"within": "--speculative-config"}
_DLLM = {"within": "--dllm-config"}
_VLLM_METHODS = {
    **dict.fromkeys(
        (
            *("deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "mimo_mtp", "hy_v3_mtp"),
            *("qwen3_next_mtp", "qwen3_5_mtp", "ernie_mtp", "mimo_v2_mtp", "longcat_flash_mtp"),
            *("nemotron_h_mtp", "step3p5_mtp"),
        ),
        "mtp",
    ),
    "draft_model": "draft",
}
"""vLLM's names for speculative decoding methods, mapped to the names used here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulingConfig:
    """Limits of steps and queues; `SchedulerConfig` adds properties of the loaded model.

    Raises:
        ValueError: a value is out of range; the message names the flag or the field.
    """

    admission: AdmissionOptions = field(default_factory=AdmissionOptions, metadata=group())
    """Initial admission options, which can be changed at run time."""
    max_num_seqs: int = 0
    """Maximum number of running requests. 0 (default) selects 1,024 on GPUs with at least 70 GiB
    (except A100), 256 on other GPUs and 64 on CPU, limited to --max-num-batched-tokens; fewer on
    GPUs if the states of linear attention would take more than 20 % of the memory."""
    max_num_batched_tokens: int = 0
    """Maximum number of tokens processed in one step, at least --max-num-seqs; longer prompts are
    split into chunks. 0 (default) selects 8,192 on GPUs with at least 70 GiB (except A100), 2,048
    on other GPUs, and 1,024 on CPU."""
    enable_chunked_prefill: bool = True
    """Chunked prefill: split prompts into chunks that are batched with other requests. If disabled,
    each prompt of up to --max-num-batched-tokens tokens is prefilled in one step, without other
    prompts if it exceeds `prefill_max_tokens` of --scheduler-config."""
    preempt_priority_gap: int = field(default=3, metadata=IN_SCHEDULER_CONFIG)
    """Minimum difference in priority for a waiting request to preempt a running one; 0 disables
    preemption by priority."""
    deadline_margin_ms: float = field(default=50.0, metadata=IN_SCHEDULER_CONFIG)
    """Raise the priority of a waiting request by 2 when this many milliseconds remain until it can
    no longer meet its SLO. Running requests whose next token is due within this time get no draft
    tokens, which would make their step longer."""
    max_queued_requests: int = field(default=4096, metadata=IN_SCHEDULER_CONFIG)
    """Maximum number of waiting requests per worker; further ones are rejected with HTTP 429 unless
    they are more urgent than a waiting one. 0 for no limit."""
    max_queued_tokens: int = field(default=0, metadata=IN_SCHEDULER_CONFIG)
    """Maximum total number of tokens in a worker's waiting requests; 0 for no limit."""

    def __post_init__(self) -> None:
        if not 0 <= self.preempt_priority_gap <= 9:
            name = option_name(self, "preempt_priority_gap")
            raise ValueError(f"{name} must be in [0, 9], got {self.preempt_priority_gap}")
        for name in (
            *("max_num_seqs", "max_num_batched_tokens", "deadline_margin_ms"),
            *("max_queued_requests", "max_queued_tokens"),
        ):
            _check_not_negative(self, name)
        if 0 < self.max_num_batched_tokens < self.max_num_seqs:
            tokens, seqs = (
                option_name(self, name) for name in ("max_num_batched_tokens", "max_num_seqs")
            )
            raise ValueError(
                f"{tokens} ({self.max_num_batched_tokens}) must be at least {seqs} "
                f"({self.max_num_seqs}): each running request computes one token per step"
            )


DEFAULT_PAGE_SIZE = 16
"""Default of `page_size` for autoregressive models, in tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """Configuration of the KV cache, the prefix cache and KV offloading."""

    page_size: int = 0
    """Tokens per page of the KV cache (vLLM's block size), which is also the granularity of prefix
    caching. 0 (default) selects 16, or the block size of a block-diffusion model if that is
    larger."""
    kv_cache_dtype: KVCacheDType = "auto"
    """Data type of the KV cache: fp8 (the same as fp8_e4m3) holds twice the tokens of bfloat16; it
    needs compute capability 8.9 or higher on CUDA, and implies --cpu-backend torch on CPU. auto
    selects fp8 if the checkpoint specifies it and such a GPU is used, otherwise --dtype. bfloat16
    keeps the cache in bfloat16 even if the checkpoint specifies fp8."""
    kv_cache_tokens: int | None = None
    """Size of the KV cache in tokens; as many as fit into memory if unset."""
    gpu_memory_utilization: float = 0.9
    """Fraction of GPU memory to use for weights, activations and KV cache (CUDA only)."""
    enable_prefix_caching: bool = True
    """Prefix caching: keep computed KV pages and reuse them for prompts with the same prefix."""
    host_cache_gib: float | None = None
    """KV offloading: host memory in GiB per worker (total for all ranks) for pages evicted from the
    prefix cache, which are copied back instead of recomputed; 0 disables it. If unset on CUDA, GPUs
    share the node's free memory minus half of its total memory, up to twice their KV caches."""
    host_cache_policy: HostCachePolicy = field(default="auto", metadata=IN_SCHEDULER_CONFIG)
    """When to copy offloaded KV pages back from host memory: always, or (auto) only if recent
    timings predict that copying is faster than recomputing."""

    def __post_init__(self) -> None:
        if self.page_size < 0 or self.page_size & (self.page_size - 1):
            raise ValueError(f"--page-size must be a power of two, got {self.page_size}")
        if self.kv_cache_tokens is not None and self.kv_cache_tokens < self.page_size:
            raise ValueError(
                f"--kv-cache-tokens must be at least --page-size ({self.page_size}), got "
                f"{self.kv_cache_tokens}"
            )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(
                f"--gpu-memory-utilization must be in (0, 1], got {self.gpu_memory_utilization}"
            )
        if self.host_cache_gib and not self.enable_prefix_caching:
            raise ValueError(
                "--host-cache-gib needs prefix caching: remove --no-enable-prefix-caching"
            )
        _check_not_negative(self, "host_cache_gib")

    @property
    def is_fp8(self) -> bool:
        """Whether the KV cache is FP8 regardless of the checkpoint."""
        return self.kv_cache_dtype in ("fp8", "fp8_e4m3")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """Configuration of speculative decoding."""

    method: SpeculativeMethod = field(
        default="none",
        metadata={
            "option": "speculative_method",
            "key": ("--speculative-config", "method"),
            "spellings": _VLLM_METHODS,
        },
    )
    """Speculative decoding method, which does not change the output. ngram (prompt lookup) proposes
    the tokens that followed earlier occurrences of the latest tokens in the request's own text;
    draft uses the model of --speculative-model; mtp uses the multi-token prediction head of
    checkpoints such as DeepSeek-V3 and GLM-4.5; eagle3 uses the EAGLE-3 head of
    --speculative-model, and implies --cpu-backend torch on CPU."""
    model: str = field(
        default="",
        metadata={"option": "speculative_model", "key": ("--speculative-config", "model")},
    )
    """Draft model for --speculative-method draft: folder or Hub repository of a smaller checkpoint
    with the same tokenizer as the model. For eagle3, folder or Hub repository of an EAGLE-3 head
    that was trained for the model."""
    revision: str = field(default="", metadata=_SPECULATIVE | {"option": "speculative_revision"})
    """Branch, tag or commit of --speculative-model; the main branch if empty."""
    num_speculative_tokens: int = field(default=8, metadata=_SPECULATIVE)
    """Maximum number of draft tokens per request and step; speculative_adaptive lowers it if
    drafting fewer tokens is faster."""
    adaptive: bool = field(default=True, metadata=_SPECULATIVE | {"option": "speculative_adaptive"})
    """Adapt the number of draft tokens to the measured acceptance rate and cost. If false, always
    draft the maximum."""
    max_utilization: float = field(
        default=0.8, metadata=_SPECULATIVE | {"option": "speculative_max_utilization"}
    )
    """Disable drafting when running requests reach this fraction of --max-num-seqs."""
    max_priority: int = field(
        default=6, metadata=_SPECULATIVE | {"option": "speculative_max_priority"}
    )
    """Maximum priority of requests to draft for; steps with more urgent requests are kept short."""

    def __post_init__(self) -> None:
        if (self.method in ("draft", "eagle3")) != bool(self.model):
            raise ValueError(
                "--speculative-method draft or eagle3 and --speculative-model must be set "
                f"together, got {self.method} and {self.model!r}"
            )
        if self.revision and not self.model:
            raise ValueError(
                f"{option_name(self, 'speculative_revision')} needs --speculative-model"
            )
        if self.num_speculative_tokens < 1:
            raise ValueError(
                f"{option_name(self, 'num_speculative_tokens')} must be at least 1, got "
                f"{self.num_speculative_tokens}: use --speculative-method none to disable drafting"
            )
        if self.max_utilization < 0.0:
            name = option_name(self, "speculative_max_utilization")
            raise ValueError(f"{name} must not be negative, got {self.max_utilization}")

    @property
    def enabled(self) -> bool:
        """Whether speculative decoding is enabled, that is, whether a method is set."""
        return self.method != "none"

    @property
    def checkpoint(self) -> str:
        """The draft model or head, as NAME or NAME@REVISION; empty if there is none."""
        return at_revision(self.model, self.revision)


@dataclass(frozen=True, kw_only=True, slots=True)
class DllmConfig:
    """Configuration of the decoding of block-diffusion models."""

    algorithm: DllmAlgorithm = field(default="LowConfidence", metadata={"option": "dllm_algorithm"})
    """Decoding algorithm of block-diffusion models for requests that do not specify one. Models
    with canvases (DiffusionGemma) have their own algorithm."""
    fdfo: bool = field(default=True, metadata=_DLLM | {"option": "dllm_fdfo"})
    """First done, first out: remove a finished block from its batch immediately. If false, all
    blocks of a batch wait for the last one."""
    threshold: float | None = field(default=None, metadata=_DLLM | {"option": "dllm_threshold"})
    """Probability above which a position of a block is decoded; the algorithm's default if unset
    (0.5 for JointThreshold and JointThresholdInDel, 0.95 for others)."""
    disable: tuple[str, ...] = field(default=(), metadata=_DLLM | {"option": "dllm_disable"})
    """List of block-diffusion optimizations to disable, to measure their effect: inplace (running
    blocks keep their slots and pages until one finishes), mixed_rounds (batch prompts with running
    blocks, and many blocks together), fused_commit (combine a finished block's last pass with the
    first pass of the next), skip_last_commit (omit the last pass of a request's last block),
    report_at_once (finish a block in the edit round that changes nothing, not one round later),
    early_exit (stop a block at the end-of-sequence token), masked_logits (compute logits of
    undecoded positions only), skip_unread (in the last layer, compute only keys and values for
    positions without logits)."""

    def __post_init__(self) -> None:
        features = get_args(DllmFeature)
        if unknown := [name for name in self.disable if name not in features]:
            name = option_name(self, "dllm_disable")
            known = ", ".join(features)
            raise ValueError(f"{name}: unknown optimization {unknown[0]!r}: choose from {known}")
        if self.threshold is not None and not 0.0 <= self.threshold <= 1.0:
            name = option_name(self, "dllm_threshold")
            raise ValueError(f"{name} must be in [0, 1], got {self.threshold}")

    @property
    def features(self) -> tuple[str, ...]:
        """The enabled optimizations."""
        return tuple(name for name in get_args(DllmFeature) if name not in self.disable)


class LoraModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of the adapters in `LoraConfig.modules`."""

    name: str
    """Name of the adapter, which requests specify as their model."""
    path: str
    """Folder with adapter_config.json and adapter_model.safetensors, as PEFT saves them."""
    base_model_name: str | None = None
    """Accepted for compatibility with vLLM and ignored: all adapters are for the served model."""


MAX_LORA_RANK = 512
"""Maximum value of `max_lora_rank`, as in vLLM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """LoRA adapters of the model, which requests select by name."""

    enabled: bool = field(default=False, metadata={"option": "enable_lora"})
    """Serve LoRA adapters along with the model. On CPU, encoders then run in torch."""
    modules: tuple[str, ...] = field(
        default=(),
        metadata={"option": "lora_modules", "argparse": {"action": "extend", "nargs": "+"}},
    )
    """Adapters to serve, each as NAME=FOLDER or as a JSON object with the keys name and path. A
    folder contains adapter_config.json and adapter_model.safetensors, as PEFT saves them. Put the
    model before this flag."""
    max_loras: int = 1
    """Maximum number of different adapters in one batch; device memory is reserved for all of
    them."""
    max_lora_rank: int = 16
    """Maximum rank of adapters, at most 512. Device memory is reserved for it, so do not set it
    higher than the adapters need."""
    embeddings: bool = field(default=False, metadata={"option": "enable_lora_embeddings"})
    """Support adapters of the embedding and the LM head, whose target_modules include embed_tokens
    or lm_head. Device memory is reserved for them: two values per vocabulary token, for each unit
    of rank. On CPU, implies --cpu-backend torch."""
    max_cpu_loras: int | None = None
    """Maximum number of adapters in host memory, at least --max-loras, which is the default. Others
    are read from disk again before use."""

    def __post_init__(self) -> None:
        if self.modules and not self.enabled:
            raise ValueError("--lora-modules needs --enable-lora: set it")
        if self.embeddings and not self.enabled:
            raise ValueError("--enable-lora-embeddings needs --enable-lora: set it")
        if self.max_loras < 1:
            raise ValueError(f"--max-loras must be at least 1, got {self.max_loras}")
        if not 1 <= self.max_lora_rank <= MAX_LORA_RANK:
            raise ValueError(
                f"--max-lora-rank must be in [1, {MAX_LORA_RANK}], got {self.max_lora_rank}"
            )
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"--max-cpu-loras ({self.max_cpu_loras}) must be at least --max-loras "
                f"({self.max_loras})"
            )
        names = [_lora_module(text).name for text in self.modules]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"--lora-modules: {repeated[0]!r} is used more than once: rename one")

    @property
    def folders(self) -> Mapping[str, str]:
        """Adapter folders, by adapter name."""
        return {module.name: module.path for module in map(_lora_module, self.modules)}

    @property
    def num_host_copies(self) -> int:
        """Maximum number of adapters in host memory."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras


def _lora_module(text: str) -> LoraModule:
    """Parses an adapter given as NAME=FOLDER or as JSON."""
    if text.startswith("{"):
        try:
            module = msgspec.json.decode(text, type=analyzed(LoraModule))
        except msgspec.MsgspecError as error:
            raise ValueError(
                f"--lora-modules: {text!r} must be NAME=FOLDER, or a JSON object with name and "
                f"path: {error}"
            ) from error
    else:
        name, _, path = text.partition("=")
        module = LoraModule(name=name, path=path)
    if not module.name or not module.path:
        raise ValueError(
            f"--lora-modules: {text!r} must be NAME=FOLDER, or a JSON object with name and path"
        )
    return module


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionConfig:
    """Options for running the model on ranks: backends, CUDA graphs and threads."""

    attention_backend: AttentionBackendName = "auto"
    """Attention backend. auto selects triton on CUDA, and the attention of --cpu-backend on CPU;
    torch implies --cpu-backend torch there. flash runs prompts of 1,024 tokens or more on
    FlashAttention 4, which the extra rayfleet[gpu] installs."""
    overlap_depth: int = 1
    """Overlap scheduling: number of steps, 0 or 1, launched before the result of the previous step
    is available. 1 hides scheduling behind model execution."""
    enforce_eager: bool = False
    """Disable CUDA graphs, which otherwise replay decode steps, small steps with prefill or draft
    tokens, and passes over the running blocks of block-diffusion models."""
    cudagraph_capture_sizes: tuple[int, ...] = ()
    """Sizes of the steps to capture as CUDA graphs: in tokens for decode steps (up to
    --max-num-seqs) and steps with prefill or draft tokens (up to --max-num-batched-tokens), in
    blocks or canvases for block diffusion. Default: 1, 2, 4, 8, 16 and so on, up to 512 for decode
    steps, 512 (large models) to 2,048 (small ones) for steps with prefill or draft tokens, two
    blocks per request for block diffusion, and 2,048 tokens for canvases."""
    cpu_threads: int = 0
    """Maximum number of compute threads per rank on CPU; 0 divides the cores among the ranks."""
    cpu_backend: CPUBackend = "auto"
    """Backend for model execution on CPU: native (a library compiled for this machine), torch
    (PyTorch), or auto, which selects native if a C++ compiler is installed and the model's
    dimensions are supported."""
    enable_weight_caching: bool = False
    """Cache the weights on CPU, packed for the native backend, in a file that all workers of a node
    map into memory (in a pod, in /tmp). Useful if several workers of a model share a node or start
    often; takes as much disk space as the weights take memory."""

    def __post_init__(self) -> None:
        if self.cpu_backend == "native" and self.attention_backend != "auto":
            raise ValueError(
                "--cpu-backend native cannot be combined with --attention-backend "
                f"{self.attention_backend}: remove one of them"
            )
        if self.overlap_depth not in (0, 1):
            raise ValueError(f"--overlap-depth must be 0 or 1, got {self.overlap_depth}")
        if any(size < 1 for size in self.cudagraph_capture_sizes):
            raise ValueError(
                "all values of --cudagraph-capture-sizes must be at least 1, got "
                f"{min(self.cudagraph_capture_sizes)}"
            )
        _check_not_negative(self, "cpu_threads")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Configuration of one worker: model, parallelism, and the groups of its other options."""

    model: str
    """Folder of a Hugging Face checkpoint, or name of a repository on the Hub."""
    revision: str = ""
    """Branch, tag or commit of the Hub repository; the main branch if empty. It is resolved to a
    commit once, so that all gateways and workers load the same configuration, tokenizer and
    weights."""
    tokenizer: str = ""
    """Folder or Hub repository (NAME or NAME@REVISION) of a tokenizer that replaces the model's
    tokenizer and chat template. If empty, the model's are used."""
    tensor_parallel_size: int = field(default=1, metadata={"aliases": ("-tp",)})
    """Tensor parallelism: number of ranks that each copy of the model is sharded over."""
    # All ranks process all tokens: the only communication is tensor parallelism's all-reduce.
    enable_expert_parallel: bool = False
    """Use expert parallelism instead of tensor parallelism for MoE experts: each rank holds an
    equal number of whole experts. Faster if shards of experts would be too narrow for the device or
    would split quantization blocks, slower if a few experts receive most tokens."""
    device: Device = "auto"
    """Device for inference; auto selects cuda if a CUDA device is visible, otherwise cpu."""
    dtype: DType = "auto"
    """Data type of weights, activations and, by default, the KV cache. auto selects the
    checkpoint's type on CUDA (bfloat16 for float32). On CPU, auto selects bfloat16 if the
    checkpoint is stored in it, the CPU supports it (AMX, AVX512_BF16), a measurement at the first
    start found it faster, and --batch-invariant is off; otherwise float32."""
    max_model_len: int | None = None
    """Maximum context length, prompt plus completion, in tokens; the model's maximum if unset."""
    batch_invariant: bool = False
    """Batch invariance: make outputs bitwise independent of the other requests in a batch, at the
    cost of speed."""
    step_timeout_s: float = 10.0
    """Timeout of a step in seconds, or 20 times its predicted duration if that is longer; 0
    disables it. On timeout, the worker's ranks are killed and restarted, and their requests are
    resumed on other workers."""
    structured_outputs_backend: StructuredOutputsBackend = "auto"
    """Backend for structured outputs: xgrammar, guidance (llguidance), or auto, which uses xgrammar
    except for JSON schemas (including those of tools) and patterns that only guidance can
    enforce."""
    quantization: Quantization = field(default="auto", metadata={"aliases": ("-q",)})
    """Quantization of linear weights: fp8 quantizes an unquantized checkpoint while loading it, so
    that its linear weights take half the memory of bfloat16. auto keeps the checkpoint's format
    (FP8, INT8, AWQ, GPTQ, ...)."""
    load_format: LoadFormat = "auto"
    """Source of the weights: auto loads the checkpoint's safetensors files, dummy initializes
    random weights for benchmarking."""

    scheduling: SchedulingConfig = field(
        default_factory=SchedulingConfig, metadata=group("scheduling")
    )
    """Limits of steps and queues, and admission options."""
    cache: CacheConfig = field(default_factory=CacheConfig, metadata=group("cache"))
    """KV cache, prefix cache and KV offloading."""
    speculative: SpeculativeConfig | None = field(default=None, metadata=group("speculative"))
    """Speculative decoding; None if it is disabled."""
    dllm: DllmConfig = field(default_factory=DllmConfig, metadata=group("dllm"))
    """Decoding of block-diffusion models."""
    pooling: PoolingOptions = field(default_factory=PoolingOptions, metadata=group("pooling"))
    """Task of the model, and pooling of its hidden states into a vector."""
    lora: LoraConfig | None = field(default=None, metadata=group("lora"))
    """LoRA adapters; None if they are disabled."""
    execution: ExecutionConfig = field(default_factory=ExecutionConfig, metadata=group("execution"))
    """Backends, CUDA graphs and threads of the ranks."""

    @classmethod
    def of(cls, **options: Any) -> EngineConfig:
        """Configuration with the given options, which have the same names as the CLI's flags.

        Raises:
            ValueError: an option is unknown or out of range; the message names it.
        """
        return from_options(cls, options)

    def __post_init__(self) -> None:
        if self.tensor_parallel_size < 1:
            raise ValueError(
                f"--tensor-parallel-size must be at least 1, got {self.tensor_parallel_size}"
            )
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ValueError(
                "--enable-expert-parallel needs more than one rank: set --tensor-parallel-size"
            )
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"--max-model-len must be at least 2, got {self.max_model_len}")
        _check_not_negative(self, "step_timeout_s")
        backend = self.execution.attention_backend
        if self.batch_invariant and backend == "flash":
            raise ValueError(
                f"--attention-backend {backend} is not batch-invariant: use "
                "--attention-backend auto, or --no-batch-invariant"
            )
        if self.execution.cpu_backend == "native" and self.cache.is_fp8:
            raise ValueError(
                "--cpu-backend native does not support --kv-cache-dtype "
                f"{self.cache.kv_cache_dtype}: set one of them to auto"
            )
        if self.execution.cpu_backend == "native" and self.head_checkpoint:
            raise ValueError(
                "--cpu-backend native does not support --speculative-method eagle3: use "
                "--cpu-backend auto, or --speculative-method ngram, draft or mtp"
            )
        if self.execution.cpu_backend == "native" and self.adapts_vocabulary:
            raise ValueError(
                "--cpu-backend native does not support --enable-lora-embeddings: use "
                "--cpu-backend auto, or remove --enable-lora-embeddings"
            )

    @property
    def adapts_vocabulary(self) -> bool:
        """Whether the embedding and the LM head may have LoRA adapters."""
        return self.lora is not None and self.lora.embeddings

    @property
    def cpu_steps(self) -> CPUBackend:
        """Backend for steps on CPU; torch if an attention backend, an FP8 KV cache, LoRA for the
        embedding or an EAGLE-3 head is configured."""
        needs_torch = (
            *(self.execution.attention_backend != "auto", self.cache.is_fp8),
            *(self.adapts_vocabulary, bool(self.head_checkpoint)),
        )
        return "torch" if any(needs_torch) else self.execution.cpu_backend

    @property
    def checkpoint(self) -> str:
        """Model to load, as NAME or NAME@REVISION."""
        return at_revision(self.model, self.revision)

    @property
    def tokenizer_checkpoint(self) -> str:
        """Checkpoint from which to load the tokenizer: `tokenizer`, or the model's."""
        return self.tokenizer or self.checkpoint

    @property
    def draft_checkpoint(self) -> str:
        """Draft model to load, as NAME or NAME@REVISION; empty if there is none."""
        draft = self.speculative
        return draft.checkpoint if draft is not None and draft.method == "draft" else ""

    @property
    def head_checkpoint(self) -> str:
        """EAGLE-3 head to load, as NAME or NAME@REVISION; empty if there is none."""
        draft = self.speculative
        return draft.checkpoint if draft is not None and draft.method == "eagle3" else ""

    @property
    def num_mtp_drafts(self) -> int:
        """Maximum number of drafts per step by the model's MTP heads; 0 if they are not used."""
        draft = self.speculative
        return draft.num_speculative_tokens if draft and draft.method == "mtp" else 0

    def with_options(self, **options: Any) -> EngineConfig:
        """This configuration with some options changed. Options have the same names as the CLI's
        flags."""
        return from_options(EngineConfig, option_values(self) | options)

    def with_page_size(self, block_size: int) -> EngineConfig:
        """This configuration, with the model's default page size if it is unset (0).

        Args:
            block_size: block size of a block-diffusion model; 1 for an autoregressive model.
        """
        page_size = self.cache.page_size or max(DEFAULT_PAGE_SIZE, block_size)
        return replace(self, cache=replace(self.cache, page_size=page_size))

    def with_limits(self, max_num_seqs: int, max_num_batched_tokens: int) -> EngineConfig:
        """This configuration, with unset (0) `max_num_seqs` and `max_num_batched_tokens` replaced
        by the device's defaults.

        If only one limit is set, the default of the other is adjusted to it, so that the number
        of tokens is never less than the number of requests.
        """
        given = self.scheduling
        tokens = given.max_num_batched_tokens or max(max_num_batched_tokens, given.max_num_seqs)
        limits = replace(
            given,
            max_num_seqs=given.max_num_seqs or min(max_num_seqs, tokens),
            max_num_batched_tokens=tokens,
        )
        return replace(self, scheduling=limits)


def pinned(config: EngineConfig) -> EngineConfig:
    """`config` with its revisions resolved to commits, so that later loads read the same files.

    Raises the errors of `worker.protocol.hub.commit_of`.
    """
    speculative = config.speculative
    if speculative is not None and speculative.model:
        speculative = replace(speculative, revision=commit_of(speculative.checkpoint))
    return replace(config, revision=commit_of(config.checkpoint), speculative=speculative)


def _check_not_negative(options: object, name: str) -> None:
    if (value := getattr(options, name)) is not None and value < 0:
        raise ValueError(f"{option_name(options, name)} must not be negative, got {value}")
