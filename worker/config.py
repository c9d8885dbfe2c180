"""Configuration of one worker group's engine. The CLI and `LLM` options are these field names."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Literal, get_args

from worker.protocol.admission import IN_SCHEDULER_CONFIG, AdmissionOptions, option_name
from worker.protocol.diffusion import DllmAlgorithm, DllmFeature
from worker.protocol.host_cache import HostCachePolicy
from worker.protocol.hub import at_revision, commit_of

Device = Literal["auto", "cpu", "cuda"]
CPUBackend = Literal["auto", "native", "torch"]
AttentionBackendName = Literal["auto", "triton", "flashinfer", "flash", "torch"]
StructuredOutputsBackend = Literal["auto", "xgrammar", "guidance"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
SpeculativeMethod = Literal["none", "ngram", "draft"]

_SPECULATIVE = {"within": "--speculative-config"}
_DLLM = {"within": "--dllm-config"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulingOptions(AdmissionOptions):
    """Engine options that the scheduler reads, too; `SchedulerConfig` adds what was loaded.

    Raises:
        ValueError: a value is out of range; the message names the flag, or its field.
    """

    max_num_seqs: int = 0
    """Maximum number of running requests. 0 uses the device's default, but no more than
    --max-num-batched-tokens: 1,024 on GPUs of 70 GiB or more (not A100s), 256 on other GPUs, 64 on
    CPU and for models with linear attention."""
    max_num_batched_tokens: int = 0
    """Token budget of one step, at least --max-num-seqs; longer prompts are computed in chunks.
    0 uses the device's default: 8,192 on GPUs of 70 GiB or more (not A100s), 2,048 on other GPUs,
    1,024 on CPU."""
    enable_chunked_prefill: bool = True
    """Chunked prefill: compute prompts in chunks beside other work. Without it a prompt is computed
    in one step, in a step of its own where it is longer than `prefill_max_tokens` of
    --scheduler-config, and in chunks only where it is longer than --max-num-batched-tokens."""
    preempt_priority_gap: int = field(default=3, metadata=IN_SCHEDULER_CONFIG)
    """Least difference in priority by which a waiting request preempts a running one; 0 turns
    preemption by priority off."""
    deadline_margin_ms: float = field(default=50.0, metadata=IN_SCHEDULER_CONFIG)
    """Milliseconds before the last moment at which a waiting request can still meet its SLO, from
    which on its priority is raised by 2. A running request whose next token is due within as many
    gets no drafts: a step with drafts takes longer, accepted or not."""
    max_queued_requests: int = field(default=4096, metadata=IN_SCHEDULER_CONFIG)
    """Most requests that may wait at a worker; further ones get 429 unless they are more urgent
    than one that waits. 0 for any number."""
    max_queued_tokens: int = field(default=0, metadata=IN_SCHEDULER_CONFIG)
    """Most tokens of all waiting requests together; 0 for any number."""
    enable_prefix_caching: bool = True
    """Prefix caching: keep computed KV pages and reuse them for prompts that begin alike."""
    host_cache_policy: HostCachePolicy = field(default="auto", metadata=IN_SCHEDULER_CONFIG)
    """When KV pages are copied back from host memory: auto, where recent times say that the copy is
    quicker than computing them again; or always."""

    def __post_init__(self) -> None:
        AdmissionOptions.__post_init__(self)
        if not 0 <= self.preempt_priority_gap <= 9:
            name = option_name(self, "preempt_priority_gap")
            raise ValueError(f"{name} must be in [0, 9], got {self.preempt_priority_gap}")
        for name in (
            *("max_num_seqs", "max_num_batched_tokens", "deadline_margin_ms"),
            *("max_queued_requests", "max_queued_tokens"),
        ):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{option_name(self, name)} must not be negative, got {value}")
        if 0 < self.max_num_batched_tokens < self.max_num_seqs:
            tokens, seqs = (
                option_name(self, name) for name in ("max_num_batched_tokens", "max_num_seqs")
            )
            raise ValueError(
                f"{tokens} ({self.max_num_batched_tokens}) must be greater than or equal to {seqs} "
                f"({self.max_num_seqs}): each running request computes one token per step"
            )

    @property
    def admission(self) -> AdmissionOptions:
        """The admission rules that the scheduler starts with."""
        names = [option.name for option in fields(AdmissionOptions)]
        return AdmissionOptions(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig(SchedulingOptions):
    """Configuration of one worker group: what it loads, and how large its steps and caches are."""

    model: str
    """Folder of a Hugging Face checkpoint, or a repository name on the Hub."""
    revision: str = ""
    """Branch, tag or commit of the Hub repository; empty takes its main branch. It is resolved to a
    commit once: all gateways and workers load configuration, tokenizer and weights of that."""
    tokenizer: str = ""
    """Folder or Hub repository (NAME@REVISION for one revision) of a tokenizer that replaces the
    model's own; its chat template comes with it. Empty takes the model's own."""
    tensor_parallel_size: int = field(default=1, metadata={"aliases": ("-tp",)})
    """Tensor parallelism: ranks that share one copy of the model."""
    enable_expert_parallel: bool = False
    """Expert parallelism: each rank holds an equal number of whole experts in place of a shard of
    every expert; other weights are sharded as without it. All ranks see all tokens, so nothing is
    exchanged but the all-reduce of tensor parallelism. It pays where shards of experts are too
    narrow for the device or would cut blocks of a quantized weight, and costs where few experts get
    most tokens: their ranks compute longest."""
    device: Device = "auto"
    """Device that ranks run on; auto is cuda where a CUDA device is visible, else cpu."""
    dtype: DType = "auto"
    """Data type of weights, activations and KV cache. auto on CUDA is the checkpoint's own,
    bfloat16 for one in float32. auto on CPU is float32, or bfloat16 for a checkpoint in bfloat16
    where the processor multiplies it (AMX, AVX512_BF16) and a measurement at the first start found
    it quicker; with --batch-invariant always float32."""
    max_model_len: int | None = None
    """Most tokens of prompt plus completion; None takes the model's own maximum."""
    page_size: int = 16
    """Tokens per page of the KV cache (a block, in vLLM), which is also the unit of the prefix
    cache."""
    kv_cache_tokens: int | None = None
    """Size of the KV cache in tokens; None takes what memory allows."""
    gpu_memory_utilization: float = 0.9
    """Fraction of device memory for weights, activations and KV cache (CUDA)."""
    host_cache_gib: float = 0.0
    """KV offloading: host memory in GiB, of all ranks of a worker together, for pages that are
    evicted from the prefix cache; 0 for none. They come back by copy instead of being computed
    again."""
    batch_invariant: bool = False
    """Batch invariance: bitwise the same output whatever else runs, at a cost in speed."""
    attention_backend: AttentionBackendName = "auto"
    """Attention backend. On CUDA auto is triton; flashinfer and flash (FlashAttention) have to be
    installed. On CPU auto leaves it to --cpu-backend; any other has torch run the steps there,
    since the compiled library has its own attention."""
    overlap_depth: int = 1
    """Steps launched ahead of the one whose result is awaited, 0 or 1; 1 hides scheduling."""
    step_timeout_s: float = 10.0
    """Seconds without a result after which a step counts as hung, or 20 times its predicted
    duration where that is longer. The ranks are then killed and started again, and their requests
    continue at other workers. 0 for never."""
    structured_outputs_backend: StructuredOutputsBackend = "auto"
    """Library that constrains output: xgrammar; guidance (llguidance); or auto, which is xgrammar,
    and guidance for JSON schemas (those of tools, too) and patterns that it does not enforce."""
    cpu_threads: int = 0
    """Most compute threads per rank on CPU; 0 divides the cores among the ranks."""
    enforce_eager: bool = False
    """Eager mode: launch every kernel by itself instead of replaying CUDA graphs of decode steps,
    of small steps with prompts or drafts, and of passes over running blocks."""
    cudagraph_capture_sizes: tuple[int, ...] = ()
    """Sizes, in tokens, of the steps that are captured as CUDA graphs: decode steps, up to
    --max-num-seqs, and steps with prompts or drafts, up to --max-num-batched-tokens; of a
    block-diffusion model the sizes of its passes, in blocks. Empty takes 1, 2, 4, 8, 16 and so on:
    up to 512 for decode steps, 512 (large models) to 2,048 (small ones) for steps with prompts or
    drafts, two blocks a request for passes."""
    load_format: LoadFormat = "auto"
    """Source of the weights: auto reads the checkpoint's safetensors; dummy draws them at random,
    for measuring speed."""

    cpu_backend: CPUBackend = "auto"
    """Backend that runs steps on CPU: native, the library compiled for this machine; torch,
    PyTorch's operators; auto, native where a C++ compiler is installed and the model's sizes allow
    it."""

    enable_weight_caching: bool = False
    """Weight cache of CPU workers: keep the weights, as the compiled library packs them, in a file
    of the cache folder that all workers of a node map. It pays where several workers of one model
    are on a node, which then holds the weights once, or where workers start often, since nothing is
    read or packed then. The file takes as much disk as the weights take memory; in a pod it is on
    the pod's /tmp."""

    speculative_method: SpeculativeMethod = "none"
    """Speculative decoding: proposer of drafts, of which the model verifies several in one step.
    ngram is prompt lookup: what followed the latest tokens where the request's own text had them
    before; draft is the model of --speculative-model. Output is the same with any of them."""
    speculative_model: str = ""
    """Draft model, for --speculative-method draft: folder or Hub name of a smaller checkpoint with
    the model's tokenizer."""
    speculative_revision: str = field(default="", metadata=_SPECULATIVE)
    """Branch, tag or commit of the draft model; empty takes its main branch."""
    num_speculative_tokens: int = field(default=8, metadata=_SPECULATIVE)
    """Most drafts of a request in one step; speculative_adaptive makes fewer where more do not
    pay."""
    speculative_adaptive: bool = field(default=True, metadata=_SPECULATIVE)
    """Adaptive drafting: draft only where measured acceptance pays for measured cost. False drafts
    as much as it may."""
    speculative_max_utilization: float = field(default=0.8, metadata=_SPECULATIVE)
    """Share of --max-num-seqs from which on nothing is drafted."""
    speculative_max_priority: int = field(default=6, metadata=_SPECULATIVE)
    """Highest priority that is drafted for: steps of more urgent requests stay short."""

    dllm_algorithm: DllmAlgorithm = "LowConfidence"
    """Decoding algorithm of a block-diffusion model, for requests that name none."""
    dllm_fdfo: bool = field(default=True, metadata=_DLLM)
    """First done, first out: a block that is done leaves its batch at once. Otherwise all blocks of
    a batch wait for the last."""
    dllm_threshold: float | None = field(default=None, metadata=_DLLM)
    """Probability above which a position of a block is decided; None takes the algorithm's own
    (0.95 of LowConfidence, 0.5 of JointThreshold)."""
    dllm_disable: tuple[str, ...] = field(default=(), metadata=_DLLM)
    """Optimizations of block diffusion to turn off, to measure what each gains; a list of names:
    inplace (running blocks keep slot and pages, and continue while none is done), mixed_rounds
    (prompts beside running blocks, many blocks at once), fused_commit (a finished block's last pass
    rides on the next one's first), skip_last_commit (no last pass of a request's last block),
    report_at_once (an edit that changes nothing ends its block), early_exit (a block is left at the
    end token), masked_logits (only undecided positions are scored), skip_unread (at positions that
    are not scored the last layer computes only keys and values)."""

    def __post_init__(self) -> None:
        SchedulingOptions.__post_init__(self)
        self._check_speculation()
        self._check_diffusion()
        if self.tensor_parallel_size < 1:
            raise ValueError("--tensor-parallel-size must be at least 1")
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ValueError(
                "--enable-expert-parallel shares experts out among ranks, and there is one: set "
                "--tensor-parallel-size, or leave it out"
            )
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ValueError(f"--page-size must be a power of two, got {self.page_size}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError("--max-model-len must be at least 2")
        if self.kv_cache_tokens is not None and self.kv_cache_tokens < self.page_size:
            raise ValueError(
                f"--kv-cache-tokens must be at least one page ({self.page_size} tokens)"
            )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError("--gpu-memory-utilization must be in (0, 1]")
        if self.host_cache_gib and not self.enable_prefix_caching:
            raise ValueError(
                "--host-cache-gib extends the prefix cache: leave out --no-enable-prefix-caching"
            )
        if self.batch_invariant and self.attention_backend in ("flashinfer", "flash"):
            raise ValueError(
                f"--attention-backend {self.attention_backend} is not batch-invariant; "
                "use auto, or --no-batch-invariant"
            )
        if self.cpu_backend == "native" and self.attention_backend != "auto":
            raise ValueError(
                "--cpu-backend native attends by itself: leave out --attention-backend "
                f"{self.attention_backend}"
            )
        if self.overlap_depth not in (0, 1):
            raise ValueError(f"--overlap-depth must be 0 or 1, got {self.overlap_depth}")
        if any(size < 1 for size in self.cudagraph_capture_sizes):
            raise ValueError("--cudagraph-capture-sizes must be numbers of at least 1")
        for name in ("cpu_threads", "host_cache_gib", "step_timeout_s"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{option_name(self, name)} must not be negative, got {value}")

    @property
    def cpu_steps(self) -> CPUBackend:
        """Backend that runs steps on CPU: torch where an attention backend was named."""
        return "torch" if self.attention_backend != "auto" else self.cpu_backend

    @property
    def checkpoint(self) -> str:
        """Name by which the model's files are loaded: NAME, or NAME@REVISION."""
        return at_revision(self.model, self.revision)

    @property
    def tokenizer_checkpoint(self) -> str:
        """Name by which the tokenizer's files are loaded: its own, or the model's."""
        return self.tokenizer or self.checkpoint

    @property
    def draft_checkpoint(self) -> str:
        """Name by which the draft model's files are loaded: NAME, or NAME@REVISION."""
        return at_revision(self.speculative_model, self.speculative_revision)

    def with_limits(self, max_num_seqs: int, max_num_batched_tokens: int) -> EngineConfig:
        """This configuration with these limits where it leaves them to the device (0).

        A default gives way to a limit that is set: there are at least as many tokens as requests.
        """
        tokens = self.max_num_batched_tokens or max(max_num_batched_tokens, self.max_num_seqs)
        return replace(
            self,
            max_num_seqs=self.max_num_seqs or min(max_num_seqs, tokens),
            max_num_batched_tokens=tokens,
        )

    def _check_speculation(self) -> None:
        if (self.speculative_method == "draft") != bool(self.speculative_model):
            raise ValueError("--speculative-method draft and --speculative-model go together")
        if self.speculative_revision and not self.speculative_model:
            raise ValueError(
                f"{option_name(self, 'speculative_revision')} is of a --speculative-model: give "
                "it, too"
            )
        if self.num_speculative_tokens < 1:
            raise ValueError(
                f"{option_name(self, 'num_speculative_tokens')} must be at least 1; "
                "--speculative-method none drafts nothing"
            )
        if self.speculative_max_utilization < 0.0:
            name = option_name(self, "speculative_max_utilization")
            raise ValueError(f"{name} must not be negative, got {self.speculative_max_utilization}")

    def _check_diffusion(self) -> None:
        features = get_args(DllmFeature)
        if unknown := [name for name in self.dllm_disable if name not in features]:
            name = option_name(self, "dllm_disable")
            raise ValueError(f"{name}: no {unknown[0]}, choose from {', '.join(features)}")
        if self.dllm_threshold is not None and not 0.0 <= self.dllm_threshold <= 1.0:
            name = option_name(self, "dllm_threshold")
            raise ValueError(f"{name} must be in [0, 1], got {self.dllm_threshold}")

    @property
    def dllm_features(self) -> tuple[str, ...]:
        """Optimizations of block diffusion that are on."""
        return tuple(name for name in get_args(DllmFeature) if name not in self.dllm_disable)


def pinned(config: EngineConfig) -> EngineConfig:
    """`config` with its revisions resolved to commits, so that later loads read the same files.

    Raises as `worker.protocol.hub.commit_of` does.
    """
    revision, draft_revision = commit_of(config.checkpoint), ""
    if config.speculative_model:
        draft_revision = commit_of(config.draft_checkpoint)
    return replace(config, revision=revision, speculative_revision=draft_revision)
