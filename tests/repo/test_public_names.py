"""The public names."""

import neuron_moe


def test_public_names_exist_and_have_docstrings() -> None:
    for name in neuron_moe.__all__:
        value = getattr(neuron_moe, name)
        assert value.__doc__, name


def test_modules_are_reachable_as_in_the_guide() -> None:
    assert neuron_moe.routing.RouterTopK is neuron_moe.RouterTopK
    assert neuron_moe.routing.GroupLimitedRouter is neuron_moe.GroupLimitedRouter
