"""Random small models, each trained with and without swapping, and compared to the bit.

``python -m tests.fuzz --count 1000`` trains random Megatron models in one process, ``--ranks 2`` over gloo, ``--kind
modules`` random ``nn.Module``s with ``swap.activations``. A seed gives the same case again: ``python -m tests.fuzz
--seed 17`` prints the case, the outcome and the first difference.

====================== ============================================================================================
``megatron_case``      makes a case from a seed: flags of Megatron and of swapping
``megatron_training``  trains once in this process with Megatron's real trainer, and keeps every result
``megatron_pair``      runs a case: without swapping, then with each of its swap plans
``module_case``        the same for random modules and ``swap.activations``
``records``            the results of a training run, and their first difference
``worker``, ``pool``   processes that live on for many cases, and the clock that stops those that hang
``faults``             defects to plant in the product, which the fuzz must find
====================== ============================================================================================
"""
