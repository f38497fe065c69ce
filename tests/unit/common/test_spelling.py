"""Messages name settings as the caller does."""

import inspect

import pytest
from megatron import swap

from megatron.swap.common.plan import Infeasible
from megatron.swap.common.spelling import ACTIVATIONS, INSTALL


@pytest.mark.parametrize(
    ("text", "of_activations", "of_install"),
    [
        ("Raise --swap-host-gib.", "Raise host_gib=.", 'Raise config["host_gib"].'),
        ("--swap-memory-gib -1: must be 1.", "memory_gib=-1: must be 1.", "memory_gib=-1: must be 1."),
        ("--swap-optimizer 0.5: why", "optimizer=0.5: why", 'config["optimizer"]=0.5: why'),
        ("Lower --swap-min-mib to 3. If so, add --swap-host-unchecked.", "Lower min_mib= to 3.",
         'Lower config["min_mib"] to 3. If so, add config["host_unchecked"].'),
        ("Drop --recompute-modules mlp.", "Drop --recompute-modules mlp.", "Drop --recompute-modules mlp."),
    ],
)  # fmt: skip
def test_flags_are_the_arguments_of_the_call(text: str, of_activations: str, of_install: str) -> None:
    assert ACTIVATIONS(text) == ACTIVATIONS(ACTIVATIONS(text)) == of_activations
    assert INSTALL(text) == INSTALL(INSTALL(text)) == of_install


def test_errors_keep_their_class_and_figures() -> None:
    with pytest.raises(Infeasible, match=r"^Raise memory_gib=$") as found, INSTALL.errors():
        raise Infeasible("Raise --swap-memory-gib", 3.0)
    assert found.value.smallest_gib == 3.0
    with pytest.raises(ZeroDivisionError, match="--swap-layers"), INSTALL.errors():
        raise ZeroDivisionError("--swap-layers")


@pytest.mark.parametrize(("spelling", "call"), [(ACTIVATIONS, swap.activations), (INSTALL, swap.install)])
def test_the_arguments_are_those_of_the_call(spelling: object, call: object) -> None:
    names = {*inspect.signature(call).parameters} - {"model", "optimizer", "config", "log", "autocast_cache"}  # type: ignore[arg-type]
    assert spelling.arguments == names  # type: ignore[attr-defined]
