"""Random small models, each trained with and without swapping, and compared to the bit.

``python -m tests.fuzz --count 1000`` trains random Megatron models in one process, ``--ranks 2`` over gloo, ``--kind
modules`` random ``nn.Module``s with ``swap.activations``. A seed gives the same case again: ``python -m tests.fuzz
--seed 17`` prints the case, the outcome and the first difference.

``megatron_case`` makes a case from a seed, ``megatron_training`` trains once with Megatron's real trainer,
``megatron_pair`` compares; ``module_case`` does all that for modules. ``faults``: defects that the fuzz must find.
"""
