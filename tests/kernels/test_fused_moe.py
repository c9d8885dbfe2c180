"""Mixtures of experts against a naive reference, and bitwise independence of other tokens."""

from __future__ import annotations

import torch

from kernels import ExpertBiases, Routing, choose_experts, clamped_swiglu
from kernels.fused_moe import Activation, ExpertChoice, Experts, ExtraTerms, fused_moe
from tests.support.kernels.experts import make_experts, make_quantized_experts


def make_case() -> tuple[torch.Tensor, Experts, ExpertChoice]:
    torch.manual_seed(2)
    x, experts = torch.randn(37, 48), make_experts(6, hidden=48, inner=40)
    expert_ids = torch.stack([torch.randperm(6)[:2] for _ in range(37)])
    return x, experts, ExpertChoice(expert_ids, torch.rand(37, 2))


def rows_of(choice: ExpertChoice, rows: slice) -> ExpertChoice:
    return ExpertChoice(choice.expert_ids[rows], choice.weights[rows])


def test_equals_all_experts_written_out() -> None:
    x, experts, choice = make_case()
    gate, up = torch.einsum("th,enh->etn", x, experts.gate_up.values).chunk(2, dim=-1)
    inner = torch.nn.functional.silu(gate) * up
    every = torch.einsum("eti,ehi->eth", inner, experts.down.values)
    tokens = torch.arange(37).unsqueeze(1)
    expected = (every[choice.expert_ids, tokens] * choice.weights.unsqueeze(2)).sum(1)
    out = fused_moe(x, experts, choice)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert fused_moe(x[:0], experts, rows_of(choice, slice(0))).shape == (0, 48)


def test_biases_and_another_activation() -> None:
    x, experts, choice = make_case()
    biases = ExpertBiases(torch.randn(6, 80), torch.randn(6, 48))
    inner = torch.einsum("th,enh->etn", x, experts.gate_up.values) + biases.gate_up[:, None]
    inner = clamped_swiglu(inner.flatten(0, 1), 1.702, 0.5).unflatten(0, (6, 37))
    every = torch.einsum("eti,ehi->eth", inner, experts.down.values) + biases.down[:, None]
    tokens = torch.arange(37).unsqueeze(1)
    expected = (every[choice.expert_ids, tokens] * choice.weights.unsqueeze(2)).sum(1)
    activation = Activation("clamped", 1.702, 0.5)
    out = fused_moe(x, experts, choice, biases=biases, activation=activation)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_what_is_added_and_what_weighs_inputs() -> None:
    """Zero experts are weighted, the shared expert is multiplied by the sigmoid of its gate, and
    weights of inputs differ from weights of outputs."""
    x, experts, choice = make_case()
    shared, gate = torch.randn(37, 48), torch.randn(37, 1)
    fewer = Experts(*(weight._replace(values=weight.values[:4]) for weight in experts))
    zero_weight = (choice.weights * (choice.expert_ids >= 4)).sum(1, keepdim=True)
    expected = fused_moe(x, fewer, choice) + zero_weight * x + gate.sigmoid() * shared
    out = fused_moe(x, fewer, choice, extra=ExtraTerms(shared, gate, first_zero_expert=4))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)

    ones = ExpertChoice(choice.expert_ids[:, :1], torch.ones(37, 1))
    weighted = ExpertChoice(ones.expert_ids, choice.weights[:, :1])
    expected = fused_moe(x * weighted.weights, experts, ones)
    out = fused_moe(x, experts, weighted, weighs_inputs=True)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_experts_that_are_not_here_yield_nothing() -> None:
    x, experts, choice = make_case()
    biases = ExpertBiases(torch.randn(6, 80), torch.randn(6, 48))
    whole, parts = fused_moe(x, experts, choice, biases=biases), []
    for here in (slice(0, 4), slice(4, 6)):
        own = Experts(*(weight._replace(values=weight.values[here]) for weight in experts))
        own_biases = ExpertBiases(*(bias[here] for bias in biases))
        parts.append(fused_moe(x, own, choice, biases=own_biases, first_expert=here.start))
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-5, atol=1e-5)
    for elsewhere in (6, -6):
        assert not fused_moe(x, experts, choice, first_expert=elsewhere).any()


def test_bits_do_not_depend_on_company() -> None:
    x, experts, choice = make_case()
    whole = fused_moe(x, experts, choice)
    for rows in (slice(0, 1), slice(3, 20), slice(36, 37)):
        assert torch.equal(fused_moe(x[rows], experts, rows_of(choice, rows)), whole[rows])


def test_bits_of_what_is_added_do_not_depend_on_company_either() -> None:
    """Scores whose rows are not a multiple of the vector size."""
    x, experts, _ = make_case()
    scores, shared = torch.randn(37, 7), torch.randn(37, 48)

    def run(rows: slice) -> torch.Tensor:
        routing = Routing(top_k=2, scoring="sigmoid", normalize=True)
        choice = choose_experts(scores[rows, :6], None, routing)
        extra = ExtraTerms(shared[rows], scores[rows, 6:])
        return fused_moe(x[rows], experts, choice, extra=extra)

    whole = run(slice(None))
    for rows in (slice(0, 1), slice(3, 20), slice(36, 37)):
        assert torch.equal(run(rows), whole[rows])


def test_fp8_experts_come_to_what_the_dequantized_ones_come_to() -> None:
    x, _, choice = make_case()
    quantized, dequantized = make_quantized_experts(6, hidden=48, inner=40, dtype=x.dtype)
    assert torch.equal(fused_moe(x, quantized, choice), fused_moe(x, dequantized, choice))
