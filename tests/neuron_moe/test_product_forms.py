"""In which form a CPU multiplies with experts: the same numbers, measured once, kept safely."""

import copy
import json
import logging
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from neuron_moe import ExpertMLPsV2, RoutedExpertsMLPOpsConfig
from neuron_moe.backends import custom_kernels, form_choice, form_times
from neuron_moe.backends.chosen_experts import chosen_experts
from neuron_moe.plan import Step
from neuron_moe.weights.expert_weights import ExpertWeights, LocalRouting
from neuron_moe.weights.packed import PackedMatrices, is_packing_available
from neuron_moe.weights.product_forms import (
    BUCKETS,
    FORMS,
    PACKED_FORMS,
    Compute,
    ProductForms,
    bucket_of,
)

EXPERTS, TOP_K, HIDDEN, INNER = 16, 4, 64, 48


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of times, one for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return form_times.cache_path()


def build(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> ExpertMLPsV2:
    config = RoutedExpertsMLPOpsConfig(EXPERTS, HIDDEN, INNER, TOP_K, "silu", True, bias=bias)
    layer = ExpertMLPsV2(config, dtype=dtype).eval().requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_(std=0.1)
    return layer


def routing(tokens: int, *, scales_input: bool = False, missing: bool = False) -> LocalRouting:
    index_TK = torch.rand(tokens, EXPERTS).topk(TOP_K).indices.to(torch.int32)
    affinities_TK = torch.rand(tokens, TOP_K)
    if missing:  # of padding tokens, or on other ranks
        is_none_TK = torch.rand(tokens, TOP_K) < 0.4
        index_TK = index_TK.masked_fill(is_none_TK, -1)
        affinities_TK = affinities_TK.masked_fill(is_none_TK, 0.0)
    return LocalRouting(index_TK, affinities_TK, scales_input)


def by_definition(hidden_TH: Tensor, chosen: LocalRouting, layer: ExpertMLPsV2) -> Tensor:
    """Every choice by itself, in float64."""
    weights = layer.weights()
    assert weights.gate_up_bias_EI is not None
    assert weights.down_bias_EH is not None
    out_TH = torch.zeros(hidden_TH.shape, dtype=torch.float64)
    for token, experts in enumerate(chosen.expert_index_TK.tolist()):
        for choice, expert in enumerate(experts):
            affinity = chosen.expert_affinities_TK[token, choice].double()
            if expert < 0:
                continue
            row_H = hidden_TH[token].double() * (affinity if chosen.scales_input else 1.0)
            up_I = row_H @ weights.gate_up_proj_EHI[expert].double()
            gate_I, up_I = (up_I + weights.gate_up_bias_EI[expert].double()).chunk(2)
            act_I = torch.nn.functional.silu(gate_I) * up_I
            row_H = act_I @ weights.down_proj_EIH[expert].double()
            row_H = row_H + weights.down_bias_EH[expert].double()
            out_TH[token] += row_H * (1.0 if chosen.scales_input else affinity)
    return out_TH


@pytest.mark.parametrize("form", form_times._forms_here())
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("scales_input", [False, True], ids=["output", "input"])
@pytest.mark.parametrize("missing", [False, True], ids=["all-here", "some-elsewhere"])
def test_every_form_computes_the_formula(
    form: str, tokens: int, scales_input: bool, missing: bool
) -> None:
    layer, hidden_TH = build(), torch.randn(tokens, HIDDEN)
    chosen = routing(tokens, scales_input=scales_input, missing=missing)
    expected = by_definition(hidden_TH, chosen, layer)
    layer.settle_forms(form)
    out_TH = chosen_experts(hidden_TH, chosen, layer.weights())
    torch.testing.assert_close(out_TH.double(), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():  # where parts run side by side
        out_TH = chosen_experts(hidden_TH, chosen, layer.weights())
    torch.testing.assert_close(out_TH.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", form_times._forms_here())
def test_bfloat16_differs_between_forms_by_rounding_alone(form: str) -> None:
    layer, hidden_TH = build(torch.bfloat16), torch.randn(9, HIDDEN).bfloat16()
    if form in PACKED_FORMS and not is_packing_available(torch.bfloat16):
        with pytest.raises(ValueError, match=r"this processor have no packed torch\.bfloat16"):
            layer.settle_forms(form)
        return
    chosen = routing(9)
    plain = chosen_experts(hidden_TH, chosen, layer.weights(), "plain")
    layer.settle_forms(form)
    out_TH = chosen_experts(hidden_TH, chosen, layer.weights())
    assert float((out_TH - plain).abs().max()) <= 0.02 * float(plain.abs().max())


def test_weights_of_a_type_that_the_processor_cannot_pack_stay_plain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(form_times, "is_packing_available", lambda dtype: dtype is torch.float32)
    weights = build(torch.bfloat16).weights()
    assert form_times._packed(weights) is None
    assert "packed" not in form_times.linear_forms(weights.down_proj_EIH[0])


def test_a_fixed_form_holds_for_every_step_and_is_told() -> None:
    layer = build()
    layer.settle_forms("grouped")
    for tokens in (1, 30, 5000):
        assert layer.weights().product_form(tokens) == "grouped"
        (note,) = layer.plan(Step("prefill", tokens)).notes()
        assert note == "expert products are grouped: fixed by an option"
    assert build().plan(Step("decode", 1)).notes() == ()


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match=r"form='packt'"):
        build().settle_forms("packt")
    with pytest.raises(ValueError, match="must be float32 or bfloat16 on the CPU"):
        build(torch.float16).settle_forms("packed")


def test_a_run_of_experts_keeps_their_packed_matrices() -> None:
    assert ProductForms.fixed("plain").run(slice(1, 3)).packed is None
    first, down = torch.randn(4, 8, 6), torch.randn(4, 6, 8)
    packed = (PackedMatrices(first), PackedMatrices(down))
    part = replace(ProductForms.fixed("packed"), packed=packed).run(slice(1, 3)).packed
    assert part is not None
    assert [each.shape for each in part] == [(2, 8, 6), (2, 6, 8)]
    assert torch.equal(part[0].unpack(), first[1:3])
    assert torch.equal(part[1].unpack(), down[1:3])


def test_a_share_of_a_bias_that_is_not_there_changes_nothing() -> None:
    layer = build(bias=False)
    hidden_TH, chosen = torch.randn(3, HIDDEN), routing(3)
    whole, part = layer.weights(), replace(layer.weights(), down_bias_scale=0.5)
    assert torch.equal(
        chosen_experts(hidden_TH, chosen, whole), chosen_experts(hidden_TH, chosen, part)
    )


def test_a_bucket_holds_its_steps() -> None:
    assert [bucket_of(n) for n in (1, 2, 4, 5, 512, 100_000)] == [1, 4, 4, 16, 512, 512]


def times_of(packed: float, plain: float) -> dict[str, float]:
    return {"packed": packed, "plain": plain, "grouped": 9.0}


ALWAYS = {
    "packed-wins": (times_of(1, 2), times_of(1, 2), True, {"packed"}),
    "plain-wins": (times_of(2, 1), times_of(2, 1), True, {"plain"}),
    "both-are-kept": (times_of(2, 1), times_of(1, 2), True, {"packed", "plain"}),
    "no-room-for-both": (times_of(2, 1), times_of(1, 3), False, {"packed"}),
    "no-gain-from-both": (times_of(1.04, 1), times_of(1, 3), True, {"packed"}),
    "too-small-a-gain-for-twice-the-memory": (times_of(1.4, 1), times_of(1, 3), True, {"packed"}),
}


@pytest.mark.parametrize("case", ALWAYS)
def test_the_fastest_form_is_taken_in_the_memory_there_is(case: str) -> None:
    one, more, has_room, expected = ALWAYS[case]
    times = {bucket: one if bucket == 1 else more for bucket in BUCKETS}
    forms = form_choice.choose(times, lambda: has_room)
    assert set(forms.by_bucket.values()) == expected
    assert "[measured on " in forms.why(1)


def test_measured_forms_are_told_with_their_times() -> None:
    layer = build()
    layer.settle_forms()
    (note,) = layer.plan(Step("decode", 1)).notes()
    form = layer.weights().product_form(1)
    assert note.startswith(f"expert products are {form}: a sample took ")
    assert form_times.machine() in note


def test_a_layer_is_measured_once_for_a_machine(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build().settle_forms()
    known = json.loads(cache.read_text())
    assert len(known) == 1
    assert next(iter(known)).startswith(f"{form_times.machine()}; 16x64x96 16x48x64 float32")

    def measure(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(form_times, "measure", measure)
    build().settle_forms()
    with pytest.raises(AssertionError, match="measured again"):
        build(torch.bfloat16).settle_forms()


def test_a_measurement_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = 0
    call = form_times.chosen_experts

    def count(*args: object) -> Tensor:
        nonlocal runs
        runs += 1
        return call(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(form_times, "MOST_SECONDS", 0.0)
    monkeypatch.setattr(form_times, "chosen_experts", count)
    build().settle_forms()
    assert runs <= 2 * len(FORMS) * len(BUCKETS)  # a warm-up and one run each


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1}', '{"a": {"b": {}}}', b"\xff\xfe"])
def test_an_unreadable_file_is_passed_over_with_a_word(
    content: str | bytes, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(content if isinstance(content, bytes) else content.encode())
    with caplog.at_level(logging.WARNING):
        build().settle_forms()
    assert "cannot be read" in caplog.text
    assert len(json.loads(cache.read_text())) == 1


def test_a_folder_that_cannot_be_written_is_no_error(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.write_text("a file, where the folder should be")
    build().settle_forms()
    assert "cannot be written" in caplog.text


def _write_often(path: Path, number: int) -> None:
    for run in range(30):
        form_times.write_times(path, {f"{number}-{run}": {1: {"plain": 1.0}}})


def test_processes_may_write_at_once(cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_often, args=(cache, number)) for number in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if cache.exists():
            json.loads(cache.read_text())  # whole at any time
    for writer in writers:
        writer.join()
    assert len(form_times.read_times(cache)) >= 30
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]


def settle_both(layer: ExpertMLPsV2, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one token take plain matrices and more packed ones."""
    times = {bucket: times_of(2, 1) if bucket == 1 else times_of(1, 2) for bucket in BUCKETS}
    monkeypatch.setattr(form_choice, "form_times", lambda *_: times)
    monkeypatch.setattr(form_choice, "_leaves_enough", lambda _: True)
    layer.settle_forms()
    assert [layer.weights().product_form(n) for n in (1, 9)] == ["plain", "packed"]


CHANGES: dict[str, Callable[[ExpertMLPsV2], object]] = {
    "in-place": lambda layer: layer.mlp_op.down_proj.weight.mul_(2.0),
    "state-dict": lambda layer: layer.load_state_dict(
        {name: 2.0 * value for name, value in layer.state_dict().items()}
    ),
    "dtype": lambda layer: layer.to(torch.bfloat16),
}


@pytest.mark.parametrize("layout", ["packed", "both"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_what_counts(
    change: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, twin, hidden_TH = build(), build(), torch.randn(9, HIDDEN)
    twin.load_state_dict(layer.state_dict())
    if layout == "both":
        settle_both(layer, monkeypatch)
    elif change == "in-place":
        return  # there is no plain weight to write to
    else:
        layer.settle_forms("packed")
    for each in (layer, twin):
        CHANGES[change](each)
    hidden_TH = hidden_TH.to(twin.mlp_op.down_proj.weight.dtype)
    chosen = routing(9)
    for each in (layer, twin):
        each.weights()
    expected = chosen_experts(hidden_TH, chosen, twin.weights())
    out_TH = chosen_experts(hidden_TH, chosen, layer.weights())
    rounding = 0.02 if hidden_TH.dtype == torch.bfloat16 else 1e-5
    difference = (out_TH - expected).detach().abs().max()
    assert float(difference) <= rounding * float(expected.detach().abs().max())


@pytest.mark.parametrize("layout", ["packed", "both"])
def test_the_state_dict_and_copies_are_those_of_plain_weights(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, hidden_TH, chosen = build(), torch.randn(9, HIDDEN), routing(9)
    before = copy.deepcopy(layer.state_dict())
    if layout == "both":
        settle_both(layer, monkeypatch)
    else:
        layer.settle_forms("packed")
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name])
    out_TH = chosen_experts(hidden_TH, chosen, layer.weights())
    again_TH = chosen_experts(hidden_TH, chosen, copy.deepcopy(layer).weights())
    torch.testing.assert_close(again_TH, out_TH)
    layer.settle_forms("plain")
    assert layer.weights().packed_matrices(is_wanted=True) == (None, None)
    assert torch.equal(layer.mlp_op.down_proj.weight, before["mlp_op.down_proj.weight"])


def test_weights_lie_as_they_were_loaded_once_no_form_is_settled() -> None:
    layer = build()
    layer.settle_forms("transposed")
    assert not layer.mlp_op.down_proj.weight.is_contiguous()
    layer.mlp_op.unsettle_forms()
    assert layer.mlp_op.down_proj.weight.is_contiguous()


class Doubler:
    """A custom kernel that differs from all forms: it gives twice the right numbers."""

    name = "doubler"

    def __init__(self, *, can: bool = True) -> None:
        self.can = can

    def computes(self, weights: ExpertWeights) -> bool:
        return self.can and weights.packed_down is None

    def prepare(self, weights: ExpertWeights) -> Compute:
        own = replace(
            weights,
            gate_up_proj_EHI=weights.gate_up_proj_EHI.detach(),
            down_proj_EIH=weights.down_proj_EIH.detach(),
        )
        return lambda hidden_TH, chosen: 2 * chosen_experts(hidden_TH, chosen, own, "plain")


@pytest.fixture
def doubler(monkeypatch: pytest.MonkeyPatch) -> Doubler:
    kernel = Doubler()
    monkeypatch.setattr(custom_kernels, "_kernels", {})
    custom_kernels.register(kernel)
    return kernel


def test_a_brought_kernel_computes_steps_in_which_no_choice_is_missing(doubler: Doubler) -> None:
    layer, hidden_TH, chosen = build(), torch.randn(5, HIDDEN), routing(5)
    expected_TH = chosen_experts(hidden_TH, chosen, layer.weights())
    layer.settle_forms("doubler")
    out_TH = chosen_experts(hidden_TH, chosen, layer.weights())
    torch.testing.assert_close(out_TH, 2 * expected_TH)
    for other in (routing(5, missing=True), routing(5, scales_input=True)):
        fallen_back = chosen_experts(hidden_TH, other, layer.weights())
        torch.testing.assert_close(
            fallen_back, chosen_experts(hidden_TH, other, layer.weights(), "plain")
        )


def test_a_brought_kernel_that_cannot_compute_a_layer_is_no_form(doubler: Doubler) -> None:
    doubler.can = False
    with pytest.raises(ValueError, match="form='doubler'"):
        build().settle_forms("doubler")


def test_a_brought_kernel_is_measured_beside_the_forms(
    doubler: Doubler, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = form_times.measure(build().weights(), TOP_K, EXPERTS)
    assert all("doubler" in times for times in measured.values())
    times = {bucket: times_of(2, 3) | {"doubler": 1.0} for bucket in BUCKETS}
    times[BUCKETS[-1]] = times_of(1, 2) | {"doubler": 3.0}
    monkeypatch.setattr(form_choice, "form_times", lambda *_: times)
    monkeypatch.setattr(form_choice, "_leaves_enough", lambda _: True)
    layer = build()
    layer.settle_forms()
    assert [layer.weights().product_form(n) for n in (1, 9, 600)] == ["doubler"] * 2 + ["packed"]
    assert "doubler 1e+03 ms" in layer.weights().product_forms.why(1)
    hidden_TH, chosen = torch.randn(5, HIDDEN), routing(5)
    out_TH = chosen_experts(hidden_TH, chosen, layer.weights())
    torch.testing.assert_close(
        out_TH, 2 * chosen_experts(hidden_TH, chosen, layer.weights(), "padded")
    )


def test_changed_weights_put_a_brought_kernel_away(doubler: Doubler) -> None:
    layer, hidden_TH, chosen = build(), torch.randn(5, HIDDEN), routing(5)
    layer.settle_forms("doubler")
    with torch.no_grad():
        layer.mlp_op.down_proj.weight.mul_(2.0)
    out_TH = chosen_experts(hidden_TH, chosen, layer.weights())
    torch.testing.assert_close(out_TH, chosen_experts(hidden_TH, chosen, layer.weights(), "plain"))
